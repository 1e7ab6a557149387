"""The machines for arenapy's own allocators: what the hooks are, and what there is beside."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import strategies as st

from arenapy.bump.bump import Bump
from arenapy.errors import OutOfMemory
from arenapy.memory.sources import Host
from arenapy.pool.pool import Pool
from arenapy.slab.slab import Slab
from arenapy.testing.machine import AllocatorMachine
from arenapy.testing.operations import operation
from arenapy.testing.ranges import Live
from arenapy.testing.sources import FailingSource
from arenapy.testing.strategies import PAGE, alignments

__all__ = ["BumpMachine", "PoolMachine", "SlabMachine"]

DEFAULT_ALIGN = 64
PLAIN = Host(huge_pages=None, prefault=False)  # a machine makes hundreds: nothing to fault in
HANDED_OUT = ("total_allocations", "active_allocations", "allocated_bytes", "peak_bytes")


class OwnMachine(AllocatorMachine):
    """The common part of the machines of arenapy's allocators."""

    default_align = DEFAULT_ALIGN
    # Not more than a region is aligned to: what is served must not depend on where memory lies.
    alignments = alignments(PAGE)
    bad_request = (ValueError, MemoryError)
    source = PLAIN

    def allocate(self, state: Any, nbytes: int, align: int | None) -> Any:
        """A Buffer."""
        return state.alloc(nbytes) if align is None else state.alloc(nbytes, align)

    def address(self, block: Any) -> int:
        """Of a Buffer, or of an array."""
        start: int = block.ctypes.data if isinstance(block, np.ndarray) else block.address
        return start

    def free(self, state: Any, block: Any) -> None:
        """Release a Buffer. An array is given back by being dropped, as it is after this."""
        if not isinstance(block, np.ndarray):
            block.release()

    def zeroed(self, state: Any, nbytes: int) -> Any:
        """An array of zeros."""
        return state.zeros(nbytes, "u1")

    def bounds(self, state: Any) -> list[tuple[int, int]]:
        """The allocator's regions."""
        return [(region.address, region.nbytes) for region in state.regions]

    def survives(self, known: Live) -> bool:
        """An array is held for as long as it is there."""
        return isinstance(known.block, np.ndarray)

    def look(self) -> None:
        """Also the allocator's own `check()`."""
        super().look()
        self.call(self.state.check)


class BumpMachine(OwnMachine):
    """Test a `Bump`: blocks, zeros, marks, resets, growth.

    Attributes
    ----------
    source : Source
        The source of the arenas.

    Notes
    -----
    Thread-safety: one thread runs a machine.

    Examples
    --------
    >>> from arenapy.testing import BumpMachine
    >>> class Guarded(BumpMachine):
    ...     source = arenapy.Host(guard=True)
    >>> TestGuarded = Guarded.TestCase
    """

    configs = st.fixed_dictionaries(
        {
            "nbytes": st.integers(1, 24).map(lambda n: n * PAGE),
            "max_bytes": st.none() | st.integers(24, 64).map(lambda n: n * PAGE),
        }
    )
    stale_mark = (ValueError,)

    def make(self, nbytes: int, max_bytes: int | None) -> Any:
        """A Bump; one that grows is in several parts afterwards, and so serves less."""
        self.refills = ("reset",) if max_bytes is None else ()
        self.grows = max_bytes is not None
        return Bump(nbytes, self.source, max_bytes)

    @operation(
        nbytes=st.integers(0, 1000),
        depth=st.integers(1, 3),
        times=st.integers(1, 6),
        raising=st.booleans(),
        keep=st.booleans(),
    )
    def scopes_outlived(
        self, nbytes: int, depth: int, times: int, raising: bool, keep: bool
    ) -> None:
        """Scopes in each other whose arrays end after them, at once or with the next ones."""
        before = self.call(self.used, self.state)
        kept: list[Any] = []
        for _ in range(times):
            arrays = self.call(self.in_scopes, nbytes, depth, raising)
            kept = arrays if keep else []
            del arrays
            self.call(self.state.check)
        del kept
        after = self.call(self.used, self.state)
        assert after == before, f"{after} bytes are used after scopes, and {before} before"

    def in_scopes(self, nbytes: int, depth: int, raising: bool) -> list[Any]:
        """Arrays that were made in scopes in each other, and are held by now."""
        arrays: list[Any] = []
        with contextlib.suppress(KeyError, *self.refusals), contextlib.ExitStack() as scopes:
            for fill in range(1, depth + 1):
                scopes.enter_context(self.state.scope())
                arrays.append(self.state.zeros(nbytes, "u1"))
                if isinstance(arrays[-1], np.ndarray):  # not on memory of a device
                    assert not arrays[-1].any(), "zeros that are not zero"
                    arrays[-1].fill(fill)
            if raising:
                raise KeyError
        for fill, array in enumerate(arrays, 1):
            if isinstance(array, np.ndarray):
                assert (array == fill).all(), "an array was overwritten that outlived its scope"
        return arrays

    def mark(self, state: Any) -> Any:
        """A Mark."""
        return state.mark()

    def reset(self, state: Any, mark: Any = None) -> None:
        """Reset to it."""
        state.reset(mark)

    def used(self, state: Any) -> int:
        """Bytes up to the cursor."""
        used: int = state.used
        return used

    def remaining(self, state: Any) -> int:
        """Bytes that are left, of all it may grow to."""
        remaining: int = state.remaining
        return remaining

    def stats(self, state: Any) -> Any:
        """All its figures but its bookkeeping's, which keeps the room that was needed."""
        return replace(state.stats(), metadata_bytes=0)


