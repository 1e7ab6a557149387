"""Memory of a GPU over commits, beside CuPy, RMM, torch, cuda.core and the driver.

    python asv_benches/dashboard/dashboard.py gpu

runs it on a machine that has a GPU, and the peers in its own Python; elsewhere asv shows these as
skipped. All ways take turns in one process (latency.py, copies.py); report.py
has more, with verdicts.

What this does not show: blocks that stay (replay.py), and what kernels do meanwhile.
"""

from arenapy import cuda
from asv_benches.gpu import copies as gpu_copies
from asv_benches.gpu import latency as gpu_latency
from asv_benches.support.rounds import named, version
from asv_benches.support.sizes import text

ROUNDS = 21
WAYS = gpu_latency.OURS | gpu_latency.PEERS
GROUPS = {
    "Block": (
        "Allocate and free a block of GPU memory",
        {(name, n): way for n in gpu_latency.SIZES for name, way in WAYS.items()},
    ),
    "Stream": (
        "GPU blocks, by allocator and kind of stream",
        {(name, gpu_latency.SIZES[0]): way for name, way in gpu_latency.SMALL.items()},
    ),
    "Pinned": (
        "Allocate and free a block of pinned memory",
        {
            (name, n): way
            for n in gpu_latency.PINNED_SIZES
            for name, way in gpu_latency.PINNED.items()
        },
    ),
    "PingPong": (
        "A block that moves between two streams",
        {(name, 1 << 20): way for name, way in gpu_latency.PING_PONG.items()},
    ),
}
MEMORY = ("Pinned region", "cudaMallocHost", "pageable")
DIRECTIONS = ("to the device", "from it")


def setup_cache():
    """{(class, way, size): microseconds} and {copy: GB/s}; nothing where there is no GPU."""
    try:
        names = gpu_latency.namespace()
    except cuda.Unavailable as error:
        return {"": str(error)}
    found = {}
    for key, (_, ways) in GROUPS.items():
        for (name, n), seconds in gpu_latency.measured(ways, names, ROUNDS).items():
            found[key, name, text(n)] = seconds * 1e6
    del names
    return found | {line.what: line.value for line in gpu_copies.large(quick=True)}


setup_cache.timeout = 1200


def look_up(counts, *key):
    """A figure, or the reason that asv shows as skipped."""
    key = key if len(key) > 1 else key[0]
    if key not in counts:
        raise NotImplementedError(counts.get("", f"{key}: not installed"))
    return counts[key]


def measured(name, title, ways):
    """An asv class of that name: a graph with a line for each allocator and size."""

    def setup(self, counts, allocator, size):
        look_up(counts, name, allocator, size)

    @named(title, "μs", version=version(ways))
    def track_block(self, counts, allocator, size):
        """Made and dropped, the loop included."""
        return look_up(counts, name, allocator, size)

    names, sizes = (tuple(dict.fromkeys(column)) for column in zip(*ways, strict=True))
    return type(
        name,
        (),
        {
            "__doc__": f"asv: {title}.",
            "params": (names, tuple(map(text, sizes))),
            "param_names": ("allocator", "size"),
            "setup": setup,
            "track_block": track_block,
        },
    )


globals().update({name: measured(name, *group) for name, group in GROUPS.items()})


class Copy:
    """asv: 128 MiB at a time, by the device's clock."""

    params = (MEMORY, DIRECTIONS)
    param_names = ("memory", "direction")
    version = version(MEMORY + DIRECTIONS)  # asv would take the function of this module for it

    def setup(self, counts, memory, direction):
        """Skip without a GPU."""
        look_up(counts, f"{memory}, {direction}")

    @named("Copies between host and GPU", "GB/s")
    def track_speed(self, counts, memory, direction):
        """The median of some."""
        return look_up(counts, f"{memory}, {direction}")
