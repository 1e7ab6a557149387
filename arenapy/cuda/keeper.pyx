"""What memory an allocator has, for Python code that is given one.

What lives here: that one question. What does not: the answer, which the allocator's core knows
also before it has a region.
"""
from arenapy.allocator cimport Allocator
from arenapy.regions cimport RegionSet


def memory_of(Allocator allocator not None):
    """Its core, whose attributes say it; and whether streams order it."""
    cdef RegionSet core = allocator.base
    return core, core.medium is not None
