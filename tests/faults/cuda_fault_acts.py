"""What operations of `cuda_fault_operations` are made of."""

import injection
from cuda_support import MIB, SOURCES, content

from arenapy import Pool

OPERATIONS = {}
N = 50_000  # bytes of a block


def operation(name, version=13):
    """`version`: of CUDA."""
    return injection.operation(name, OPERATIONS, version=version)


def for_each(names, text):
    """The same with each of these; `text` has a place for the name."""

    def add(function):
        for name in names:
            operation(text.format(name))(lambda gpu, name=name: function(gpu, name))
        return function

    return add


def in_use(allocator):
    """After its own check. What failed may have made it larger, and is counted as a try."""
    allocator.check()
    stats = allocator.stats()
    if hasattr(stats, "live_bytes"):
        return stats.pending_bytes  # the rest comes back when it is reset
    return stats.active_allocations, stats.allocated_bytes, stats.pending_bytes


def pool_over(source, **options):
    return Pool(MIB, SOURCES[source](), **options)


def filled(byte, *blocks):
    """Makes sure that these hold it to the last byte."""

    def good(result):
        assert all(content(block) == bytes([byte]) * block.nbytes for block in blocks)

    return good


def usable(block):
    block.fill(7)
    filled(7, block)(None)


def drained(gpu, good):
    gpu.drain()
    good(None)


def asserted(condition):
    assert condition
