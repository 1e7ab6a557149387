"""Traces whose blocks become larger and larger: what allocators take of a device, and who runs out.

    python asv_benches/gpu/growth.py [--quick] [--into FILE --commit COMMIT]

Every allocator replays every trace twice, in one process of its own. First it may take as much as
it likes. The figure is that of replay.py: the most memory that it takes, divided by the most bytes
that are live. Then it may take LIMIT times the most live bytes. Each allocator has its own limit:
`max_bytes` of arenapy's Pool, torch's `set_per_process_memory_fraction`, CuPy's `set_limit`, RMM's
`maximum_pool_size`. "runs out" says after how many of the trace's events.

torch has recorded one of the traces in a training (torch_training_trace.py --longer). It is left
out if its file is not there. `--into` stores the figures in the results file. The exit status is 1
if a Pool over `cuda.Device(grow=True)` runs out.
"""

import argparse
import gc
import json
import subprocess
import sys
from pathlib import Path

if not __package__:  # run as a script; behind what is installed
    sys.path.append(str(Path(__file__).resolve().parents[2]))

from arenapy.commands.replay.device import HEAPS, Arenapy, Cupy, Rmm, Torch, Watch, run, script
from arenapy.commands.replay.program import program
from asv_benches.gpu.replay import streams_of
from asv_benches.gpu.traces import made_to_fragment
from asv_benches.support.results import stamp, store

OURS = "arenapy-grow"
COMPARED = (OURS, "torch", "torch-expandable", "cupy", "rmm")
LIMIT = 1.1
MIB = 1 << 20
SECONDS = 100  # for one allocator


def limited(name, peak):
    """A heap that may take LIMIT times the peak of live bytes. torch's limit is the process's."""
    kind, most = HEAPS[name], int(LIMIT * peak) // MIB * MIB
    if issubclass(kind, Arenapy):
        return kind(peak, max_bytes=most)
    heap = kind(peak)
    if isinstance(heap, Torch):
        import torch

        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(most / total, 0)
    elif isinstance(heap, Cupy):
        heap.pool.set_limit(size=most)
    elif isinstance(heap, Rmm):
        import rmm

        heap.pool = rmm.mr.PoolMemoryResource(
            heap.counted, initial_pool_size=MIB, maximum_pool_size=most
        )
    return heap


def is_full(error):
    """Whether an allocator said that there is no memory left; torch's error is no MemoryError."""
    return isinstance(error, MemoryError) or "OutOfMemory" in type(error).__name__


def ran_out(heap, lines):
    """The event at which there is no memory left; None: all are done. No block stays."""
    blocks, done = {}, 0
    try:
        for slot, nbytes, stream in lines:
            if slot >= 0:
                blocks[slot] = heap.take(nbytes, stream), nbytes, stream
            else:
                heap.give(*blocks.pop(~slot))
            done += 1
    except Exception as error:
        if not is_full(error):
            raise
        return done
    finally:
        while blocks:
            heap.give(*blocks.popitem()[1])
    return None


def taken(heap, lines, count, device_used):
    """The most bytes that it takes: by its own account, or by the device's, if that is more."""
    watch = Watch(heap, device_used)
    run(heap, lines, count, watch)
    return max(watch.most, watch.most_device)


def figures(name, made, device_used):
    """Of a heap and a trace."""
    steps, streams = program(made), streams_of(made)
    from arenapy import cuda

    peak = int(steps.live().max())
    heap = HEAPS[name](peak)
    native = [None, *(heap.native(cuda.Stream()) for _ in range(streams.max(initial=0)))]
    lines = script(steps, streams, native)
    if isinstance(heap, Torch):
        import torch

        torch.cuda.set_per_process_memory_fraction(1.0, 0)  # an earlier trace had a limit
    ratio = taken(heap, lines, steps.count, device_used) / peak
    heap.close()
    del heap
    gc.collect()
    heap = limited(name, peak)
    at = ran_out(heap, lines)
    heap.close()
    return {"ratio": ratio, "ran_out": at, "events": len(lines)}


def child(name, quick):
    """Print the figures of one heap as JSON, a line for each trace."""
    from arenapy import cuda

    def device_used():
        now = cuda.memory_info(0)
        return now.total_bytes - now.free_bytes

    for title, made in made_to_fragment(quick).items():
        print(json.dumps({"trace": title} | figures(name, made, device_used)), flush=True)
        gc.collect()


def in_a_process(name, quick):
    """{trace: figures} of a heap; what it says is printed if it fails."""
    command = [sys.executable, __file__, "--child", name, *["--quick"] * quick]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        print(f"{name}: not done after {SECONDS} s")
        return {}
    if done.returncode:
        print(f"{name}: {' '.join(done.stderr.strip().splitlines()[-1:])}")
    return {one.pop("trace"): one for one in map(json.loads, done.stdout.splitlines())}


def rows(results, titles):
    """Two for each trace: without a limit, and with it."""
    for title in titles:
        found = [results[name].get(title) for name in results]
        yield [title, *("" if one is None else f"{one['ratio']:.3f}" for one in found)]
        yield [f"{title}, {LIMIT} times the live bytes", *map(outcome, found)]


def outcome(found):
    """With a limit, in words."""
    if found is None:
        return ""
    at = found["ran_out"]
    return "done" if at is None else f"runs out at {100 * at / found['events']:.0f} %"


def main(argv=None):
    """Run, print; 0 if ours never runs out."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="smaller blocks")
    parser.add_argument("--into", type=Path, metavar="FILE", help="store the figures there")
    parser.add_argument("--commit", default="unknown", help="what is measured, for the stamp")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.child:
        child(options.child, options.quick)
        return 0
    titles = list(made_to_fragment(options.quick))
    results = {name: in_a_process(name, options.quick) for name in COMPARED}
    head, table = ["", *COMPARED], list(rows(results, titles))
    for row in (head, *table):
        print(f"{row[0]:60}", *(f"{cell:>18}" for cell in row[1:]))
    if options.into:
        store(options.into, "growth", stamp(options.commit), head=head, rows=table)
    ours = [results[OURS].get(title) for title in titles]
    return int(not all(one and one["ran_out"] is None for one in ours))


if __name__ == "__main__":
    sys.exit(main())
