"""Copies between two GPUs of one host, beside CuPy, torch and the driver alone.

    python asv_benches/gpu/bench_devices.py [--quick]

Direct copies: GB/s of one device's memory into another's, by the wall, several copies and one wait;
"driver" is cuMemcpyPeerAsync alone, by cuda-bindings. Copies through the host: GB/s with
``peer_access=False``, beside the two links that the bytes pass and the driver's own way, each in a
program that never enables access. Ways take turns; ratios are of medians over rounds.

What this does not show: copies in both directions at once, or between more than two devices.
"""

import argparse
import json
import subprocess
import sys
import timeit
from pathlib import Path

if not __package__:  # run as a script; behind what is installed
    sys.path.append(str(Path(__file__).resolve().parents[2]))

import numpy as np

from arenapy import cuda
from asv_benches.gpu.latency import imported
from asv_benches.support.rounds import Line, turns
from asv_benches.support.sizes import MIB, text

SIZES = (MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB)
BATCH_BYTES = 1 << 30  # of copies before a wait; at most so many copies
BATCH_MOST = 64
BEST = 0.95  # of the best of CuPy, torch and the driver
# Of the slower one of two links. Of smaller copies the first piece, during which nothing is on the
# second link, and 3 us for each piece are more.
SLOWER_LINK, SLOWER_LINK_FROM = 0.9, 256 * MIB
GIGA = 1e9
NEAR, FAR = 0, 1


