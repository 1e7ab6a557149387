"""The figures of allocators, as frozen dataclasses that print as tables.

What lives here: what the figures are called, what they mean and how they are shown. What does
not: counting, which every allocator does itself.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, TypeAlias

from arenapy.base.text import format_bytes, html_row, html_table

__all__ = [
    "BlockInfo", "BumpStats", "ClassStats", "Defragmented", "NumpyMemoryStats", "PoolStats",
    "SlabStats",
]  # fmt: skip

Bytes: TypeAlias = int  # an annotation that says the unit, to the reader and to the tables below

WIDTH = 1000  # of the console that tables are laid out on: nothing is ever wrapped
DERIVED = ("hit_rate", "fragmentation")  # figures that follow from others; shares, from 0 to 1
CLASS_COLUMNS = {
    "index": "class",
    "upper_bound": "up to",
    "total_allocations": "allocations",
    "hit_rate": "hits",
    "splits": "splits",
    "active_allocations": "active",
    "allocated_bytes": "allocated",
    "pending_bytes": "pending",
    "idle_bytes": "idle",
    "peak_bytes": "peak",
    "fragmentation": "fragmented",
}


@dataclass(frozen=True, slots=True, repr=False)
class Figures:
    """The base of all dataclasses of figures: it shows them, and makes dicts of them."""

    def as_dict(self) -> dict[str, Any]:
        """All figures by name as plain data, including derived figures and those by class.

        Returns
        -------
        dict of str to int or float
            For a Pool, also ``classes``, a list of such dicts.

        Examples
        --------
        >>> arenapy.Slab(4096, count=8).stats().as_dict()["capacity"]
        8
        """
        values = {name: getattr(self, name) for name in _names(self)}
        if isinstance(self, PoolStats):
            values["classes"] = [one.as_dict() for one in self.classes]
        return values

    def __str__(self) -> str:
        """Lay out a table of plain text, the same on every terminal."""
        return repr(self)

    def __repr__(self) -> str:
        """Show the table: these are read, seldom copied."""
        text = _grid([[_words(name), shown] for name, shown in _shown(self)], left=1)
        text = f"{type(self).__name__}\n{text}"
        if rows := _class_rows(self):
            text += "\n\n" + _grid([[*CLASS_COLUMNS.values()], *rows])
        return text

    def _repr_html_(self) -> str:
        """Lay out a table for a notebook."""
        figures = [(_words(name), shown) for name, shown in _shown(self)]
        text = html_table(type(self).__name__, figures)
        if by_class := _class_rows(self):
            rows = [html_row("th", CLASS_COLUMNS.values())]
            rows += [html_row("td", row) for row in by_class]
            text += f"<table>{''.join(rows)}</table>"
        return text


@dataclass(frozen=True, slots=True, repr=False)
class BumpStats(Figures):
    """The statistics of a Bump at one moment.

    ``live_bytes + free_bytes + retired_bytes + pending_bytes + padding_bytes == capacity``.

    Attributes
    ----------
    capacity : int
        Bytes of all regions.
    live_bytes : int
        Bytes of live blocks. A block whose Buffer was dropped without an export counts until the
        next reset.
    free_bytes : int
        Free bytes.
    largest_free_extent : int
        The largest request in bytes that succeeds without growth, at alignment 1.
    retired_bytes : int
        Bytes of blocks that were held at a reset and still are.
    pending_bytes : int
        Bytes that were freed but cannot be reused yet, because another process still sees them.
        (Bytes that a stream still uses count as live, and after a reset as retired.)
    padding_bytes : int
        Bytes lost to alignment, and one byte for each 0-byte block.
    peak_bytes : int
        The peak of live and padding bytes together.
    held_buffers : int
        The number of live Buffers that were ever exported.
    marks : int
        The number of positions that marks refer to.
    regions : int
        The number of regions, including those added by growth.
    total_allocations : int
        The number of blocks handed out so far.
    metadata_bytes : int
        Bytes of the bookkeeping, which lies elsewhere and is not in `capacity`. It grows with the
        held Buffers, marks and free extents at one time, and does not shrink.

    Examples
    --------
    >>> import arenapy
    >>> arena = arenapy.Bump(1 << 20)
    >>> block = arena.alloc(1000)
    >>> stats = arena.stats()                # at a prompt, its name alone shows a table
    >>> stats.live_bytes, stats.capacity
    (1000, 1048576)
    """

    capacity: Bytes
    live_bytes: Bytes
    free_bytes: Bytes
    largest_free_extent: Bytes
    retired_bytes: Bytes
    pending_bytes: Bytes
    padding_bytes: Bytes
    peak_bytes: Bytes
    held_buffers: int
    marks: int
    regions: int
    total_allocations: int
    metadata_bytes: Bytes


@dataclass(frozen=True, slots=True, repr=False)
class SlabStats(Figures):
    """The statistics of a Slab at one moment.

    ``allocated_bytes + pending_bytes + idle_bytes + padding_bytes == reserved_bytes``, and
    ``capacity * stride == reserved_bytes - padding_bytes``.

    Attributes
    ----------
    item_size : int
        Usable bytes of an item.
    stride : int
        Distance in bytes from one item to the next.
    capacity : int
        The number of items in all regions, live or not.
    active_allocations : int
        The number of live items.
    total_allocations : int
        The number of items handed out so far.
    allocated_bytes : int
        Bytes of live items, including padding up to the stride.
    pending_bytes : int
        Bytes of items that were freed but cannot be reused yet: a stream or a graph still uses
        them, or another process still sees them.
    idle_bytes : int
        Bytes of free items.
    padding_bytes : int
        Bytes of the regions outside of items.
    reserved_bytes : int
        Bytes of all regions.
    peak_bytes : int
        The peak of `allocated_bytes`. With several threads it may lack as much as the caches of the
        threads can hold.
    metadata_bytes : int
        Bytes of the bookkeeping, which lies elsewhere and is not in `reserved_bytes`.
    regions : int
        The number of regions, including those added by growth.

    Examples
    --------
    >>> import arenapy
    >>> print(arenapy.Slab(1000, count=8).stats())
    SlabStats
      item size           1000 bytes
      stride                   1 KiB
      capacity                     8
    ...
    """

    item_size: Bytes
    stride: Bytes
    capacity: int
    active_allocations: int
    total_allocations: int
    allocated_bytes: Bytes
    pending_bytes: Bytes
    idle_bytes: Bytes
    padding_bytes: Bytes
    reserved_bytes: Bytes
    peak_bytes: Bytes
    metadata_bytes: Bytes
    regions: int


class Reuse(Figures):
    """The shares that a Pool and each of its classes have."""

    __slots__ = ()

    total_allocations: int
    pool_hits: int
    idle_bytes: Bytes
    largest_free_block: Bytes

    @property
    def hit_rate(self) -> float:
        """``pool_hits / total_allocations``, or 0.0 before the first allocation."""
        return self.pool_hits / self.total_allocations if self.total_allocations else 0.0

    @property
    def fragmentation(self) -> float:
        """``1 - largest_free_block / idle_bytes``, or 0.0 if nothing is free."""
        return 1 - self.largest_free_block / self.idle_bytes if self.idle_bytes else 0.0


@dataclass(frozen=True, slots=True, repr=False)
class ClassStats(Reuse):
    """The statistics of one size class of a Pool.

    A request counts in the class of its requested size. A block, live or free, counts in the class
    of its own size.

    ``pool_hits + pool_misses == total_allocations``, and
    ``allocated_bytes + pending_bytes + idle_bytes == reserved_bytes``.

    Attributes
    ----------
    index : int
        From 0 to 20, as :func:`arenapy.size_class` gives it.
    upper_bound : int or None
        The largest size of the class in bytes. None for the last class, which has no bound.
    total_allocations, pool_hits, pool_misses, splits, active_allocations : int
        As in :class:`PoolStats`, for requests of this class.
    allocated_bytes, pending_bytes, idle_bytes, reserved_bytes, largest_free_block : int
        As in :class:`PoolStats`, for blocks of this class.
    peak_bytes : int
        The peak of `allocated_bytes` of this class. The classes have their peaks at different
        times, so the sum is not the pool's peak.
    hit_rate, fragmentation : float
        As in :class:`PoolStats`.

    Examples
    --------
    >>> import arenapy
    >>> pool = arenapy.Pool()
    >>> x = pool.empty(100, "u1")
    >>> pool.stats().classes[arenapy.size_class(100)]
    <ClassStats 0, up to 4 KiB: 1 allocations, 0.0% hits, 1 active, 128 bytes allocated>
    """

    index: int
    upper_bound: Bytes | None
    total_allocations: int
    pool_hits: int
    pool_misses: int
    splits: int
    active_allocations: int
    allocated_bytes: Bytes
    pending_bytes: Bytes
    idle_bytes: Bytes
    reserved_bytes: Bytes
    peak_bytes: Bytes
    largest_free_block: Bytes

    def __str__(self) -> str:
        """Lay out the table, since a class's `repr` is a line: there are 21 in a tuple."""
        return Figures.__repr__(self)

    def __repr__(self) -> str:
        shown = dict(_shown(self))
        bound = shown["upper_bound"]
        return (
            f"<ClassStats {self.index}, {bound if bound == 'no bound' else f'up to {bound}'}: "
            f"{shown['total_allocations']} allocations, {shown['hit_rate']} hits, "
            f"{shown['active_allocations']} active, {shown['allocated_bytes']} allocated>"
        )


