"""Pictures of allocators, with matplotlib (the extra ``plot``), which is imported when drawing.

What lives here: laying out. Memory is one long line, region after region, each from the beginning
of a row; `position` in it is counted in bytes, and the picture is that line, wrapped. The data
comes from `blocks()`, nothing is asked of an allocator that a user could not ask.

Why it is fast: blocks are rows of arrays, never objects of matplotlib's. Up to `MANY` pieces are
drawn as one collection of rectangles for each state; above, where a block is smaller than a pixel
anyway, as an image whose pixels mix the states' colours by the bytes they cover.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from arenapy.base.text import format_bytes
from arenapy.memory.region import Region
from arenapy.stats import BlockInfo

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["memory_map"]

#: Dark blue, orange and light grey: told apart by anyone, also in print without colours.
COLOURS = {"live": "#0072b2", "pending": "#e69f00", "idle": "#d0d0d0"}
UNUSED = "#ffffff"  # bytes of a region that are in no block
OUTLINE = "#404040"

ROWS = 32  # about so many, unless told
MAX_ROWS = 4096
SMALLEST_ROW, MAX_ROW = 64, 1 << 47  # bytes; no more than there are addresses
MANY = 5_000  # pieces; more are drawn as an image
PIXELS = 512  # of a row of the image: no more than a screen shows, which skips none then
LABELS = 40  # blocks that have their size written in, the largest ones
LABEL_SHARE = 1 / 12  # of a row, that a size needs
TICKS = 40
WIDTH, ROW_HEIGHT, LEAST_HEIGHT, MAX_HEIGHT = 11.0, 0.24, 2.2, 14.0  # inches
MARGIN = 0.06  # of a row, left free above and below

NO_MATPLOTLIB = """\
memory_map needs matplotlib, which cannot be imported ({error}). Install it:
  python -m pip install matplotlib