class SlabMachine(OwnMachine):
    """Test a `Slab`: items, zeros, growth, trimming, a source that fails.

    Notes
    -----
    Thread-safety: one thread runs a machine.

    Examples
    --------
    >>> from arenapy.testing import SlabMachine
    >>> TestSlab = SlabMachine.TestCase
    """

    sizes = st.one_of(st.integers(0, 200), st.sampled_from([PAGE - 1, PAGE, PAGE + 1]))
    configs = st.fixed_dictionaries(
        {
            "item_size": st.integers(1, 200) | st.sampled_from([1, 64, PAGE]),
            "count": st.integers(1, 20),
            "align": st.sampled_from([None, None, 1, 16, 64, 256]),
            "more": st.none() | st.integers(0, 40),
            "fail_after": st.none() | st.integers(1, 3),
        }
    )
    refusals = (MemoryError, ValueError)  # an item is too small, or not aligned so

    def make(
        self,
        item_size: int,
        count: int,
        align: int | None,
        more: int | None,
        fail_after: int | None,
    ) -> Any:
        """A Slab, which may grow by `more` items; the second source fails once."""
        self.default_align = DEFAULT_ALIGN if align is None else align
        source = self.source if fail_after is None else FailingSource(fail_after, self.source)
        return Slab(item_size, count, source, align, None if more is None else count + more)

    def stats(self, state: Any) -> Any:
        """Items that are live; what the source gave before it failed may stay."""
        return state.count

    @operation()
    def trim(self) -> None:
        """Give back slabs without a live item."""
        if self.call(self.state.trim):
            self.reached("a slab was given back")


class PoolMachine(OwnMachine):
    """Test a `Pool`: blocks, zeros, limits, trimming, merging, a source that fails.

    Notes
    -----
    Thread-safety: one thread runs a machine.

    Examples
    --------
    >>> from arenapy.testing import PoolMachine
    >>> TestPool = PoolMachine.TestCase
    """

    configs = st.fixed_dictionaries(
        {
            "max_bytes": st.none() | st.integers(1, 64).map(lambda n: n * PAGE),
            "rounding": st.sampled_from(["step", "class"]),
            "fail_after": st.none() | st.integers(0, 3),
        }
    )

    def make(self, max_bytes: int | None, rounding: Any, fail_after: int | None) -> Any:
        """A Pool."""
        source = self.source if fail_after is None else FailingSource(fail_after, self.source)
        return Pool(max_bytes, source, rounding=rounding)

    def stats(self, state: Any) -> Any:
        """Return the figures of live blocks only: the pool may return free memory at any time."""
        stats = state.stats()
        return [getattr(stats, name) for name in HANDED_OUT]

    def look(self) -> None:
        """Also that its count is the model's."""
        super().look()
        stats = self.call(self.state.stats)
        assert stats.active_allocations == len(self.live), "it counts other blocks than are live"
        assert stats.allocated_bytes >= sum(known.nbytes for known in self.live.values())

    @operation(keep=st.integers(0, 64).map(lambda n: n * PAGE))
    def trim(self, keep: int) -> None:
        """Give back what is idle."""
        if self.call(self.state.trim, keep):
            self.reached("idle memory was given back")

    @operation()
    def defragment(self) -> None:
        """Merge what is free."""
        self.call(self.state.defragment)

    @operation(nbytes="sizes", count=st.integers(0, 5))
    def prewarm(self, nbytes: int, count: int) -> None:
        """Have blocks ready, if there is room."""
        try:
            self.call(self.state.prewarm, {nbytes: count})
        except OutOfMemory:
            self.reached("refused")
