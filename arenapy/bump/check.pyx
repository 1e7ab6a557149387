"""The validity check of a Bump's bookkeeping: what `Bump.check` does.

The invariants stand at the top of core.pyx. Everything is copied out first, under the
lock, so that no Python code runs while it is held.
"""
from libc.stdlib cimport free, malloc
from libc.stdint cimport uint64_t, uintptr_t
from libc.string cimport memcpy

from arenapy.base.atomic cimport arenapy_lock_acquire, arenapy_lock_release
from arenapy.buffer.block cimport Hold
from arenapy.bump.hot_path cimport used
from arenapy.bump.core cimport BumpCore, Frame
from arenapy.base.interval_set cimport Extent, extents_above, extents_fault, extents_first
from arenapy.memory.region cimport Region

cdef enum:
    RUN = 0
    CURRENT = 1
    FREE = 2
    RETIRED = 3
    LEASED = 4
    HELD = 5
    HOLE = 6

cdef tuple NAMES = (
    "run", "current extent", "free extent", "retired block", "leased range", "block", "hole",
)

cdef struct Range:
    uintptr_t start
    uintptr_t end
    Py_ssize_t region
    int what


cdef Py_ssize_t _count(Hold* hold) noexcept nogil:
    cdef Py_ssize_t n = 0
    while hold != NULL:
        n += 1
        hold = hold.next
    return n


def verify(BumpCore c not None):
    """Raise AssertionError unless every invariant of the arena holds."""
    cdef Range* ranges
    cdef Hold* hold
    cdef Extent* e
    cdef Py_ssize_t i, n = 0, most
    cdef Frame* frames
    cdef Py_ssize_t n_frames, n_runs
    cdef uint64_t content
    cdef size_t[6] sums
    cdef uintptr_t end = 0
    cdef Region last
    cdef const char* fault
    c.reclaim(False)
    arenapy_lock_acquire(&c.lock)
    fault = extents_fault(&c.free)           # else nothing below can be relied on
    if fault == NULL:
        fault = extents_fault(&c.holes)
    if fault != NULL:
        arenapy_lock_release(&c.lock)
        raise AssertionError((<bytes>fault).decode())
    most = c.n_runs + 1 + c.free.n + c.holes.n + _count(c.retired) + _count(c.leased)
    for i in range(c.n_frames):
        most += _count(c.frames[i].holds)
    ranges = <Range*>malloc(most * sizeof(Range))
    frames = <Frame*>malloc(c.n_frames * sizeof(Frame))
    if ranges == NULL or frames == NULL:
        arenapy_lock_release(&c.lock)
        free(ranges)
        free(frames)
        raise MemoryError("no memory to check with")
    for i in range(c.n_runs):
        ranges[n] = Range(c.runs[i].start, c.runs[i].end, c.runs[i].region, RUN)
        n += 1
    ranges[n - 1].end = c.cursor
    ranges[n] = Range(c.cursor, c.limit, c.runs[c.n_runs - 1].region, CURRENT)
    n += 1
    e = extents_first(&c.free)
    while e != NULL:
        ranges[n] = Range(e.start, e.end, e.region, FREE)
        n += 1
        e = extents_above(&c.free, e.region, e.start)
    e = extents_first(&c.holes)
    while e != NULL:
        ranges[n] = Range(e.start, e.end, e.region, HOLE)
        n += 1
        e = extents_above(&c.holes, e.region, e.start)
    hold = c.retired
    while hold != NULL:
        ranges[n] = Range(hold.start, hold.end, hold.region, RETIRED)
        n += 1
        hold = hold.next
    hold = c.leased
    while hold != NULL:
        ranges[n] = Range(hold.start, hold.end, hold.region, LEASED)
        n += 1
        hold = hold.next
    for i in range(c.n_frames):
        hold = c.frames[i].holds
        while hold != NULL:
            ranges[n] = Range(hold.start, hold.end, -1, HELD)
            n += 1
            hold = hold.next
    memcpy(frames, c.frames, c.n_frames * sizeof(Frame))
    n_frames, n_runs, content = c.n_frames, c.n_runs, c.content
    regions = c.regions        # a tuple: the arena may grow before it is looked at
    if regions:                # the last one may do so in place
        last = <Region>regions[len(regions) - 1]
        end = <uintptr_t>last.ptr + last.size
    sums[0], sums[1], sums[2] = c.capacity, used(c), c.free_bytes()
    sums[3], sums[4], sums[5] = c.retired_bytes, c.leased_bytes, c.live
    arenapy_lock_release(&c.lock)
    try:
        copies = [(ranges[i].region, ranges[i].start, ranges[i].end, ranges[i].what)
                  for i in range(n)]
        stamps = [(frames[i].content, frames[i].id, frames[i].run) for i in range(n_frames)]
    finally:
        free(ranges)
        free(frames)
    _verify_tiling(regions, end, copies)
    _verify_figures(copies, [sums[i] for i in range(6)])
    _verify_held(copies)
    _verify_frames(stamps, content)
    _verify_runs(copies[:n_runs], [frame[2] for frame in stamps])


