"""What Python code of this package needs of allocators and blocks, and cannot have from outside.

What lives here: what memory an allocator has, marking a block as exported, and letting a stream
come after those of a block. What does not: the answers, which the allocator's core and the block's
memory know.
"""
from arenapy.allocator.allocator cimport Allocator
from arenapy.allocator.allocator_core cimport RegionSet
from arenapy.buffer.block cimport Block, acquire, pin, root_of, unpin

from arenapy.cuda.ordering cimport Ordering


def memory_of(Allocator allocator not None):
    """Its core, whose attributes say it; and whether streams order it."""
    cdef RegionSet core = allocator.base
    return core, core.medium is not None


def hold(Block block not None):
    """Somebody has its address: no reset and no closed region takes its bytes while it is there."""
    acquire(block, False)


def let_wait(Block block not None, stream):
    """Let a stream wait for all streams that were told of a block, whose memory is CUDA's."""
    cdef Ordering order = <Ordering?>root_of(block).keeper.medium
    pin(block)
    try:
        order.after_told(block, order.named(stream))
    finally:
        unpin(block)
