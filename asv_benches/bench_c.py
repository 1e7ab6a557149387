"""What the C calls cost, from a loop compiled as a user's would be.

The compiler inlines bump_alloc. In the plain loop it may do what it likes as long as every pointer
is made; "opaque" stands for a caller whose other code the compiler cannot see through, where the
cursor goes through memory each time. No block is touched, and arenas are reset between rounds.
"""

import arenapy

from . import native
from .rounds import CLOCK, Line, Way, medians

CALLS = 100_000
PLAIN = "bump_alloc(64)"
OPAQUE = "bump_alloc(64), opaque"
MARK_RESET = "bump_mark + bump_reset"
MARK_ALLOC_RESET = "bump_mark + bump_alloc + bump_reset"
WAYS = {
    PLAIN: Way("loops.alloc(arena, calls, 64, 64)", "arena.reset()", CALLS),
    OPAQUE: Way("loops.alloc_and_store(arena, calls, 64, 64)", "arena.reset()", CALLS),
    MARK_RESET: Way("loops.mark_reset(arena, calls)", "arena.reset()", CALLS),
    MARK_ALLOC_RESET: Way("loops.mark_alloc_reset(arena, calls)", "arena.reset()", CALLS),
}
LIMITS = {PLAIN: 2, MARK_RESET: 5}


def namespace():
    """The names that the statements use."""
    return {"arena": arenapy.Bump(64 * CALLS), "loops": native.load(), "calls": CALLS}


class Calls:
    """asv: 100,000 calls at a time."""

    params = tuple(WAYS)
    param_names = ("call",)
    number = 1
    timer = CLOCK
    repeat = (5, 100, 2.0)
    timeout = 300

    def setup(self, call):
        """A new arena."""
        self.loop = WAYS[call].loop(namespace())

    def time_100_000(self, call):
        """The loop in C."""
        self.loop.timeit(1)


def lines(quick):
    """The report's lines."""
    found = medians(WAYS, namespace(), 1, 51 if quick else 501)
    for name, seconds in found.items():
        yield Line("C calls", name, seconds * 1e9, "ns", LIMITS.get(name))
