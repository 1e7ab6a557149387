"""A map of a trace's blocks: addresses upwards, time to the right.

What lives here: where on the map an address is, which blocks are drawn one by one, and the picture
of those that are not. What does not: lifetimes (timeline.py), colours and drawing
(page.py).

An address space is nearly empty. Gaps that no block ever used are drawn as they are, the smallest
first, as long as all of them together are no larger than what was used; the others are cut.

Blocks beyond some number would only slow the page down, most of them smaller than a pixel. These
become an image whose pixels say how much of them is covered, to the byte.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from arenapy.trace.timeline import Blocks

__all__ = ["Axis", "Image", "axis", "chosen", "image"]

Floats: TypeAlias = npt.NDArray[np.float64]
Ints: TypeAlias = npt.NDArray[np.int64]
Addresses: TypeAlias = npt.NDArray[np.uint64]

GAP = 1 / 50  # of all bytes that were ever used: as large a gap is drawn that is cut,
GAPS = 1 / 4  # and all such gaps together not larger than that
PIXELS = 1000, 500  # of the map, about: how large a block looks
CELLS = 800, 400  # of the image


@dataclass(frozen=True, eq=False, slots=True)
class Axis:
    """Where addresses are on the map.

    Attributes
    ----------
    start, end : ndarray of uint64
        Addresses of the spans that are drawn as they are, ascending.
    at : ndarray of float64
        Where each one begins, in bytes from the bottom of the map.
    height : float
        Of all.
    """

    start: Addresses
    end: Addresses
    at: Floats
    height: float

    def place(self, address: Addresses) -> Floats:
        """Positions; what lies between two spans is in the space between them."""
        if not len(self.start):
            return np.zeros(len(address))
        which = np.maximum(np.searchsorted(self.start, address, "right") - 1, 0)
        inside = np.minimum(np.maximum(address, self.start[which]), self.end[which])
        found = self.at[which] + (inside - self.start[which]).astype("f8")
        ends = self.at + (self.end - self.start).astype("f8")
        space = np.append(self.at[1:], self.height)[which] - ends[which]
        between = np.append(self.start[1:], self.end[-1])[which] - self.end[which]
        beyond = (address - inside).astype("f8") * (address > inside)
        share = np.divide(beyond, between, out=np.zeros(len(beyond)), where=between > 0)
        return np.asarray(found + np.minimum(share, 1) * space)


def axis(address: Addresses, nbytes: npt.NDArray[np.int64]) -> Axis:
    """An axis for blocks."""
    used = nbytes > 0
    order = np.argsort(address[used], kind="stable")
    start = address[used][order]
    room = np.uint64(2**64 - 1) - start
    end = np.maximum.accumulate(start + np.minimum(nbytes[used][order].astype("u8"), room))
    if not len(start):
        return Axis(start, end, np.zeros(0), 0.0)
    new = end - np.maximum(start, np.append(start[:1], end[:-1]))  # that no other one has
    total = float(new.astype("f8").sum())
    gap = (start[1:] - np.minimum(end[:-1], start[1:])).astype("f8")
    rising = np.sort(gap)
    kept = np.searchsorted(np.cumsum(rising), total, "right")
    cut = gap > (rising[kept - 1] if kept else 0)
    first, last = np.append(True, cut), np.append(cut, True)
    span_start, span_end = start[first], end[last]
    size = (span_end - span_start).astype("f8")
    space = min(total * GAP, total * GAPS / max(1, int(np.count_nonzero(cut))))
    space = max(1.0, np.floor(space))  # so that every byte has a whole number
    at = np.append(0.0, np.cumsum(size + space)[:-1])
    return Axis(span_start, span_end, at, float(at[-1] + size[-1]))


def chosen(found: Blocks, left: Floats, right: Floats, height: float, most: int) -> Ints:
    """The blocks that are drawn one by one, as places, the first ones of those that look largest.

    Parameters
    ----------
    found : Blocks
    left, right : ndarray
        Where each block begins and ends on the axis of time.
    height : float
        Of the map, in bytes.
    most : int
        How many are drawn.
    """
    if len(found) <= most:
        return np.arange(len(found))
    width = float(right.max() - left.min()) or 1.0
    seen = [
        np.maximum(extent * (pixels / whole), 1.0)
        for extent, pixels, whole in (
            (right - left, PIXELS[0], width),
            (found.nbytes, PIXELS[1], height or 1.0),
        )
    ]
    largest = np.lexsort((-found.nbytes, -seen[0] * seen[1]))[:most]
    return np.sort(largest)


class Image(NamedTuple):
    """The covered share of each cell of a grid, rows upwards.

    Attributes
    ----------
    share : ndarray of float64
        Of rows and columns; 1: all of it.
    left, right : float
        Of the grid, on the axis of time.
    height : float
        Of the grid, in bytes.
    """

    share: Floats
    left: float
    right: float
    height: float


def image(
    left: Floats, right: Floats, bottom: Floats, top: Floats, bounds: tuple[float, float, float]
) -> Image:
    """Blocks as an image, exact to rounding: the shares are the covered area of each cell.

    A block is the difference of four quadrants. The corner of each is given to the four cells
    around it, in shares, and summing up along both axes then makes areas of them.
    """
    first, last, height = bounds
    columns, rows = CELLS
    shape = rows + 2, columns + 2
    grid = np.zeros(shape[0] * shape[1])
    across = (last - first) or 1.0
    for x, x_sign in (left, 1.0), (right, -1.0):
        column, x_rest = np.divmod(np.clip((x - first) / across, 0, 1) * columns, 1.0)
        for y, y_sign in (bottom, 1.0), (top, -1.0):
            row, y_rest = np.divmod(np.clip(y / (height or 1.0), 0, 1) * rows, 1.0)
            corner = row.astype("i8") * shape[1] + column.astype("i8")
            for row_step, row_share in (0, 1 - y_rest), (1, y_rest):
                for step, share in (0, 1 - x_rest), (1, x_rest):
                    grid += np.bincount(
                        corner + (row_step * shape[1] + step),
                        x_sign * y_sign * row_share * share,
                        len(grid),
                    )
    whole = np.cumsum(np.cumsum(grid.reshape(shape), axis=0), axis=1)[:rows, :columns]
    return Image(np.maximum(whole, 0), first, last, height)