or, in a clone of arenapy, with the extra of this package: python -m pip install '.[plot]'"""


class HasBlocks(Protocol):
    """An object that can be drawn."""

    @property
    def regions(self) -> tuple[Region, ...]:
        """The regions."""

    def blocks(self) -> Iterable[BlockInfo]:
        """All blocks, in any order."""


class _Extents(NamedTuple):
    """Ranges of bytes: addresses, or positions in the picture."""

    start: NDArray[np.int64]
    nbytes: NDArray[np.int64]


def memory_map(
    allocator: HasBlocks, ax: Axes | None = None, *, row_bytes: int | None = None
) -> Axes:
    """Draw the live, idle (free) and pending blocks of an allocator in its memory.

    The memory is drawn in rows, like lines of text. Each region begins a new row, and is drawn up
    to the end of its last block. The title and the labels of regions show the bytes of all blocks,
    and the legend shows the bytes and blocks of each kind. The sizes of the largest blocks are
    written in.

    Parameters
    ----------
    allocator : Pool or Slab
        The allocator, or another object with ``blocks()`` and ``regions``.
    ax : matplotlib.axes.Axes, optional
        The axes to draw on. The default is a new figure of pyplot.
    row_bytes : int, optional
        Bytes of a row. The default is a power of two that makes about 32 rows.

    Returns
    -------
    matplotlib.axes.Axes

    Raises
    ------
    ImportError
        If matplotlib is not installed.
    TypeError
        If `allocator` has no blocks.
    ValueError
        If `row_bytes` is not positive, is more than 2**47, or makes too many rows.

    Notes
    -----
    Thread-safety: as ``allocator.blocks()``, which is called once. Use matplotlib from one thread
    at a time.

    Examples
    --------
    >>> import arenapy, matplotlib
    >>> matplotlib.use("agg")                # a picture for a file, and no window
    >>> from arenapy.plot import memory_map
    >>> pool = arenapy.Pool()
    >>> blocks = pool.alloc_many([1 << 20, 2 << 20])
    >>> memory_map(pool).figure.savefig("pool.png")
    """
    if not (callable(getattr(allocator, "blocks", None)) and hasattr(allocator, "regions")):
        raise TypeError(f"{allocator!r} has no blocks to draw; give a Pool or a Slab")
    if row_bytes is not None and not 0 < (row_bytes := operator.index(row_bytes)) <= MAX_ROW:
        raise ValueError(
            f"row_bytes={row_bytes} is not from 1 to {MAX_ROW}; give the bytes of a row"
        )
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise ImportError(NO_MATPLOTLIB.format(error=error)) from error

    addresses, states = _collect(allocator)
    layout = _Layout(allocator.regions, addresses, row_bytes)
    if ax is None:
        height = min(max(ROW_HEIGHT * layout.rows + 1.2, LEAST_HEIGHT), MAX_HEIGHT)
        _, ax = pyplot.subplots(figsize=(WIDTH, height), layout="constrained")
    known, at = layout.place(addresses)
    states = states[known]
    shown = {
        name: _Extents(at.start[states == code], at.nbytes[states == code])
        for code, name in enumerate(COLOURS)
    }
    _draw_regions(ax, layout)
    pieces = {name: layout.wrap(extents) for name, extents in shown.items()}
    if sum(len(one.start) for one in pieces.values()) <= MANY:
        _draw_pieces(ax, layout, pieces)
        _write_sizes(ax, layout, at)
    else:
        _draw_image(ax, layout, shown)
    _explain(ax, layout, type(allocator).__name__, shown)
    return ax


def _collect(allocator: HasBlocks) -> tuple[_Extents, NDArray[np.int8]]:
    """The blocks by address, and their states as places in `COLOURS`."""
    codes = {name: code for code, name in enumerate(COLOURS)}
    table = np.fromiter(
        ((block.address, block.nbytes, codes[block.state]) for block in allocator.blocks()),
        dtype=[("address", np.int64), ("nbytes", np.int64), ("state", np.int8)],
    )
    table = table[np.argsort(table["address"])]
    return _Extents(table["address"], table["nbytes"]), table["state"]


class _Layout:
    """Where in the picture an address is."""

    def __init__(self, regions: Iterable[Region], blocks: _Extents, row_bytes: int | None) -> None:
        spans = sorted((region.address, region.nbytes) for region in regions)
        self.addresses = np.array([address for address, _ in spans], np.int64)
        self.sizes = np.array([nbytes for _, nbytes in spans], np.int64)
        # Of each region what its blocks reach to: the rest may be address space and no memory.
        self.shown = np.zeros_like(self.sizes)
        inside, region = self._regions_of(blocks)
        ends = blocks.start + blocks.nbytes
        np.maximum.at(self.shown, region, ends[inside] - self.addresses[region])
        self.in_blocks = np.zeros_like(self.sizes)
        np.add.at(self.in_blocks, region, blocks.nbytes[inside])
        self.row_bytes = row_bytes or self._good_row()
        rows = np.maximum(-(-self.shown // self.row_bytes), 1)
        self.first_rows = np.concatenate([[0], np.cumsum(rows)])[:-1]
        self.rows = max(int(rows.sum()), 1)
        if self.rows > MAX_ROWS:
            least = -(-int(self.shown.sum()) // max(MAX_ROWS - len(spans), 1))
            raise ValueError(
                f"row_bytes={self.row_bytes} makes {self.rows:,} rows, and {MAX_ROWS:,} are the "
                f"most; give at least {least}"
            )

    def _good_row(self) -> int:
        least = max(int(self.shown.sum()) // ROWS, SMALLEST_ROW)
        return 1 << (least - 1).bit_length()

    def _regions_of(self, blocks: _Extents) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
        """Which blocks lie in a region, and in which one."""
        region = np.searchsorted(self.addresses, blocks.start, "right") - 1
        inside = region >= 0
        inside[inside] = (
            blocks.start[inside] - self.addresses[region[inside]] < self.sizes[region[inside]]
        )
        return inside, region[inside]

    def place(self, blocks: _Extents) -> tuple[NDArray[np.bool_], _Extents]:
        """Which blocks lie in a region still, and their positions."""
        inside, region = self._regions_of(blocks)
        offset = blocks.start[inside] - self.addresses[region]
        position = self.first_rows[region] * self.row_bytes + offset
        return inside, _Extents(position, blocks.nbytes[inside])

    def wrap(self, extents: _Extents) -> _Extents:
        """Cut extents where rows end."""
        row, end = self.row_bytes, extents.start + extents.nbytes
        first = extents.start // row
        count = (end - 1) // row - first + 1
        which = np.repeat(np.arange(len(count)), count)
        nth = np.arange(len(which)) - np.repeat(np.cumsum(count) - count, count)
        start = np.maximum(extents.start[which], (first[which] + nth) * row)
        stop = np.minimum(end[which], (first[which] + nth + 1) * row)
        return _Extents(start, stop - start)

    def boxes(self, pieces: _Extents) -> list[NDArray[np.float64]]:
        """The four corners of pieces that do not reach over the end of a row."""
        row, left = np.divmod(pieces.start, self.row_bytes)
        right = left + pieces.nbytes
        top, bottom = row + MARGIN, row + 1 - MARGIN
        corners = [(left, top), (right, top), (right, bottom), (left, bottom)]
        return list(np.stack([np.stack(corner, axis=-1) for corner in corners], axis=1))

    def regions(self) -> _Extents:
        """The part of each region that is drawn, as positions."""
        return _Extents(self.first_rows * self.row_bytes, self.shown)


def _draw_regions(ax: Axes, layout: _Layout) -> None:
    from matplotlib.collections import PolyCollection

    boxes = layout.boxes(layout.wrap(layout.regions()))
    ax.add_collection(
        PolyCollection(
            boxes, facecolors="none", edgecolors=OUTLINE, linewidths=0.8, zorder=4, gid="regions"
        )
    )


def _draw_pieces(ax: Axes, layout: _Layout, pieces: dict[str, _Extents]) -> None:
    from matplotlib.collections import PolyCollection

    for name, extents in pieces.items():
        boxes = layout.boxes(extents)
        ax.add_collection(
            PolyCollection(
                boxes, facecolors=COLOURS[name], edgecolors=UNUSED, linewidths=0.3, gid=name
            )
        )


def _draw_image(ax: Axes, layout: _Layout, shown: dict[str, _Extents]) -> None:
    from matplotlib.collections import PolyCollection
    from matplotlib.colors import to_rgb

    edges = np.linspace(0, layout.rows * layout.row_bytes, layout.rows * PIXELS + 1)
    pixel = layout.row_bytes / PIXELS
    image = np.zeros((layout.rows * PIXELS, 4))
    for name, extents in shown.items():
        share = _covered(extents, edges) / pixel
        image[:, :3] += share[:, None] * np.array(to_rgb(COLOURS[name]))
        image[:, 3] += share
    covered = _covered(layout.regions(), edges) / pixel
    unused = covered - image[:, 3]
    image[:, :3] += unused[:, None] * np.array(to_rgb(UNUSED))
    image[:, :3] /= np.where(covered > 0, covered, 1)[:, None]
    image[:, 3] = covered
    ax.imshow(
        np.clip(image, 0, 1).reshape(layout.rows, PIXELS, 4),
        extent=(0, layout.row_bytes, layout.rows, 0),
        aspect="auto",
        interpolation="nearest",
        zorder=1,
        gid="image",
    )
    above, below = np.arange(layout.rows + 1) - MARGIN, np.arange(layout.rows + 1) + MARGIN
    strips = [
        [(0, top), (layout.row_bytes, top), (layout.row_bytes, bottom), (0, bottom)]
        for top, bottom in zip(above.tolist(), below.tolist(), strict=True)
    ]
    ax.add_collection(PolyCollection(strips, facecolors=UNUSED, zorder=2, gid="between rows"))


def _covered(extents: _Extents, edges: NDArray[np.float64]) -> NDArray[np.float64]:
    """Bytes of disjoint, ascending extents between each two edges."""
    if not len(extents.start):
        return np.zeros(len(edges) - 1)
    ends = np.stack([extents.start, extents.start + extents.nbytes], axis=1).ravel()
    before = np.cumsum(extents.nbytes) - extents.nbytes
    bytes_so_far = np.stack([before, before + extents.nbytes], axis=1).ravel()
    return np.diff(np.interp(edges, ends, bytes_so_far))


def _write_sizes(ax: Axes, layout: _Layout, blocks: _Extents) -> None:
    """Write the sizes of the largest blocks into their first piece, where there is room."""
    for one in np.argsort(-blocks.nbytes, kind="stable")[:LABELS]:
        row, left = divmod(int(blocks.start[one]), layout.row_bytes)
        nbytes = int(blocks.nbytes[one])
        room = min(nbytes, layout.row_bytes - left)
        if room >= LABEL_SHARE * layout.row_bytes:
            ax.text(
                left + room / 2, row + 0.5, format_bytes(nbytes), ha="center", va="center",
                fontsize=7, clip_on=True,
                bbox={"facecolor": UNUSED, "alpha": 0.75, "pad": 0.8, "linewidth": 0},
            )  # fmt: skip


def _explain(ax: Axes, layout: _Layout, name: str, shown: dict[str, _Extents]) -> None:
    """Scales, legend and title."""
    from matplotlib.patches import Patch

    ax.set_xlim(0, layout.row_bytes)
    ax.set_ylim(layout.rows, 0)
    ticks = np.arange(0, layout.row_bytes + 1, max(layout.row_bytes // 8, 1))
    ax.set_xticks(ticks, [f"+{format_bytes(int(tick))}" for tick in ticks])
    rows, labels = _row_labels(layout)
    ax.set_yticks(np.array(rows) + 0.5, labels, family="monospace", fontsize=7)
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    handles = [
        Patch(
            facecolor=COLOURS[state], edgecolor=OUTLINE, linewidth=0.5,
            label=f"{state}: {format_bytes(int(extents.nbytes.sum()))}"
            f" in {len(extents.start):,} block{'s' * (len(extents.start) != 1)}",
        )
        for state, extents in shown.items()
    ]  # fmt: skip
    ax.legend(
        handles=handles, loc="upper center", bbox_to_anchor=(0.5, 0), borderaxespad=3, ncols=3
    )
    regions = len(layout.sizes)
    ax.set_title(
        f"{name}: {format_bytes(int(layout.in_blocks.sum()))} in {regions} "
        f"region{'s' * (regions != 1)}, {format_bytes(layout.row_bytes)} a row"
    )


def _row_labels(layout: _Layout) -> tuple[list[int], list[str]]:
    """Rows that are labelled, and their labels.

    These are the address of a region and the bytes of its blocks, or an offset.
    """
    every = max(-(-layout.rows // TICKS), 1)
    rows: list[int] = []
    labels: list[str] = []
    firsts = [int(row) for row in layout.first_rows]
    for index, first in enumerate(firsts):
        size = format_bytes(int(layout.in_blocks[index]))
        last = firsts[index + 1] if index + 1 < len(firsts) else layout.rows
        for row in range(first, last, every):
            offset = format_bytes((row - first) * layout.row_bytes)
            rows.append(row)
            labels.append(
                f"{int(layout.addresses[index]):#x}: {size}" if row == first else f"+{offset}"
            )
    return rows, labels