@dataclass(frozen=True, slots=True, repr=False)
class PoolStats(Reuse):
    """The statistics of a Pool at one moment.

    ``pool_hits + pool_misses == total_allocations``, and
    ``allocated_bytes + pending_bytes + idle_bytes == reserved_bytes``. The figures of the classes
    add up to the pool's, except `peak_bytes`, the shares and `largest_free_block`.

    Attributes
    ----------
    total_allocations : int
        The number of blocks handed out so far.
    pool_hits : int
        Allocations that were served without asking the source for memory.
    pool_misses : int
        Allocations for which the source had to give memory.
    splits : int
        Hits that were served by splitting a larger free block.
    active_allocations : int
        The number of live blocks.
    allocated_bytes : int
        Bytes of live blocks, including padding.
    pending_bytes : int
        Bytes of blocks that were freed but cannot be reused yet: a stream or a graph still uses
        them, or another process still sees them.
    idle_bytes : int
        Bytes of free memory.
    reserved_bytes : int
        Bytes taken from the source and not returned.
    peak_bytes : int
        The peak of `allocated_bytes`, since the last ``reset_peak()`` if there was one.
    metadata_bytes : int
        Bytes of the bookkeeping, which lies elsewhere and is not in `reserved_bytes`.
    largest_free_block : int
        Bytes of the largest free block.
    regions : int
        The number of regions of the pool.
    classes : tuple of ClassStats
        The same figures for all 21 size classes, in order.
    hit_rate : float
        ``pool_hits / total_allocations``, or 0.0 before the first allocation.
    fragmentation : float
        ``1 - largest_free_block / idle_bytes``, or 0.0 if nothing is free.

    Examples
    --------
    >>> import arenapy
    >>> pool = arenapy.Pool()
    >>> for _ in range(10):
    ...     pool.alloc(1 << 20).release()
    >>> stats = pool.stats()                 # at a prompt, its name alone shows a table
    >>> stats.total_allocations, stats.hit_rate
    (10, 0.9)
    """

    total_allocations: int
    pool_hits: int
    pool_misses: int
    splits: int
    active_allocations: int
    allocated_bytes: Bytes
    pending_bytes: Bytes
    idle_bytes: Bytes
    reserved_bytes: Bytes
    peak_bytes: Bytes
    metadata_bytes: Bytes
    largest_free_block: Bytes
    regions: int
    classes: tuple[ClassStats, ...]


