"""The memory map, read back from the picture: extents from what is drawn, addresses from labels."""

import subprocess
import sys
import types

import matplotlib
import numpy as np
import pytest
from helpers import Pages
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

import arenapy
import arenapy.plot
from arenapy.base.text import format_bytes
from arenapy.plot import COLOURS, memory_map
from arenapy.stats import BlockInfo

STATES = ("live", "pending", "idle")
BASE = 0x7F00_0000_0000
LINE = 64

fewer = settings(max_examples=max(settings().max_examples // 4, 1))  # a drawing takes 0.1 s


@pytest.fixture(autouse=True, scope="module")
def headless():
    matplotlib.use("Agg")


class Drawn:
    """Regions and blocks, as an allocator has them."""

    def __init__(self, regions, blocks):
        self.regions = tuple(types.SimpleNamespace(address=a, nbytes=n) for a, n in regions)
        self.infos = blocks

    def blocks(self):
        return iter(self.infos)


@st.composite
def allocators(draw, most_regions=3):
    """Regions at any distance, of blocks with gaps, in any order."""
    regions, blocks = [], []
    at = BASE
    for _ in range(draw(st.integers(1, most_regions))):
        at += draw(st.integers(0, 1000)) * 4096
        begin = at
        for gap, lines, state in draw(
            st.lists(
                st.tuples(st.integers(0, 3), st.integers(1, 300), st.sampled_from(STATES)),
                max_size=20,
            )
        ):
            at += gap * LINE
            blocks.append(BlockInfo(at, lines * LINE, 0, state, 0))
            at += lines * LINE
        at += draw(st.integers(0, 100)) * LINE
        at = max(at, begin + LINE)
        regions.append((begin, at - begin))
    return Drawn(draw(st.permutations(regions)), draw(st.permutations(blocks)))


def draw(allocator, **options):
    figure = Figure(figsize=(12, 9), dpi=100)
    FigureCanvasAgg(figure)
    ax = figure.add_subplot()
    assert memory_map(allocator, ax, **options) is ax
    return ax


def rows(ax):
    """Address of each row's first byte, from the labels; and the bytes of a row, from the scale."""
    row_bytes = ax.get_xlim()[1]
    addresses, start = [], None
    for place, label in zip(ax.get_yticks(), ax.get_yticklabels(), strict=True):
        text = label.get_text()
        assert place == len(addresses) + 0.5, "not every row has a label"
        if text.startswith("0x"):
            start, first = int(text.partition(":")[0], 16), len(addresses)
        else:
            assert text == f"+{format_bytes(int((len(addresses) - first) * row_bytes))}"
        addresses.append(int(start + (len(addresses) - first) * row_bytes))
    assert ax.get_ylim() == (max(len(addresses), 1), 0), "rows go down"
    return addresses, row_bytes


def extents(ax, gid):
    """Address ranges that a collection's rectangles cover, adjacent ones joined."""
    addresses, row_bytes = rows(ax)
    (collection,) = [one for one in ax.collections if one.get_gid() == gid]
    found = []
    for path in collection.get_paths():
        left, top, right, bottom = path.get_extents().extents
        row = int(top)
        assert row < top < bottom < row + 1 and bottom - top > 0.8, "it is in one row"
        assert 0 <= left < right <= row_bytes
        assert len(set(map(tuple, path.vertices))) == 4, "it is a rectangle"
        found.append((addresses[row] + int(left), addresses[row] + int(right)))
    return joined(found)


def joined(ranges):
    result = []
    for start, end in sorted(ranges):
        if result and result[-1][1] == start:
            start = result.pop()[0]
        assert not result or result[-1][1] < start, "rectangles overlap"
        result.append((start, end))
    return result


def blocks_of(allocator, state):
    return joined((b.address, b.address + b.nbytes) for b in allocator.infos if b.state == state)


def legend_and_title_count(ax, allocator):
    texts = [text.get_text() for text in ax.get_legend().get_texts()]
    for state, text in zip(COLOURS, texts, strict=True):
        sizes = [block.nbytes for block in allocator.infos if block.state == state]
        plural = "" if len(sizes) == 1 else "s"
        assert text == f"{state}: {format_bytes(sum(sizes))} in {len(sizes)} block{plural}"
    sizes = [
        sum(one.nbytes for one in allocator.infos if 0 <= one.address - r.address < r.nbytes)
        for r in allocator.regions
    ]
    assert f"Drawn: {format_bytes(sum(sizes))} in {len(sizes)} region" in ax.get_title()
    for region, nbytes in zip(allocator.regions, sizes, strict=True):
        label = f"{region.address:#x}: {format_bytes(nbytes)}"
        assert label in [text.get_text() for text in ax.get_yticklabels()]


def sizes_are_written_in_their_blocks(ax, allocator):
    addresses, row_bytes = rows(ax)
    written = set()
    for text in ax.texts:
        x, y = text.get_position()
        address = addresses[int(y)] + x
        (block,) = [b for b in allocator.infos if b.address <= address < b.address + b.nbytes]
        assert text.get_text() == format_bytes(block.nbytes)
        written.add(block)
    assert len(written) == len(ax.texts) <= arenapy.plot.LABELS
    for block in allocator.infos:
        left = min(block.address - row for row in addresses if row <= block.address)
        room = min(block.nbytes, row_bytes - left)
        larger = sum(other.nbytes >= block.nbytes for other in allocator.infos)
        if room >= row_bytes / 10 and larger <= arenapy.plot.LABELS:
            assert block in written, "there was room"


def pixels(ax):
    """The picture's RGB, and the function from (x, y) in it to a place there."""
    canvas = ax.figure.canvas
    canvas.draw()
    image = np.asarray(canvas.buffer_rgba())[:, :, :3] / 255

    def at(x, y):
        column, up = ax.transData.transform((x, y))
        return image[image.shape[0] - 1 - int(up), int(column)]

    return at


# ---- geometry ----------------------------------------------------------------------------------


@fewer
@given(allocators(), st.sampled_from([None, LINE * 7, 4096, 100_000]))
def test_rectangles_and_labels_are_the_blocks(allocator, row_bytes):
    total = sum(region.nbytes for region in allocator.regions)
    if row_bytes and total > 30 * row_bytes:  # more rows than labels
        row_bytes = None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arenapy.plot, "LABELS", 5)
        ax = draw(allocator, row_bytes=row_bytes)
        sizes_are_written_in_their_blocks(ax, allocator)
    legend_and_title_count(ax, allocator)
    assert row_bytes is None or rows(ax)[1] == row_bytes
    for state in STATES:
        assert extents(ax, state) == blocks_of(allocator, state)
    outline = []
    for region in allocator.regions:
        end = region.address + region.nbytes
        ends = [b.address + b.nbytes for b in allocator.infos if region.address <= b.address < end]
        if ends:
            outline.append((region.address, max(ends)))
    assert extents(ax, "regions") == joined(outline)


@fewer
@given(allocators(), st.sampled_from([None, 100_000, 654_321]))
def test_image_mixes_colours_by_bytes(allocator, row_bytes):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arenapy.plot, "MANY", -1)
        ax = draw(allocator, row_bytes=row_bytes)
    addresses, row_bytes = rows(ax)
    (image,) = ax.images
    assert image.get_extent() == [0, row_bytes, len(addresses), 0]
    array = np.asarray(image.get_array())
    assert array.shape[0] == len(addresses)
    cell = row_bytes / array.shape[1]
    by_region = {region.address: [] for region in allocator.regions}
    starts = np.array(sorted(by_region))
    for block in allocator.infos:
        by_region[starts[np.searchsorted(starts, block.address, "right") - 1]].append(block)
    for row in range(len(addresses)):
        begin = starts[np.searchsorted(starts, addresses[row], "right") - 1]
        blocks = by_region[begin]
        last = max((b.address + b.nbytes for b in blocks), default=begin)
        ends_in = int((last - addresses[row]) / cell)
        for column in {0, 1, 100, 256, array.shape[1] - 1, min(ends_in, array.shape[1] - 1)}:
            low = addresses[row] - BASE + column * cell

            def overlap(start, end, low=low):
                return max(0.0, min(end - BASE, low + cell) - max(start - BASE, low)) / cell

            shares = [(overlap(b.address, b.address + b.nbytes), b.state) for b in blocks]
            alpha = overlap(begin, last)
            assert array[row, column, 3] == pytest.approx(alpha, abs=1e-9)
            if alpha > 1e-6:
                blank = np.array([alpha - sum(share for share, _ in shares)] * 3)
                mix = sum((share * np.array(to_rgb(COLOURS[s])) for share, s in shares), blank)
                assert array[row, column, :3] == pytest.approx(mix / alpha, abs=1e-6)