def _name(entry):
    _, start, end, what = entry
    return f"{NAMES[what]} [{start:#x}, {end:#x})"


def _verify_tiling(regions, end, copies):
    """Runs, free extents, retired and leased ranges and holes tile the regions without overlap."""
    tiles = sorted(t for t in copies if t[3] != HELD and t[1] != t[2])
    by_region = {}
    for tile in tiles:
        if tile[1] >= tile[2]:
            raise AssertionError(f"{_name(tile)} ends before it starts")
        by_region.setdefault(tile[0], []).append(tile)
    for index, region in enumerate(regions):
        at = (<Region>region).address
        before = None
        for tile in by_region.get(index, []):
            if tile[1] < at:
                raise AssertionError(f"{_name(tile)} overlaps what ends at {at:#x}: {before}")
            if tile[1] > at:
                raise AssertionError(
                    f"nobody owns [{at:#x}, {tile[1]:#x}), before {_name(tile)}"
                )
            if before is not None and before[3] == FREE and tile[3] == FREE:
                raise AssertionError(
                    f"{_name(before)} and {_name(tile)} are adjacent and not merged"
                )
            at = tile[2]
            before = tile
        stop = end if index == len(regions) - 1 else region.address + region.nbytes
        if at != stop:
            raise AssertionError(f"nobody owns [{at:#x}, {stop:#x}) at the end of {region!r}")
    if not set(by_region) <= set(range(len(regions))):
        raise AssertionError("a range is in no region")


def _verify_figures(copies, figures):
    capacity, in_runs, free_, retired, leased, live = figures
    sizes = [0] * len(NAMES)
    for _, start, end, what in copies:
        sizes[what] += end - start
    if sizes[RUN] != in_runs:
        raise AssertionError(f"used is {in_runs}, and the runs have {sizes[RUN]} bytes")
    if sizes[RETIRED] != retired:
        raise AssertionError(f"retired is {retired}, and blocks have {sizes[RETIRED]}")
    if sizes[LEASED] != leased:
        raise AssertionError(f"leased is {leased}, and ranges have {sizes[LEASED]}")
    if sizes[FREE] + sizes[CURRENT] != free_:
        raise AssertionError(f"free is {free_}, not the extents' sum")
    if in_runs + free_ + retired + leased != capacity:
        raise AssertionError(f"{figures} do not add up")
    if live > in_runs:
        raise AssertionError(f"live is {live} of {in_runs} used")


def _verify_held(copies):
    """Held blocks are disjoint, and those of standing frames lie in runs."""
    held = sorted((t[1], t[2]) for t in copies if t[3] in (HELD, RETIRED))
    for one, other in zip(held, held[1:]):
        if one[1] > other[0]:
            raise AssertionError(
                f"blocks [{one[0]:#x}, {one[1]:#x}) and [{other[0]:#x}, {other[1]:#x}) overlap"
            )
    runs = sorted((t[1], t[2]) for t in copies if t[3] == RUN)
    i = 0
    for start, end in sorted((t[1], t[2]) for t in copies if t[3] == HELD):
        while i < len(runs) and runs[i][1] < end:
            i += 1
        if i == len(runs) or runs[i][0] > start:
            raise AssertionError(f"block [{start:#x}, {end:#x}) is in no run")


def _verify_frames(frames, content):
    for older, newer in zip(frames, frames[1:]):
        if older[0] >= newer[0] or older[1] >= newer[1] or older[2] > newer[2]:
            raise AssertionError(f"frames {older} and {newer} are out of order")
    last = frames[len(frames) - 1]
    if last[0] != content:
        raise AssertionError(f"the content is {content}, and the last frame's is {last[0]}")


def _verify_runs(runs, stood_at):
    """There are no more of them than frames, and runs with bytes in them, and the current one."""
    if max(stood_at) >= len(runs):
        raise AssertionError(f"a frame stands at run {max(stood_at)} of {len(runs)}")
    empty = {i for i, run in enumerate(runs[:len(runs) - 1]) if run[1] == run[2]}
    if not empty <= set(stood_at):
        raise AssertionError(
            f"of {len(runs)} runs, {len(empty - set(stood_at))} are empty and no frame stands there"
        )