@dataclass(frozen=True, slots=True, repr=False)
class NumpyMemoryStats(Figures):
    """Allocations of arrays under a handler that its pool did not serve.

    Attributes
    ----------
    system_allocations, system_bytes
        Total served by libc, because the pool was exhausted, closed (in a forked child), or over a
        file that shrank, or had no block for an array that was resized.
    lazy_allocations, lazy_bytes
        Total of zeros of 32 MiB or more, which get their memory when they are touched.
    system_live, lazy_live
        The number of live blocks of each kind.

    Examples
    --------
    >>> import arenapy, numpy as np
    >>> memory = arenapy.numpy_memory(arenapy.Pool())
    >>> with memory:
    ...     x = np.zeros(1 << 23)            # 64 MiB
    >>> memory.stats().lazy_bytes
    67108864
    """

    system_allocations: int
    system_bytes: Bytes
    system_live: int
    lazy_allocations: int
    lazy_bytes: Bytes
    lazy_live: int


@dataclass(frozen=True, slots=True)
class BlockInfo:
    """One block of an allocator, live or not.

    Attributes
    ----------
    address : int
        Its first address, including padding before it. (A Pool pads by less than a page, so that
        large blocks do not all begin on the same cache lines.)
    nbytes : int
        Its size in bytes, including padding.
    size_class : int
        The class of `nbytes`, as :func:`arenapy.size_class` gives it.
    state : {"live", "idle", "pending"}
        Handed out, free, or freed but not reusable yet, because a stream still uses the block or
        another process still sees it.
    age : int
        The number of operations of the allocator since the state changed. In a pool with
        `trim_after`, about the number of eighths of that time in which blocks were freed since
        then; that of a live block above 32 KiB may be far from it.

    Examples
    --------
    >>> import arenapy
    >>> slab = arenapy.Slab(4096, count=2)
    >>> item = slab.alloc()
    >>> [(block.state, block.nbytes) for block in slab.blocks()]
    [('live', 4096), ('idle', 4096)]
    """

    address: int
    nbytes: Bytes
    size_class: int
    state: str
    age: int


