"""Launches of a graph whose memory was allocated in its capture, beside before it.

    python asv_benches/gpu/bench_graphs.py [--quick] [--into FILE --commit COMMIT]

A graph has a number of steps. Each step fills a block and copies it to the result. "in the
capture": the step allocates the block and drops it. "before it": all blocks exist before, so that
none is shared. "one block before it": all steps share one. "the driver's": the step allocates and
frees by cuMemAllocAsync, so that the graph has nodes for it. Ways take turns. A figure is one of
many launches before a wait, by the wall. The bytes that a graph holds are shown, too. `--into`
stores the figures in the results file, beside report.py's.

What this does not show: the time of a capture, and graphs that run steps at the same time.
"""

import argparse
import sys
import timeit
from pathlib import Path

if not __package__:  # run as a script; behind what is installed
    sys.path.append(str(Path(__file__).resolve().parents[2]))

from arenapy import Pool, cuda
from asv_benches.gpu.latency import imported
from asv_benches.support.results import Row, stamp, store
from asv_benches.support.rounds import Line, turns
from asv_benches.support.sizes import KIB, MIB, text

STEPS = (1, 10, 100)
SIZES = (4 * KIB, MIB)
BATCH = 50  # launches before a wait
MICRO = 1e6
NO_SLOWER = 1.02  # noise of rounds on one machine

cu = imported("cuda.bindings.driver")


def done(result):
    """The values of a call."""
    error, *values = result
    assert error == 0, error
    return values[0] if len(values) == 1 else values


class Launches:
    """An executable graph, whose `timeit` gives the seconds of a launch."""

    def __init__(self, pool, stream, steps, nbytes, allocate):
        self.stream, self.result = stream, pool.alloc(nbytes, stream=stream)
        self.kept = []  # what the way keeps for as long as the graph
        before = pool.stats().reserved_bytes - pool.stats().idle_bytes
        stream.synchronize()
        step = allocate(pool, stream, steps, nbytes, self.kept)
        stream.synchronize()
        done(cu.cuStreamBeginCapture(stream.handle, cu.CUstreamCaptureMode(0)))
        for i in range(steps):
            step(i, self.result)
        graph = done(cu.cuStreamEndCapture(stream.handle))
        assert int(graph), "the capture was invalidated"
        self.executable = done(cu.cuGraphInstantiate(graph, 0))
        done(cu.cuGraphDestroy(graph))
        stats = pool.stats()
        self.held = stats.reserved_bytes - stats.idle_bytes - before
        self.timer = timeit.Timer(self.run)
        self.run()
        found = bytearray(nbytes)
        self.result.copy_to(found)
        assert set(found) == {(steps - 1) % 255 + 1}, "the graph is not what was captured"

    def run(self):
        """A batch, and a wait."""
        for _ in range(BATCH):
            cu.cuGraphLaunch(self.executable, self.stream.handle)
        self.stream.synchronize()

    def timeit(self, runs):
        """Seconds of so many batches, for each launch of one."""
        return self.timer.timeit(runs) / BATCH

    def close(self):
        """The graph ends."""
        done(cu.cuGraphExecDestroy(self.executable))


def fill_and_copy(block, i, result, stream):
    block.fill(i % 255 + 1, stream=stream)
    result.copy_from(block, stream=stream)


def in_the_capture(pool, stream, steps, nbytes, kept):
    """Each step has a block of the graph."""

    def step(i, result):
        fill_and_copy(pool.alloc(nbytes, stream=stream), i, result, stream)

    return step


def before_it(pool, stream, steps, nbytes, kept):
    """Each step has a block that exists."""
    kept += [pool.alloc(nbytes, stream=stream) for _ in range(steps)]
    return lambda i, result: fill_and_copy(kept[i], i, result, stream)


def one_before_it(pool, stream, steps, nbytes, kept):
    """All steps have the same block."""
    kept.append(pool.alloc(nbytes, stream=stream))
    return lambda i, result: fill_and_copy(kept[0], i, result, stream)


def the_drivers(pool, stream, steps, nbytes, kept):
    """The graph allocates and frees."""

    def step(i, result):
        handle = stream.handle
        address = done(cu.cuMemAllocAsync(nbytes, handle))
        done(cu.cuMemsetD8Async(address, i % 255 + 1, nbytes, handle))
        done(cu.cuMemcpyAsync(result.address, address, nbytes, handle))
        done(cu.cuMemFreeAsync(address, handle))

    return step


WAYS = {
    "in the capture": in_the_capture,
    "before it": before_it,
    "one block before it": one_before_it,
    "the driver's": the_drivers,
}


def report(quick):
    """Lines of all sizes."""
    done(cu.cuInit(0))
    context = done(cu.cuDevicePrimaryCtxRetain(done(cu.cuDeviceGet(0))))
    done(cu.cuCtxPushCurrent(context))
    try:
        for steps in STEPS[:2] if quick else STEPS:
            for nbytes in SIZES[:1] if quick else SIZES:
                yield from compared(steps, nbytes, 5 if quick else 31)
    finally:
        done(cu.cuCtxPopCurrent())


def compared(steps, nbytes, rounds):
    pool, stream = Pool(2 << 30, cuda.Device(), 1 << 30), cuda.Stream()
    ways = {
        name: Launches(pool, stream, steps, nbytes, allocate) for name, allocate in WAYS.items()
    }
    found = turns(ways, 2, rounds)
    what = f"{steps} steps of {text(nbytes)}"
    for name, seconds in found.items():
        yield Line("launch", f"{what}, {name}", seconds * MICRO, "us")
    for name in list(WAYS)[1:]:
        limit = NO_SLOWER if name != "the driver's" else None
        ratio = found["in the capture"] / found[name]
        yield Line("launch", f"{what}, in the capture / {name}", ratio, "x", limit)
    for name, launches in ways.items():
        if name != "the driver's":  # whose memory is not the pool's
            yield Line("memory", f"{what}, {name}, held", launches.held / MIB, "MiB", timed=False)
        launches.close()


def main():
    """Print all lines; exit status 1 if a limit is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few rounds")
    parser.add_argument("--into", type=Path, metavar="FILE", help="store the figures there")
    parser.add_argument("--commit", default="unknown", help="what is measured, for the stamp")
    options = parser.parse_args()
    lines, missed = [], False
    for line in report(options.quick):
        limit = "" if line.limit is None else f"  (at most {line.limit}: {line.verdict})"
        print(f"{line.section:8}{line.what:56}{line.value:10.3f} {line.unit}{limit}", flush=True)
        lines.append(Row.of(line))
        missed = missed or line.verdict == "MISSED"
    if options.into:
        store(options.into, "graphs", stamp(options.commit), lines=lines)
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
