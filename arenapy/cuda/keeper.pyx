"""What Python code of this package needs of allocators and blocks, and cannot have from outside.

What lives here: what memory an allocator has, and marking a block as exported. What does not: the
answer, which the allocator's core knows also before it has a region.
"""
from arenapy.allocator.allocator cimport Allocator
from arenapy.buffer.block cimport Block, acquire
from arenapy.allocator.allocator_core cimport RegionSet


def memory_of(Allocator allocator not None):
    """Its core, whose attributes say it; and whether streams order it."""
    cdef RegionSet core = allocator.base
    return core, core.medium is not None


def hold(Block block not None):
    """Somebody has its address: no reset and no closed region takes its bytes while it is there."""
    acquire(block, False)