@pytest.mark.parametrize("many", [-1, 10**6])
def test_pixels_have_the_colour_of_the_block(monkeypatch, many):
    """Whichever way it is drawn, the screen shows each state's colour where the block is."""
    monkeypatch.setattr(arenapy.plot, "MANY", many)
    monkeypatch.setattr(arenapy.plot, "LABELS", 0)
    sizes = [4096 * n for n in (3, 1, 7, 2, 5, 9, 1, 4)]
    blocks, at = [], BASE
    for i, nbytes in enumerate(sizes):
        blocks.append(BlockInfo(at, nbytes, 0, STATES[i % 3], 0))
        at += nbytes
    ax = draw(Drawn([(BASE, at - BASE), (BASE + (1 << 30), 1 << 20)], blocks), row_bytes=16384)
    colour = pixels(ax)
    for block in blocks:
        for byte in range(block.address - BASE + 512, block.address - BASE + block.nbytes, 1024):
            row, left = divmod(byte, 16384)
            assert colour(left, row + 0.5) == pytest.approx(to_rgb(COLOURS[block.state]), abs=0.01)
            assert colour(left, row + 1) == pytest.approx((1, 1, 1), abs=0.3), "rows run together"


def test_states_are_told_apart_without_colours():
    """By lightness (CIE L*), which every kind of colour vision has, and so does a grey print."""

    def lightness(colour):
        linear = [
            c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour)
        ]
        luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
        return 116 * luminance ** (1 / 3) - 16

    values = sorted(map(lightness, [*COLOURS.values(), arenapy.plot.UNUSED]))
    assert min(np.diff(values)) > 10


