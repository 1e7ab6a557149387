"""Traces replayed on allocators of device memory: what each reserves, and how long it takes.

    python asv_benches/gpu/replay.py [--with NAME,...] [--trace NAME ...] [--file FILE ...]
                                     [--quick] [--json FILE] [--into FILE --commit COMMIT]

Every allocator replays every trace in a process of its own. In the first pass its own figure of
what it has reserved is read after every allocation, and the device's free memory whenever that
figure has changed. Then come passes without reading anything, which are timed; the fastest counts.
All is called from one Python loop, whose own cost is the row "loop". Memory is not written to.

    peak reserved  the most that the allocator has of the device, as it says itself
    / peak live    that, by the most bytes that the trace has live, as asked for
    of the device  the same of what the device no longer has free; in the driver's units
    later          as "/ peak live", after the timed passes
    live then      what was live when most was reserved, by the most that ever is

`--file` takes a file of arenapy's, or torch's memory snapshot. `--into` stores the figures in the
results file, beside report.py's. The exit status is 1 if arenapy has taken more over peak live
than torch, RMM's pool or CuPy on any trace, or if one of them could not be run. The memory taken
is the larger of both accounts: the driver maps 2 MiB at a time, and not every allocator counts it.
"""

import argparse
import gc
import json
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

if not __package__:  # run as a script; behind what is installed
    sys.path.append(str(Path(__file__).resolve().parents[2]))

import numpy as np
from rich.console import Console
from rich.table import Table

from arenapy import trace
from arenapy.base.text import format_bytes
from arenapy.commands.replay.device import HEAPS, PEERS, Watch, run, script, streams_of
from arenapy.commands.replay.program import Program, program
from arenapy.trace.torch_snapshot import is_pickle
from asv_benches.gpu.traces import made_to_fragment, traces
from asv_benches.support.results import stamp, store

OURS = "arenapy"
TIMED_PASSES = 3
COMPARED = [name for name in HEAPS if name not in ("arenapy-bump", "arenapy-slab", "driver")]
ONLY_SHOWN = ("loop", "rmm-arena")  # what is no allocator, or is not compared
SECONDS = 300  # for one allocator and one trace


def measure(heap, steps, streams, native, device_used=lambda: 0):
    """The figures of one heap and one program, in this process.

    device_used : gives the bytes of the device that are not free
    """
    lines = script(steps, streams, native)
    live = steps.live()
    watch = Watch(heap, device_used)
    run(heap, lines, steps.count, watch)
    gc.collect()
    gc.disable()
    seconds = min(run(heap, lines, steps.count) for _ in range(TIMED_PASSES))
    gc.enable()
    later = heap.reserved()
    peak = int(live.max())
    return {
        "peak_live": peak,
        "peak_reserved": watch.most,
        "ratio": watch.most / peak,
        "device_ratio": watch.most_device / peak,
        "later_ratio": max(watch.most, later or 0) / peak,
        "live_at_peak": int(live[watch.at]) / peak,
        "event_ns": seconds / len(lines) * 1e9,
        "note": heap.note,
    }


def in_this_process(name, folder):
    """Replay one trace with one allocator; this is the work of one process."""
    steps = Program.load(folder)
    streams = np.load(folder / "streams.npy")
    heap = HEAPS[name](int(steps.live().max()))
    n_streams = streams.max(initial=0)
    if name == "loop":  # which needs no device
        return measure(heap, steps, streams, [None] * (1 + n_streams))
    from arenapy import cuda

    def device_used():
        now = cuda.memory_info(0)
        return now.total_bytes - now.free_bytes

    native = [None, *(heap.native(cuda.Stream()) for _ in range(n_streams))]
    return measure(heap, steps, streams, native, device_used)


def child(name, folder):
    """Print the figures as JSON, or why there are none."""
    try:
        found = in_this_process(name, folder)
    except Exception as error:
        text = str(error).strip().splitlines()[:1]
        missing = isinstance(error, ImportError) or type(error).__name__ == "Unavailable"
        what = "missing" if missing else "failed"
        found = {"note": f"{what}: {type(error).__name__}: {' '.join(text)}"}
    print(json.dumps(found))


