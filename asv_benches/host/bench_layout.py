"""The effect of layout and page size on loops: the same sums over differently placed words.

Sixteen 32-bit fields make a record of one cache line. As an array of structs, one field of every
record is a stride of 16 words; as a struct of arrays, a stride of 1. A random gather picks as many
words as there are records, in an order that no prefetcher guesses: then what counts is how much
memory the words are spread over, in cache lines and in pages. Each is run on 4 KiB pages and on
huge pages; what share of the memory really lies on huge pages is read from the kernel.

What this does not show: records that are used whole, for which an array of structs is as good
("all fields" below), and data that fits the cache, where only the instructions count.
"""

import numpy as np

import arenapy
from asv_benches.support import native
from asv_benches.support.rounds import CLOCK, Line, Way, medians, named

FIELDS = 16
RECORDS = 1 << 22  # 256 MiB of records, 16 MiB a field
WORDS = FIELDS * RECORDS
STRIDES = (1, 2, 16)
PAGES = {"4 KiB pages": None, "huge pages": "auto"}

# Per record, but for the strides: those are over all memory, per word that is read.
WAYS = {
    "one field, struct of arrays": Way("stride_sum(x, 1)", operations=RECORDS),
    "one field, array of structs": Way("stride_sum(records, 16)", operations=RECORDS),
    "all fields, struct of arrays": Way(
        "for field in fields: stride_sum(field, 1)", operations=RECORDS
    ),
    "all fields, array of structs": Way("stride_sum(records, 1)", operations=RECORDS),
    "random gather, struct of arrays": Way("gather_sum(x, order, 1)", operations=RECORDS),
    "random gather, array of structs": Way("gather_sum(records, order, 16)", operations=RECORDS),
} | {
    f"stride {stride}": Way(f"stride_sum(records, {stride})", operations=WORDS // stride)
    for stride in STRIDES
}


def namespace(huge_pages):
    """The names that the statements use, over memory of that kind."""
    arena = arenapy.Bump(2 * WORDS * 4, arenapy.Host(huge_pages=huge_pages))
    records = arena.empty(WORDS, "u4")
    records[:] = np.arange(WORDS, dtype="u4")
    names = [f"f{i}" for i in range(FIELDS)]
    fields = arena.struct_of_arrays(dict.fromkeys(names, "u4"), RECORDS)
    for i, name in enumerate(names):
        fields[name][:] = records[i::FIELDS]
    order = np.random.default_rng(0).permutation(RECORDS).astype("u4")
    loops = native.load()
    # The loops are benchmarks only as long as they add up the right words.
    want = int(fields["f0"].sum(dtype="u4"))
    for got in (
        loops.stride_sum(fields["f0"], 1),
        loops.stride_sum(records, FIELDS),
        loops.gather_sum(fields["f0"], order, 1),
        loops.gather_sum(records, order, FIELDS),
    ):
        assert got == want
    return {
        "records": records,
        "x": fields["f0"],
        "fields": list(fields.values()),
        "order": order,
        "stride_sum": loops.stride_sum,
        "gather_sum": loops.gather_sum,
        "huge_fraction": arena.regions[0].huge_fraction,
    }


class Layout:
    """asv: one sum each, over 4 Mi records."""

    params = (tuple(WAYS), tuple(PAGES))
    param_names = ("loop", "pages")
    number = 1
    timer = CLOCK
    repeat = (5, 20, 2.0)
    timeout = 300

    def setup(self, loop, pages):
        """New records."""
        self.loop = WAYS[loop].loop(namespace(PAGES[pages]))

    @named("Sum over 4 Mi records, by layout and pages")
    def time_4_mi_records(self, loop, pages):
        """Add up."""
        self.loop.timeit(1)


class Huge:
    """asv: the share of memory on huge pages, which a figure above depends on."""

    params = tuple(PAGES)
    param_names = ("pages",)

    @named("Share of memory on huge pages", "1")
    def track_huge_fraction(self, pages):
        """As the kernel says."""
        arena = arenapy.Bump(128 << 20, arenapy.Host(huge_pages=PAGES[pages]))
        return arena.regions[0].huge_fraction


def lines(quick):
    """The report's lines: nanoseconds a record, and how often faster huge pages are."""
    spaces = {pages: namespace(huge) for pages, huge in PAGES.items()}
    for pages, names in spaces.items():
        yield Line("layout", f"huge_fraction: {pages}", names["huge_fraction"], "1")
    # Both kinds of pages take turns: the names of one loop are of one kind each.
    ways = {}
    names = {}
    for i, (pages, space) in enumerate(spaces.items()):
        names[f"space{i}"] = space
        bring = f"globals().update(space{i})"
        ways |= {
            f"{what}: {pages}": Way(way.statement, bring, way.operations)
            for what, way in WAYS.items()
        }
    found = medians(ways, names, 1, 5 if quick else 31)
    for name, seconds in found.items():
        yield Line("layout", name, seconds * 1e9, "ns")
    small, huge = PAGES
    for what in WAYS:
        yield Line(
            "layout",
            f"{what}: {small} / {huge}",
            found[f"{what}: {small}"] / found[f"{what}: {huge}"],
        )
