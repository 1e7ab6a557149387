"""Random walks of a few acts on a small allocator: short orders of calls that nobody thought of.

The machines have many acts, so they make up a certain short order seldom. A walk takes 1 ms.
"""

import contextlib
import random

import pytest
from helpers import peek, poke
from hypothesis import settings

from arenapy import Bump, Host, Pool, Slab
from arenapy.linux import limits
from arenapy.memory import host_request, reservation

PLAIN = Host(huge_pages=None)
STEPS = 60
SIZE = 64
FULL = MemoryError, BufferError  # what may refuse an act, which then has changed nothing


class Held:
    """A Buffer whose bytes must stay as they are: until it is dropped, if anything may see them."""

    def __init__(self, buffer, fill):
        self.buffer = buffer
        self.seen = False
        self.fill = fill
        self.poke()

    def poke(self):
        self.address, self.nbytes = self.buffer.address, self.buffer.nbytes
        poke(self.address, self.nbytes, self.fill)

    def check(self):
        """Before it is dropped: who has overwritten it cannot undo that."""
        if self.seen or not self.buffer.closed:
            assert peek(self.address, self.nbytes) == bytes([self.fill]) * self.nbytes


class Walk:
    def __init__(self, allocator, dice):
        self.allocator, self.dice = allocator, dice
        self.held, self.marks, self.fills = [], [], 0

    def add(self, buffer):
        self.fills = self.fills % 255 + 1
        self.held.append(Held(buffer, self.fills))

    def alloc(self):
        self.add(self.allocator.alloc(SIZE))

    def array(self):
        self.add(self.allocator.empty(SIZE, "u1").base)
        self.held[-1].seen = True

    def one(self):
        """One that is open, or none."""
        return self.dice.choice([one for one in self.held if not one.buffer.closed] or [None])

    def see(self):
        if one := self.one():
            memoryview(one.buffer).release()
            one.seen = True

    def release(self):
        if one := self.one():
            one.buffer.release()

    def drop(self):
        if self.held:
            self.held.pop(self.dice.randrange(len(self.held))).check()

    def grow(self):
        if one := self.one():
            grown = self.allocator.grow(one.buffer, one.buffer.nbytes + 36)
            if grown is one.buffer:
                one.poke()
            else:
                assert peek(grown.address, one.nbytes) == bytes([one.fill]) * one.nbytes
                self.add(grown)

    def mark(self):
        self.marks.append(self.allocator.mark())

    def unmark(self):
        if self.marks:
            self.marks.pop()

    def reset(self):
        with contextlib.suppress(ValueError):  # the mark has ended
            self.allocator.reset(*self.marks[-1:])

    def largest(self):
        self.allocator.alloc(self.allocator.stats().largest_free_extent, 1).release()

    def many(self):
        for buffer in self.allocator.alloc_many([SIZE] * self.dice.randrange(8))[::2]:
            self.add(buffer)

    def large(self):
        self.allocator.alloc(self.dice.choice([1 << 10, 1 << 12, 1 << 15])).release()

    def trim(self):
        self.allocator.trim()


ACTS = {
    "bump": (
        lambda: Bump(4096, PLAIN),
        [Walk.mark, Walk.unmark, Walk.reset, Walk.grow, Walk.grow, Walk.largest],
    ),
    "bump that grows": (
        lambda: Bump(4096, PLAIN, max_bytes=1 << 16),
        [Walk.mark, Walk.unmark, Walk.reset, Walk.grow, Walk.grow, Walk.largest],
    ),
    "slab": (lambda: Slab(SIZE, 64, PLAIN, max_count=256), [Walk.many, Walk.trim]),
    "pool": (lambda: Pool(1 << 16, PLAIN), [Walk.many, Walk.large, Walk.trim]),
}


@pytest.fixture
def limits_of_now(monkeypatch):
    """They are read once: every growth reads them, which takes most of a walk of a pool."""
    now = list(limits.read_limits())
    for module in limits, host_request, reservation:
        monkeypatch.setattr(module, "read_limits", lambda *proc: now)


@pytest.mark.parametrize("name", ACTS)
def test_walks(name, limits_of_now):
    make, acts = ACTS[name]
    acts = [Walk.alloc, Walk.array, Walk.see, Walk.release, Walk.drop, *acts]
    examples = settings().max_examples
    for seed in range(examples * (100 if examples > 1000 else 25)):
        dice = random.Random(seed)
        walk = Walk(make(), dice)
        for number, act in enumerate(dice.choices(acts, k=STEPS), 1):
            with contextlib.suppress(*FULL):
                act(walk)
            if name != "pool" or number == STEPS:  # its check takes 0.4 ms
                walk.allocator.check()
        while walk.held:
            walk.held.pop().check()
        walk.marks.clear()
        if isinstance(walk.allocator, Bump):
            walk.allocator.reset()
            left = walk.allocator.used
        else:
            left = walk.allocator.stats().active_allocations
        walk.allocator.check()
        assert left == 0