def in_a_process(name, folder):
    """The figures of one allocator and one trace; a "note" alone if there are none."""
    command = [sys.executable, __file__, "--child", name, str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return {"note": f"failed: not done after {SECONDS} s"}
    if done.returncode:
        return {"note": f"failed: {' '.join(done.stderr.strip().splitlines()[-1:])}"}
    return json.loads(done.stdout.splitlines()[-1])


def replay(made, names):
    """{name: figures} of a trace."""
    steps = program(made)
    with tempfile.TemporaryDirectory(prefix="arenapy-gpu-replay-") as folder:
        folder = Path(folder)
        steps.save(folder)
        np.save(folder / "streams.npy", streams_of(made))
        return {name: in_a_process(name, folder) for name in names}


def taken(found):
    """The larger of both accounts, over peak live; None: it was not run."""
    return max(found["ratio"], found["device_ratio"]) if "ratio" in found else None


def verdict(results):
    """(whether arenapy has taken no more than any peer, the same in words)."""
    ours = taken(results.get(OURS, {}))
    if ours is None:
        return False, f"NOT SHOWN: {OURS} was not run"
    words, good = [], True
    for name in PEERS:
        ratio = taken(results.get(name, {}))
        if ratio is None:
            words.append(f"{name} was not run")
        else:
            words.append(f"{name} {ratio:.3f}{'' if ours <= ratio else ' is less'}")
        good &= ratio is not None and ours <= ratio
    missed = any((taken(results.get(name, {})) or ours) < ours for name in PEERS)
    what = "kept" if good else "MISSED" if missed else "NOT SHOWN"
    return good, f"{what}: {OURS} {ours:.3f}; {', '.join(words)}"


def table(title, results):
    """The figures of a trace."""
    shown = Table(title=title, title_justify="left", title_style="bold")
    heads = ("", "peak reserved", "/ peak live", "of the device", "later", "live then", "an event")
    for head in heads:
        shown.add_column(head, justify="right" if head else "left")
    for name, found in results.items():
        if "ratio" not in found:
            shown.add_row(name, found["note"].partition(":")[0], style="yellow")
            continue
        ratios = [f"{found[key]:.3f}" for key in ("ratio", "device_ratio", "later_ratio")]
        shown.add_row(
            name,
            format_bytes(found["peak_reserved"]),
            *ratios,
            f"{found['live_at_peak']:.0%}",
            f"{found['event_ns']:.0f} ns",
        )
    return shown


def account(found):
    """Memory taken / peak live of an allocator; in brackets by its own account, if that is less."""
    if "ratio" not in found:
        return ""
    said, of_device = f"{found['ratio']:.3f}", f"{found['device_ratio']:.3f}"
    return said if float(of_device) <= float(said) else f"{of_device} ({said})"


def stored(figures):
    """The table of all traces, for the results file."""
    names = [name for name in figures[0]["results"] if name not in ONLY_SHOWN]
    rows = []
    for trace_ in figures:
        cells = [account(trace_["results"].get(name, {})) for name in names]
        rows.append([trace_["trace"], *cells, "yes" if trace_["kept"] else "**no**"])
    heads = ["", *names, "arenapy no worse than torch, CuPy and RMM's pool"]
    return {"head": heads, "rows": rows}


def machine():
    """The device and the versions that the figures depend on."""
    from arenapy import cuda

    found = {"python": platform.python_version(), "device": "none"}
    try:
        found["device"] = ", ".join(one.name for one in cuda.devices()) or "none"
    except (cuda.Unavailable, cuda.CudaError, MemoryError) as error:  # others may have it all
        found["device"] = f"none: {error}"
    for name in (OURS, *PEERS):
        found[name] = HEAPS[name].version()
    return found


def names_in(text):
    """Of ``--with``."""
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in HEAPS:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(HEAPS)}")
    return names


def chosen(options):
    """{name: Trace} of what was asked for."""
    found = {
        Path(file).name: trace.from_torch(file) if is_pickle(file) else trace.load(file)
        for file in options.file
    }
    if options.trace or not found:
        there = traces(options.quick)
        wanted = options.trace or list(there)
        there |= made_to_fragment(options.quick)  # if asked for by name
        if unknown := [name for name in wanted if name not in there]:
            raise SystemExit(f"no trace is called {unknown[0]!r}; there are: {', '.join(there)}")
        found |= {name: there[name] for name in wanted}
    return found


def main(argv=None):
    """Run, print; 0 if every promise is kept."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        epilog="\n".join(f"{name:<20} {heap.about}" for name, heap in HEAPS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--with", dest="names", type=names_in, default=COMPARED)
    parser.add_argument("--trace", action="append", default=[], help="one of the traces here")
    parser.add_argument("--file", action="append", default=[], help="a trace in a file")
    parser.add_argument("--quick", action="store_true", help="short random traces")
    parser.add_argument("--json", metavar="FILE", help="write the figures there too")
    parser.add_argument("--into", type=Path, metavar="FILE", help="store the figures there")
    parser.add_argument("--commit", default="unknown", help="what is measured, for the stamp")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.child:
        child(options.child[0], Path(options.child[1]))
        return 0
    console = Console()
    about = machine()
    console.print(", ".join(f"{name} {value}" for name, value in about.items()), highlight=False)
    figures, good = [], True
    for name, made in chosen(options).items():
        results = replay(made, options.names)
        kept, words = verdict(results)
        good &= kept
        console.print(f"\n{made.summary()}", highlight=False, markup=False)
        console.print(table(name, results))
        for heap, found in results.items():
            if found["note"]:
                console.print(f"{heap}: {found['note']}", highlight=False, markup=False)
        console.print(words, style="green" if kept else "bold red", highlight=False)
        figures.append({"trace": name, "verdict": words, "kept": kept, "results": results})
    if options.json:
        Path(options.json).write_text(json.dumps({"machine": about, "traces": figures}, indent=1))
    if options.into:
        store(options.into, "replay", stamp(options.commit), **stored(figures))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
