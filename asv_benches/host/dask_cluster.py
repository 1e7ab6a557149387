"""A cluster of Dask with ArenaPlugin and without, each round in two new clusters, by turns.

Two worker processes of one thread on this machine. "elements" computes on arrays of 4 MiB that fit
into the workers' memory; "transpose" also exchanges half of its arrays of 16 MiB between them; for
"spill" all arrays together are larger than what one worker may have, and the workers spill.

What this does not show: networks between machines. Times are of one machine, whose workers, client
and scheduler share its processors; the processors' time is that of the workers alone.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time

MIB = 1 << 20
# side of the array, side of a chunk, how often, bytes that a worker may have
WORK = {
    "elements": (4096, 724, 4, 2048 * MIB),
    "transpose": (5792, 1448, 4, 2048 * MIB),
    "spill": (10136, 1448, 1, 640 * MIB),
}
FIGURES = ("seconds", "processor", "faults", "spilled", "peak")


def used(dask_worker):
    """Of this worker: faults, seconds of the processor, bytes spilled, the most memory it had."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    spilled = getattr(dask_worker.data, "spilled_total", (0, 0))[1]
    return [usage.ru_minflt, usage.ru_utime + usage.ru_stime, spilled, usage.ru_maxrss << 10]


def one_round(way, work):
    """Compute in a new cluster; its figures, and the result as text."""
    import dask
    import dask.array as da
    from distributed import Client, LocalCluster, wait

    side, chunk, repeats, limit = WORK[work]
    dask.config.set({"distributed.diagnostics.nvml": False})
    with (
        LocalCluster(
            n_workers=2, threads_per_worker=1, memory_limit=limit, dashboard_address=":0"
        ) as cluster,
        Client(cluster) as client,
    ):
        if way == "pool":
            from arenapy.interop.dask import ArenaPlugin

            client.register_plugin(ArenaPlugin())
        source = da.random.default_rng(0).random((side, side), chunks=chunk)
        kept = source.persist()
        wait(kept)
        other = kept if work == "elements" else kept.T

        def compute():
            return (da.sqrt(kept * kept + other * other + 1) - kept / 2).sum().compute().hex()

        if work != "spill":
            compute()  # imports, first faults
        before, start = client.run(used), time.perf_counter()
        found = {compute() for _ in range(repeats)}
        seconds = time.perf_counter() - start
        after = client.run(used)
    faults, processor = (
        sum(after[one][i] - before[one][i] for one in before) / repeats for i in (0, 1)
    )
    spilled, peak = sum(now[2] for now in after.values()), max(now[3] for now in after.values())
    figures = dict(zip(FIGURES, (seconds / repeats, processor, faults, spilled, peak), strict=True))
    return {**figures, "result": ",".join(sorted(found))}


def report(works, rounds):
    """Print a line for each work and way."""
    for work in works:
        found = {"default": [], "pool": []}
        for _ in range(rounds):
            for way, every in found.items():
                done = subprocess.run(
                    [sys.executable, __file__, "--one", way, work],
                    capture_output=True, text=True, check=False, timeout=300,
                )  # fmt: skip
                if done.returncode:
                    raise RuntimeError(done.stderr)
                every.append(json.loads(done.stdout.splitlines()[-1]))
        same = len({one["result"] for every in found.values() for one in every}) == 1
        print(f"{work}: {rounds} rounds; results {'are the same' if same else 'DIFFER'}")
        for way, every in found.items():
            middle = {name: statistics.median(one[name] for one in every) for name in FIGURES}
            times = sorted(one["seconds"] for one in every)
            print(
                f"  {way:8} {middle['seconds']:.3f} s ({times[0]:.3f} to {times[-1]:.3f}), "
                f"{middle['processor']:.3f} s of processors, {middle['faults']:,.0f} faults, "
                f"{middle['spilled'] / MIB:,.0f} MiB spilled, "
                f"{middle['peak'] / MIB:,.0f} MiB at most in a worker",
                flush=True,
            )
        pairs = list(zip(found["pool"], found["default"], strict=True))
        for name in ("seconds", "processor", "faults"):
            ratio = statistics.median(ours[name] / theirs[name] for ours, theirs in pairs)
            print(f"  {name}: pool / default {ratio:.3f}", flush=True)


def main():
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("works", nargs="*", metavar="WORK", help=f"of {', '.join(WORK)}")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--one", metavar="WAY", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(one_round(arguments.one, arguments.works[0])))
    else:
        report(arguments.works or list(WORK), arguments.rounds)


if __name__ == "__main__":
    main()