# ---- scale, and what is refused ----------------------------------------------------------------


def test_many_blocks_are_few_artists():
    at = BASE + np.arange(100_000) * LINE
    blocks = [BlockInfo(int(a), LINE, 0, STATES[i % 3], 0) for i, a in enumerate(at)]
    ax = draw(Drawn([(BASE, 100_000 * LINE)], blocks))
    assert len(ax.images) == 1 and len(ax.texts) == 0
    assert sum(len(one.get_paths()) for one in ax.collections) < 200
    assert not ax.patches
    shares = ax.images[0].get_array()
    assert shares.shape[0] * shares.shape[1] < 100_000


def test_address_space_beyond_the_last_block_is_not_drawn():
    """A region may be a reservation of terabytes; its first megabyte has to be seen."""
    blocks = [
        BlockInfo(BASE, 1 << 19, 0, "live", 0),
        BlockInfo(BASE + (1 << 19), 1 << 19, 0, "idle", 0),
    ]
    ax = draw(Drawn([(BASE, 1 << 42)], blocks))
    addresses, row_bytes = rows(ax)
    assert 16 <= len(addresses) <= 64 and len(addresses) * row_bytes == 1 << 20
    assert ax.get_yticklabels()[0].get_text() == f"{BASE:#x}: 1 MiB"


def test_a_block_that_is_in_no_region_any_more_is_left_out():
    """Another thread may give a region back between the two looks."""
    blocks = [BlockInfo(BASE + offset, 4096, 0, "live", 0) for offset in (-4096, 0, 4096, 8192)]
    ax = draw(Drawn([(BASE, 4096)], blocks))
    assert extents(ax, "live") == [(BASE, BASE + 4096)]