@dataclass(frozen=True, slots=True)
class Defragmented:
    """The result of ``Pool.defragment()``.

    Attributes
    ----------
    bytes : int
        Bytes returned to the source.
    milliseconds : float
        Elapsed time.

    Examples
    --------
    >>> import arenapy
    >>> arenapy.Pool().defragment().bytes
    0
    """

    bytes: Bytes
    milliseconds: float


# ---- figures in sum --------------------------------------------------------------------------


def sum_of(pools: list[PoolStats]) -> PoolStats:
    """Internal: of several pools, at least one. The largest free block is that of any of them."""
    values = _sums(pools)
    values["classes"] = tuple(
        replace(same[0], **_sums(list(same)))
        for same in zip(*(pool.classes for pool in pools), strict=True)
    )
    return PoolStats(**values)


def _sums(many: list[Any]) -> dict[str, Any]:
    names = {field.name for field in fields(many[0])} - {"classes", "index", "upper_bound"}
    values: dict[str, Any] = {name: sum(getattr(one, name) for one in many) for name in names}
    values["largest_free_block"] = max(one.largest_free_block for one in many)
    return values


# ---- how figures are shown -------------------------------------------------------------------


def _names(figures: Figures) -> list[str]:
    """The figures in order, derived ones last."""
    names = [field.name for field in fields(figures)]
    return names + [name for name in DERIVED if hasattr(figures, name)]


def _shown(figures: Figures) -> Iterator[tuple[str, str]]:
    """Names and texts of all figures but those by class."""
    units = {field.name: str(field.type) for field in fields(figures)}
    for name in _names(figures):
        if name != "classes":
            yield name, _text(getattr(figures, name), units.get(name, ""))


def _text(value: float | None, unit: str) -> str:
    if value is None:
        return "no bound"
    if isinstance(value, float):  # nearly all is not shown as all
        return f"{value if value == 1 else min(value, 0.999):.1%}"
    return format_bytes(value) if "Bytes" in unit else f"{value:,}"


def _class_rows(figures: Figures) -> list[list[str]]:
    """A row for each class that was ever used."""
    if not isinstance(figures, PoolStats):
        return []
    used = [one for one in figures.classes if one.total_allocations or one.reserved_bytes]
    shown = [dict(_shown(one)) for one in used]
    return [[texts[name] for name in CLASS_COLUMNS] for texts in shown]


def _words(name: str) -> str:
    return name.replace("_", " ")


def _grid(rows: list[list[str]], left: int = 0) -> str:
    """Columns of text, the first `left` of them aligned to the left."""
    from rich.console import Console  # here: it takes longer to import than all of arenapy
    from rich.table import Table

    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    for column in range(len(rows[0])):
        table.add_column(justify="left" if column < left else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    text = io.StringIO()
    console = Console(file=text, width=WIDTH, color_system=None, force_jupyter=False)
    console.print(table)
    return "\n".join("  " + line.rstrip() for line in text.getvalue().splitlines())
