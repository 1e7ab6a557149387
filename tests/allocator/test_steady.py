"""What is repeated for ever: a pattern of use leaves behind no memory, no bookkeeping, no work.

A `Bump` first, whose frames arrays outlive in any order; then all that is in patterns.py, which
says how to repeat each a million times by hand. The profile `long` repeats them fifty times as
often.
"""

import contextlib

import kernel_view
import patterns
import pytest
from bump_model import FRAMES, outlived, steady
from helpers import exact, unchanged_view
from hypothesis import example, given, settings
from hypothesis import strategies as st

CALLS = 100
#: What an arena has before, in a list that keeps it.
OUTER = {
    "block": lambda arena, stack: arena.alloc(100),
    "array": lambda arena, stack: arena.empty(100, "u1"),
    "survivor": lambda arena, stack: survivor(arena),
    "mark": lambda arena, stack: arena.mark(),
    "dead mark": lambda arena, stack: (arena.mark(), arena.alloc(8))[1],
    "scope": lambda arena, stack: stack.enter_context(arena.scope()),
}


def survivor(arena):
    with arena.scope():
        arena.alloc(640)
        return arena.empty(100, "u1")


@given(
    outer=st.lists(st.sampled_from(sorted(OUTER)), max_size=5),
    frames=st.lists(st.sampled_from(sorted(FRAMES)), min_size=1, max_size=4),
    parts=st.lists(st.sampled_from(["array", "kept", "block"]), min_size=1, max_size=3),
    nbytes=st.integers(0, 2000),
    which=st.integers(0, 3),
)
@example(outer=[], frames=["scope"], parts=["array"], nbytes=800, which=0)
@example(outer=[], frames=["scope"], parts=["kept"], nbytes=800, which=0)
@example(outer=[], frames=["exception"], parts=["array"], nbytes=800, which=0)
def test_frames_that_arrays_outlive(outer, frames, parts, nbytes, which):
    """As people write it; runs are no more than frames and what is alive, which `check` knows."""
    arena = exact(1 << 20)
    kept = {}
    with contextlib.ExitStack() as stack:
        held = [OUTER[name](arena, stack) for name in outer]
        before = steady(unchanged_view(arena))
        for number in range(CALLS):
            if number == CALLS // 4:
                metadata = arena.stats().metadata_bytes
            outlived(arena, frames, parts, nbytes, kept, which)
            if number < 4:
                arena.check()
        arena.check()
        assert arena.stats().metadata_bytes == metadata, "the bookkeeping grows"
        kept.clear()
        assert steady(unchanged_view(arena)) == before, "something was left behind"
        del held


#: What calls may leave behind: each of them, less than any block of memory; all together, what
#: the interpreter's and the libraries' own tables may get on the way.
LIMITS = {
    "heap": (4, 1000), "objects": (0.04, 60), "metadata": (1, 0), "reserved": (1, 0),
    "files": (0.01, 0),
}  # fmt: skip
if not kernel_view.SANITIZED:  # AddressSanitizer maps memory of its own for the threads that begin
    LIMITS["maps"] = (0.01, 0)
WINDOWS = 12  # a leak grows in each of them; what a thread that ends leaves for a moment does not


@pytest.mark.parametrize("name", patterns.PATTERNS)
@pytest.mark.no_sanitizer  # a long count; other tests run the same code there
@pytest.mark.sampled
def test_a_pattern_leaves_nothing_behind(name):
    """However often it is repeated. Caches fill up once, so one window without growth will do."""
    call, allocators = patterns.made(name)
    calls = max(10, 10 * settings().max_examples // patterns.PATTERNS[name].weight)
    for _ in range(calls // 2):
        call()
    windows = []
    for _ in range(WINDOWS):
        before = patterns.Held.now(allocators)
        for _ in range(calls):
            call()
        after = patterns.Held.now(allocators)
        grown = {what: getattr(after, what) - getattr(before, what) for what in LIMITS}
        if all(grown[what] <= each * calls + all_ for what, (each, all_) in LIMITS.items()):
            break
        windows.append({what: count for what, count in grown.items() if count})
    else:
        pytest.fail(f"{calls} calls left behind, in each window: {windows}")
    for allocator in allocators:
        allocator.check()