class Batch:
    """So many copies and a wait, whose `timeit` gives the seconds of one."""

    def __init__(self, copy, wait, nbytes, before=lambda: None):
        self.n = max(1, min(BATCH_MOST, BATCH_BYTES // nbytes))
        self.copy, self.wait, self.before = copy, wait, before
        self.timer = timeit.Timer(self.run)

    def run(self):
        """All of them."""
        self.before()
        for _ in range(self.n):
            self.copy()
        self.wait()

    def timeit(self, runs):
        """Seconds of so many batches, for each copy of one."""
        return self.timer.timeit(runs) / self.n


def driver_alone(near, far, stream):
    """{name: Batch} of cuMemcpyPeerAsync; empty without cuda.bindings."""
    cu = imported("cuda.bindings.driver")
    if cu is None:
        return {}
    contexts = [cu.cuDevicePrimaryCtxRetain(cu.cuDeviceGet(i)[1])[1] for i in (NEAR, FAR)]
    handle = cu.CUstream(stream.handle)
    to, source, nbytes = far.address, near.address, near.nbytes
    memcpy = cu.cuMemcpyPeerAsync

    def copy():
        (error,) = memcpy(to, contexts[1], source, contexts[0], nbytes, handle)
        assert error == 0, error

    def before():
        (error,) = cu.cuCtxSetCurrent(contexts[stream.device_id])
        assert error == 0, error

    return {"driver": Batch(copy, stream.synchronize, nbytes, before)}


def direct_ways(gpus, nbytes):
    """{name: Batch} of copies from device 0 to device 1."""
    streams = {"source's stream": cuda.Stream(NEAR), "target's stream": cuda.Stream(FAR)}
    near, far = (gpus.alloc(nbytes, stream=s) for s in streams.values())  # each for its device's
    pattern(near)
    ways = {}
    for name, s in streams.items():
        ways[f"arenapy, {name}"] = Batch(
            lambda s=s: far.copy_from(near, stream=s), s.synchronize, nbytes
        )
        for alone, batch in driver_alone(near, far, s).items():
            ways[f"{alone}, {name}"] = batch
    ways["arenapy, source's stream"].run()
    assert same(far), "the copy is not what was copied"
    torch = imported("torch")
    if torch is not None:
        x = torch.empty(nbytes, dtype=torch.uint8, device=f"cuda:{NEAR}")
        y = torch.empty(nbytes, dtype=torch.uint8, device=f"cuda:{FAR}")

        def wait():
            torch.cuda.synchronize(NEAR)
            torch.cuda.synchronize(FAR)

        ways["torch, y.copy_(x)"] = Batch(lambda: y.copy_(x, non_blocking=True), wait, nbytes)
    cupy = imported("cupy")
    if cupy is not None:
        arrays = []
        for i in (NEAR, FAR):
            with cupy.cuda.Device(i):
                arrays.append(cupy.ones(nbytes, "u1"))
        with cupy.cuda.Device(NEAR):
            stream = cupy.cuda.Stream(non_blocking=True)
        source, target = (one.data for one in arrays)

        def copy():
            with cupy.cuda.Device(NEAR):
                target.copy_from_device_async(source, nbytes, stream)

        ways["CuPy, copy_from_device_async"] = Batch(copy, stream.synchronize, nbytes)
    return ways


def pattern(buffer):
    """Bytes of which no piece is like another."""
    words = np.arange(buffer.nbytes // 4, dtype=np.uint32) * np.uint32(2654435761)
    buffer.copy_from(words)


def same(buffer):
    """True if the words arrived unchanged."""
    words = np.empty(buffer.nbytes // 4, np.uint32)
    buffer.copy_to(words)
    return bool((words == np.arange(len(words), dtype=np.uint32) * np.uint32(2654435761)).all())


def rates(ways, nbytes, rounds):
    """GB/s of each, by the median."""
    return {name: nbytes / seconds / GIGA for name, seconds in turns(ways, 1, rounds).items()}


def direct(quick):
    """Lines of copies over the link."""
    gpus = cuda.Devices([NEAR, FAR])
    if gpus.refused:
        print("; ".join(gpus.refused.values()))
        return
    for nbytes in SIZES:
        found = rates(direct_ways(gpus, nbytes), nbytes, 5 if quick else 21)
        yield from shown("direct", nbytes, found)
        for name in ("CuPy", "torch", "driver"):
            theirs = [value for way, value in found.items() if way.startswith(name)]
            if theirs:
                ours = best_of(found, "arenapy")
                yield Line("direct", f"arenapy / {name}, {text(nbytes)}", ours / max(theirs), "x",
                           BEST, at_least=True)  # fmt: skip
        gpus.trim()


def best_of(found, name):
    """The fastest way of that name."""
    return max(value for way, value in found.items() if way.startswith(name))


def shown(section, nbytes, found):
    """A line for each rate."""
    for name, value in found.items():
        yield Line(section, f"{name}, {text(nbytes)}", value, "GB/s")


def staged_ways(nbytes):
    """Copies through the host, the two links alone, and the driver without access."""
    gpus = cuda.Devices([NEAR, FAR], peer_access=False)
    near, far = gpus.alloc(nbytes, device=NEAR), gpus.alloc(nbytes, device=FAR)
    pinned = cuda.Pinned().region(nbytes).buffer()
    pattern(near)
    ns, fs = cuda.Stream(NEAR), cuda.Stream(FAR)
    ways = {
        "arenapy": Batch(lambda: far.copy_from(near, stream=ns), ns.synchronize, nbytes),
        "link out of the source": Batch(
            lambda: near.copy_to(pinned, stream=ns), ns.synchronize, nbytes
        ),
        "link into the target": Batch(
            lambda: far.copy_from(pinned, stream=fs), fs.synchronize, nbytes
        ),
    }
    ways["arenapy"].run()
    assert same(far), "the copy is not what was copied"
    return ways | driver_alone(near, far, ns)


def staged_rates(quick):
    """{size: {way: GB/s}}, measured here: nothing may have enabled access."""
    return {n: rates(staged_ways(n), n, 5 if quick else 21) for n in SIZES}


def staged(quick):
    """Lines of copies through the host, from a program of their own."""
    command = [sys.executable, __file__, "--staged-alone", *(["--quick"] if quick else [])]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    for size, found in json.loads(done.stdout.splitlines()[-1]).items():
        yield from shown("through the host", int(size), found)
        slower = min(value for way, value in found.items() if way.startswith("link"))
        limit = SLOWER_LINK if int(size) >= SLOWER_LINK_FROM else None
        yield Line("through the host", f"arenapy / the slower link, {text(int(size))}",
                   found["arenapy"] / slower, "x", limit, at_least=True)  # fmt: skip


def main():
    """Print every line; the exit status says whether all that is promised holds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer rounds: to see that it runs")
    parser.add_argument("--staged-alone", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.staged_alone:
        print(json.dumps(staged_rates(options.quick)))
        return 0
    found = cuda.devices()
    print(", ".join(one.name for one in found))
    if len(found) < 2:
        print("needs two GPUs")
        return 0
    missed = False
    for part in (staged, direct):
        for line in part(options.quick):
            judged = "" if line.limit is None else f"  ({line.limit} or more: {line.verdict})"
            value = f"{line.value:9.3f} {line.unit}"
            print(f"{line.section:18}{line.what:52}{value}{judged}", flush=True)
            missed |= line.verdict == "MISSED"
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