@pytest.mark.parametrize(
    "make",
    [
        lambda: arenapy.Pool(source=Pages()),
        lambda: arenapy.Pool(max_bytes=1 << 30),
        lambda: arenapy.Slab(4096, 100, source=Pages(), max_count=1000),
    ],
    ids=["pool", "reserved pool", "slab"],
)
def test_real_allocators(make):
    """What is drawn live is what users hold, and the sums are those of the statistics."""
    allocator = make()
    buffers = [allocator.alloc(256 + 3 * i) for i in range(300)]
    del buffers[20:50], buffers[100:200:2]
    ax = draw(allocator)
    live = extents(ax, "live")
    for buffer in buffers:
        (inside,) = [one for one in live if one[0] <= buffer.address < one[1]]
        assert buffer.address + buffer.nbytes <= inside[1]
    stats = allocator.stats()
    sums = {state: sum(end - start for start, end in extents(ax, state)) for state in STATES}
    assert sums == {
        "live": stats.allocated_bytes,
        "pending": stats.pending_bytes,
        "idle": stats.idle_bytes,
    }
    assert ax.get_title().startswith(
        f"{type(allocator).__name__}: {format_bytes(sum(sums.values()))} in"
    )
    assert stats.idle_bytes and f"in {len(buffers)} blocks" in str(ax.get_legend().get_texts()[0])


@pytest.mark.parametrize("regions", [[], [(BASE, 1 << 20)]])
def test_nothing_to_draw(regions):
    ax = draw(Drawn(regions, []))
    assert all(not one.get_paths() for one in ax.collections)
    ax.figure.canvas.draw()


def test_a_figure_is_made_if_none_is_given():
    from matplotlib import pyplot

    try:
        ax = memory_map(Drawn([(BASE, 4096)], [BlockInfo(BASE, 4096, 0, "live", 0)]))
        assert pyplot.gcf() is ax.figure
        assert [type(one) for one in ax.collections] == [PolyCollection] * 4
    finally:
        pyplot.close("all")


@pytest.mark.parametrize(
    ("allocator", "row_bytes", "error", "match"),
    [
        (object(), None, TypeError, "has no blocks to draw; give a Pool or a Slab"),
        (Drawn, None, TypeError, "has no blocks"),
        (Drawn([(BASE, 4096)], []), 0, ValueError, "row_bytes=0 is not from 1 to"),
        (Drawn([(BASE, 4096)], []), -1, ValueError, "row_bytes=-1 is not from 1 to"),
        (Drawn([(BASE, 4096)], []), 2**47 + 1, ValueError, r"row_bytes=\d+ is not from 1 to"),
        (Drawn([(BASE, 4096)], []), 2**70, ValueError, r"row_bytes=\d+ is not from 1 to"),
        (Drawn([(BASE, 4096)], []), "1", TypeError, "str"),
    ],
)
def test_bad_input_draws_nothing(allocator, row_bytes, error, match):
    ax = Figure().add_subplot()
    with pytest.raises(error, match=match):
        memory_map(allocator, ax, row_bytes=row_bytes)
    assert not (ax.collections or ax.images or ax.texts or ax.get_legend())


def test_too_many_rows_are_refused_with_a_number_that_works():
    allocator = Drawn([(BASE, 1 << 30)], [BlockInfo(BASE, 1 << 30, 0, "live", 0)])
    with pytest.raises(ValueError, match="makes 16,777,216 rows") as refusal:
        draw(allocator, row_bytes=64)
    least = int(str(refusal.value).rpartition(" ")[2])
    draw(allocator, row_bytes=least)
    with pytest.raises(ValueError, match="rows"):
        draw(allocator, row_bytes=least // 2)


def test_without_matplotlib_it_says_what_to_install():
    program = """
import sys
sys.modules["matplotlib"] = None
from arenapy.plot import memory_map
class Empty:
    regions = ()
    def blocks(self): return []
memory_map(Empty())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 1
    assert "ImportError: memory_map needs matplotlib, which cannot be imported" in done.stderr
    assert "python -m pip install matplotlib" in done.stderr and "'.[plot]'" in done.stderr
