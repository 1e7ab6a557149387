"""Is the advice of `arenapy advise` good? Ten recorded programs, and what longer replays say of it.

    python asv_benches/host/advice.py [--only NAME ...] [--seconds S] [--rounds N] [--scale X]
        [--into FILE --commit COMMIT]

Each program is recorded. `advise` gets the recording, as its command does. Then all settings that
it measured are replayed again, in rounds of their own, all in every round: what is faster is taken
from these rounds alone. The table says, of the advised setting, how many settings are faster by 3 %
and more ("beaten by"), and how many are at all ("rank"), by medians. A program is passed if at most
one is faster by 3 %: the advice is among the best two. `--into` stores the figures in the results
file. The exit status is 1 if fewer than nine of ten are passed.
"""

import argparse
import json
import random
import statistics
import sys
import tempfile
from pathlib import Path

if not __package__:  # run as a script; behind what is installed
    sys.path.append(str(Path(__file__).resolve().parents[2]))

import numpy as np
from rich.console import Console
from rich.table import Table

import arenapy
from arenapy import trace
from arenapy.commands.advise.command import advise
from arenapy.commands.advise.settings import Setting
from arenapy.commands.compare.verdict import WORTH
from arenapy.commands.replay.command import run_worker
from arenapy.commands.replay.program import program
from arenapy.commands.run.command import TRACE_KIND
from arenapy.diagnostics.recorder import Recording
from asv_benches.numpy_programs.traces import images, train
from asv_benches.numpy_programs.workloads import fft_convolution, heat, n_body, network
from asv_benches.support.results import Row, stamp, store
from asv_benches.support.sizes import MIB

NEEDED = 0.9  # of the programs


def of_numpy(work):
    """Record a program whose arrays are in a pool."""

    def record(path, scale):
        pool = arenapy.Pool()
        with Recording(pool, path, kind=TRACE_KIND), arenapy.numpy_memory(pool):
            work(scale)

    return record


def steps(prepare, n=5):
    """A workload: its data, then so many steps."""

    def work(scale):
        step = prepare(scale)
        for _ in range(n):
            step()

    return of_numpy(work)


def few(scale):
    """A short program: some small arrays."""
    kept = [np.arange(100 + i) for i in range(20)]
    return sum(float((array * 2).sum()) for array in kept)


def packets(path, scale):
    """Buffers of one size that come and go in a window of 256."""
    random_ = random.Random(1)
    slab = arenapy.Slab(4096, 300)
    window = [None] * 256
    with trace.record(slab, path):
        for _ in range(round(2_000_000 * scale)):
            at = random_.randrange(len(window))
            window[at] = None
            window[at] = slab.alloc()
        window.clear()


def frames(path, scale):
    """Frames of a hundred objects that all end together."""
    random_ = random.Random(2)
    arena = arenapy.Bump(4 * MIB)
    with trace.record(arena, path):
        for _ in range(round(20_000 * scale)):
            with arena.scope():
                for _ in range(100):
                    arena.alloc(int(2 ** random_.uniform(4, 14)))


def records(path, scale):
    """Small blocks of many sizes, freed in any order, as a parser has them."""
    random_ = random.Random(3)
    pool = arenapy.Pool()
    live = [None] * 5000
    with trace.record(pool, path):
        for _ in range(round(3_000_000 * scale)):
            at = random_.randrange(len(live))
            live[at] = None
            live[at] = pool.alloc(random_.randint(16, 512))
        live.clear()


PROGRAMS = {
    "n bodies": steps(n_body),
    "heat equation": steps(heat),
    "convolution": steps(fft_convolution),
    "perceptron": steps(network),
    "image pipeline": of_numpy(images),
    "transformer training": of_numpy(lambda scale: train(scale / 10)),
    "a few arrays": of_numpy(few),
    "packets": packets,
    "frames": frames,
    "records": records,
}


def judged(made, settings, rounds):
    """{name: median seconds} of rounds in which all settings have their turn."""
    times = {name: [] for name in settings}
    with tempfile.TemporaryDirectory() as folder:
        program(made).save(Path(folder))
        for _ in range(rounds):
            for name in random.sample(list(settings), len(settings)):
                setting = settings[name]
                more = ["--settings", json.dumps(dict(setting.arguments))] * bool(setting.arguments)
                found = run_worker(setting.peer, Path(folder), "--passes", "1", *more)
                times[name].append(found["seconds"])
    return {name: statistics.median(found) for name, found in times.items()}


def settings_of(found):
    """{name: Setting} of what was measured."""
    return {
        one["name"]: Setting(one["peer"], one["arguments"], one["prefault_bytes"])
        for one in found["settings"]
    }


def main(argv=None):
    """Record, advise, judge, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", action="append", choices=PROGRAMS)
    parser.add_argument("--seconds", type=float, default=30.0, help="for each advice")
    parser.add_argument("--rounds", type=int, default=25, help="of the replays that judge")
    parser.add_argument("--scale", type=float, default=0.1, help="of the programs' data")
    parser.add_argument("--into", type=Path, metavar="FILE", help="store the figures there")
    parser.add_argument("--commit", default="unknown", help="what is measured, for the stamp")
    options = parser.parse_args(argv)
    table = Table()
    for name in "", "advice", "word", "beaten by", "rank", "of the best", "of malloc":
        table.add_column(name, justify="left" if name in ("", "advice") else "right")
    passed, lines = 0, []
    chosen = options.only or list(PROGRAMS)
    for name in chosen:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "program.trace"
            PROGRAMS[name](path, options.scale)
            made = trace.load(path)
        found = advise(made, seconds=options.seconds)
        medians = judged(made, settings_of(found), options.rounds)
        own = medians[found["use"]]
        beaten_by = sum(own > (1 + WORTH) * other for other in medians.values())
        passed += beaten_by < 2
        what = f"{name}: settings faster than the advised one"
        lines.append(Row(what, beaten_by, "1", beaten_by < 2, "≤ 1"))
        table.add_row(
            name, found["use"], found["word"], str(beaten_by),
            str(1 + sum(own > other for other in medians.values())),
            f"{own / min(medians.values()):.2f}", f"{own / medians['malloc']:.2f}",
        )  # fmt: skip
        print(f"{name}: {found['advice']['sure']}")
        print(name, {one: f"{1e3 * two:.3f} ms" for one, two in medians.items()}, flush=True)
    Console(width=120).print(table)
    print(f"{passed} of {len(chosen)} are among the best two; {NEEDED:.0%} are needed")
    if options.into:
        needed = NEEDED * len(chosen)
        what = f"advice among the best two, of {len(chosen)} programs"
        lines.insert(0, Row(what, passed, "1", passed >= needed, f"≥ {needed:g}"))
        store(options.into, "advice", stamp(options.commit), lines=lines)
    return passed < NEEDED * len(chosen)


if __name__ == "__main__":
    sys.exit(main())
