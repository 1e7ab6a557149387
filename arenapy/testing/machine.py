"""A state machine that attacks any allocator, with a model that never asks it for the answer.

What lives here: the hooks that a user fills in, the rules, and what must hold after every step.
The model is `live`, what somebody can still see, and the stack `marks`; what it compares is in
ranges.py, how a rule becomes a step in operations.py.
"""

from __future__ import annotations

import contextlib
import ctypes
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import hypothesis
from hypothesis import strategies as st
from hypothesis.errors import HypothesisException
from hypothesis.stateful import RuleBasedStateMachine, invariant

from arenapy.testing import steps
from arenapy.testing.operations import OneOf, Operation, operation
from arenapy.testing.ranges import (
    Live,
    check_aligned,
    check_apart,
    check_inside,
    check_reads,
    fill_of,
    windows,
)
from arenapy.testing.steps import Program, Step
from arenapy.testing.strategies import alignments, sizes
from arenapy.testing.tally import Tally

__all__ = ["AllocatorMachine", "MarkRecord"]

REFILL_MOST = 64  # blocks that a refill counts
LARGE_ALIGN = 4096
KEPT_SIZES = 8  # of blocks given back, to be asked for again


@dataclass(eq=False, slots=True)
class MarkRecord:
    """What is known of a mark: blocks with a larger serial number are in its frame or a newer."""

    mark: Any
    serial: int
    used: Any
    clean: bool = True  # False once something older than the mark was given back after it


class AllocatorMachine(RuleBasedStateMachine):
    """Attack an allocator: subclass, say how to make, allocate and address.

    A hook that is None switches its rules off. ``Mine.TestCase`` is a `unittest.TestCase` for
    pytest to collect.

    Attributes
    ----------
    state : object
        What `make` returned.
    config : dict
        What it was made with.
    live : dict of int to Live
        What somebody has, by serial number.
    marks : list of MarkRecord
        The marks that are valid, oldest first.

    sizes, alignments : strategy
        What is asked for; an alignment of None asks for none. Class attributes, as all below.
    configs : strategy
        Of dicts: keyword arguments of `make`. Vary the capacity, if there is one.
    default_align : int
        What a block is aligned to that no alignment was asked for.
    refusals : tuple of exceptions
        How a request that cannot be served is refused.
    bad_request : tuple of exceptions or None
        How sizes are refused that cannot be. None: do not try.
    double_free, stale_mark : tuple of exceptions or None
        How a second `free`, and a `reset` to a mark that a reset has ended, are refused. None, the
        default: do not try.
    empty_is_apart : bool
        Whether a block of 0 bytes has an address that no other live block has.
    grows : bool
        Whether more may be served than `remaining` says.
    refills : bool
        Whether an allocator from which everything was given back serves as much as a new one.

    Notes
    -----
    Thread-safety: one thread runs a machine.

    Examples
    --------
    >>> import mmap, ctypes
    >>> from arenapy.testing import AllocatorMachine
    >>> class Mapped(AllocatorMachine):
    ...     def make(self):
    ...         return None
    ...     def allocate(self, state, nbytes, align):
    ...         return mmap.mmap(-1, nbytes or 1)
    ...     def address(self, block):
    ...         return ctypes.addressof(ctypes.c_char.from_buffer(block))
    ...     def free(self, state, block):
    ...         block.close()
    >>> TestMapped = Mapped.TestCase
    """

    # Hooks that may be left out. Any: a subclass makes methods of them.
    free: Any = None  #: ``free(state, block)``: give it back.
    mark: Any = None  #: ``mark(state)``: a place to reset to.
    reset: Any = None  #: ``reset(state, mark=None)``: give back what is younger, or all.
    used: Any = None  #: ``used(state)``: bytes handed out, padding included or not.
    remaining: Any = None  #: ``remaining(state)``: bytes that are left.
    stats: Any = None  #: ``stats(state)``: anything that a refusal leaves equal.
    zeroed: Any = None  #: ``zeroed(state, nbytes)``: a block of zeros.
    bounds: Any = None  #: ``bounds(state)``: the memory it has, as (start, nbytes) pairs.

    sizes: st.SearchStrategy[int] = sizes()
    alignments: st.SearchStrategy[int | None] = st.none() | alignments()
    configs: st.SearchStrategy[dict[str, Any]] = st.just({})
    default_align: int = 1
    refusals: tuple[type[BaseException], ...] = (MemoryError,)
    bad_request: tuple[type[BaseException], ...] | None = (Exception,)
    double_free: tuple[type[BaseException], ...] | None = None
    stale_mark: tuple[type[BaseException], ...] | None = None
    empty_is_apart: bool = True
    grows: bool = False
    refills: bool = False

    tally: ClassVar[Tally]

    def __init_subclass__(cls, **options: Any) -> None:
        """Count for each class apart."""
        super().__init_subclass__(**options)
        cls.tally = Tally()

    def __init__(self) -> None:
        super().__init__()
        self.state: Any = None
        self.config: dict[str, Any] = {}
        self.live: dict[int, Live] = {}
        self.marks: list[MarkRecord] = []
        self.stale: list[Any] = []
        self.freed_sizes: list[int] = []
        self.program: list[Step] = []
        self.serial = 0
        self.most_live = 0
        self.started = False
        self.survivors_ever = False
        self.used_when_new: Any = None
        self.freed: dict[int, int] = {}  # start: bytes, of what was given back
        self.tally.examples += 1
        steps.begin(self.recipe())

    # Hooks ---------------------------------------------------------------------------------------

    def make(self, *_arguments: Any, **config: Any) -> Any:
        """A new allocator, or whatever the other hooks want to be given."""
        raise NotImplementedError("say how to make() an allocator")

    def allocate(self, state: Any, nbytes: int, align: int | None) -> Any:
        """A block, or one of `refusals`; `align` None asks for no alignment."""
        raise NotImplementedError("say how to allocate()")

    def address(self, block: Any) -> int:
        """Where a block starts."""
        raise NotImplementedError("say where a block starts: address()")

    def write(self, block: Any, offset: int, data: bytes) -> None:
        """Write into a block, behind the allocator's back. None: leave contents alone."""
        ctypes.memmove(self.address(block) + offset, data, len(data))

    def read(self, block: Any, offset: int, nbytes: int) -> bytes:
        """Read what is in a block."""
        return ctypes.string_at(self.address(block) + offset, nbytes)

    def survives(self, known: Live) -> bool:
        """Whether a reset must leave this block alone, since somebody sees it."""
        return False

    def look(self) -> None:
        """What must hold after every step; a subclass adds to it."""
        self.contents_survive()
        if self.used is not None and self.live:
            used = self.call(self.used, self.state)
            held = sum(known.nbytes for known in self.live.values() if not known.survivor)
            assert used >= held, f"{used} bytes are used, and {held} are live"

    def call(self, hook: Any, *arguments: Any) -> Any:
        """Call a hook; where another thread shall, a subclass says so here."""
        return hook(*arguments)

    @classmethod
    def recipe(cls) -> dict[str, Any]:
        """How another process makes this class: the first line of the file of steps."""
        try:
            file = inspect.getfile(cls)
        except (OSError, TypeError):  # typed into an interpreter
            file = None
        return {"machine": f"{cls.__module__}:{cls.__qualname__}", "file": file}

    # Steps ---------------------------------------------------------------------------------------

    def about_to(self, step: Step) -> None:
        """Take down a step before it runs."""
        steps.write_down(step)
        self.program.append(step)
        self.tally.rules[step.name] += 1

    @contextlib.contextmanager
    def failures_kept(self) -> Iterator[None]:
        """What fails in here leaves its program in the tally."""
        try:
            yield
        except HypothesisException:  # an assumption, or wrong use: no failure of the allocator
            raise
        except Exception as error:
            self.tally.failing, self.tally.error = Program(tuple(self.program)), error
            raise

    def perform(self, step: Step) -> bool:
        """Do a step of a program, and look; False if it cannot be done now.

        Parameters
        ----------
        step : Step

        Raises
        ------
        ValueError
            The machine has no such step.
        """
        function = getattr(self, step.name, None)
        told = getattr(function, "operation", None)
        if function is None or not isinstance(told, Operation):
            raise ValueError(f"{type(self).__name__} has no step {step.name!r}")
        if self.started == (step.name == "start") or not told.possible(self):
            return False
        function(**step.arguments)
        self.all_is_well()
        return True

    def reached(self, state: str) -> None:
        """Count a rare state for the summary."""
        self.tally.reached(state)

    def teardown(self) -> None:
        """Steer Hypothesis to where much is live at once."""
        if hypothesis.currently_in_test_context() and self.started:
            hypothesis.target(float(self.most_live), label="blocks live at once")

    # The model -----------------------------------------------------------------------------------

    def pick_live(self, which: int) -> tuple[int, Live]:
        """(serial number, block) of an index that an operation drew, counted round."""
        serial = list(self.live)[which % len(self.live)]
        return serial, self.live[serial]

    def snapshot(self) -> list[Any]:
        """All that the allocator says about itself, to be the same after a refusal."""
        hooks = (self.used, self.remaining, self.stats)
        return [self.call(hook, self.state) for hook in hooks if hook is not None]

    @contextlib.contextmanager
    def refused(self, errors: tuple[type[BaseException], ...], what: str) -> Iterator[None]:
        """The body must raise one of `errors`, and change nothing."""
        before = self.snapshot()
        try:
            yield
        except errors:
            self.unchanged(before, what)
            return
        raise AssertionError(f"{what} was accepted")

    def unchanged(self, before: list[Any], what: str) -> None:
        """`snapshot` is what it was before a request that was refused."""
        after = self.snapshot()
        assert after == before, f"{what} was refused and changed something: {before}, {after}"

    def request(self, nbytes: int, align: int | None) -> int | None:
        """Allocate; the serial number of the new block, or None if it was refused."""
        before = self.snapshot()
        room = None if self.remaining is None else self.call(self.remaining, self.state)
        try:
            block = self.call(self.allocate, self.state, nbytes, align)
        except self.refusals:
            self.reached("refused")
            self.unchanged(before, f"a request of {nbytes} bytes")
            return None
        assert self.grows or room is None or nbytes <= room, f"{nbytes} bytes of {room} were served"
        return self.admit(block, nbytes, align)

    def admit(self, block: Any, nbytes: int, align: int | None = None) -> int:
        """Take a new block into the model, and make its bytes its own; its serial number."""
        known = self.take_in(block, nbytes, align)
        self.serial += 1
        known.fill = fill_of(self.serial)
        self.fill(known)
        self.live[self.serial] = known
        self.most_live = max(self.most_live, len(self.live))
        self.note_what_is_rare(known, align)
        return self.serial

    def take_in(self, block: Any, nbytes: int, align: int | None) -> Live:
        """Where a new block lies, after a look at whether it may."""
        extent = max(nbytes, 1) if self.empty_is_apart else nbytes
        known = Live(block, self.address(block), nbytes, 0, extent)
        check_aligned(known.start, align or self.default_align)
        if extent:
            check_apart(known, self.live.items())
        if self.bounds is not None:
            check_inside(known, self.call(self.bounds, self.state))
        return known

    def note_what_is_rare(self, known: Live, align: int | None) -> None:
        """Count the states that a good attack reaches."""
        if known.nbytes == 0:
            self.reached("an empty block")
        if align is not None and align >= LARGE_ALIGN:
            self.reached(f"aligned to {LARGE_ALIGN} or more")
        if self.freed.get(known.start) == known.nbytes:
            self.reached("a block serves again")
        elif known.start in self.freed:
            self.reached("a freed place serves another size")

    def fill(self, known: Live) -> None:
        """Write the block's byte all over it."""
        if self.write is None:
            return
        for offset, length in windows(known.nbytes):
            self.call(self.write, known.block, offset, bytes([known.fill]) * length)

    def contents_survive(self) -> None:
        """Every block reads as it was written."""
        if self.read is None or self.write is None:
            return
        for serial, known in self.live.items():
            for offset, length in windows(known.nbytes):
                check_reads(
                    serial, known, offset, self.call(self.read, known.block, offset, length)
                )

    def gone(self, serial: int) -> Any:
        """A block leaves the model; what `allocate` returned."""
        for record in self.marks:
            record.clean = record.clean and record.serial < serial
        known = self.live.pop(serial)
        self.freed[known.start] = known.nbytes
        self.freed_sizes = [known.nbytes, *self.freed_sizes][:KEPT_SIZES]
        block, known.block = known.block, None
        return block

    def end_blocks(self, serial: int) -> None:
        """The model's side of a reset: what is younger goes, but for what somebody sees."""
        for young in [key for key in self.live if key > serial]:
            if self.survives(self.live[young]):
                self.live[young].survivor = self.survivors_ever = True
                self.reached("a block survives a reset")
            else:
                known = self.live.pop(young)
                self.freed[known.start] = known.nbytes

    # Rules ---------------------------------------------------------------------------------------

    @operation(first=True, config="configs")
    def start(self, config: dict[str, Any]) -> None:
        """Make the allocator."""
        self.config = config
        self.state = self.call(lambda: self.make(**config))
        self.started = True
        if self.used is not None:
            self.used_when_new = self.call(self.used, self.state)

    @operation(nbytes="sizes", align="alignments")
    def allocate_block(self, nbytes: int, align: int | None) -> None:
        """Ask for a block."""
        self.request(nbytes, align)

    @operation("remaining", off=st.integers(-2, 2), align="alignments")
    def allocate_near_the_end(self, off: int, align: int | None) -> None:
        """Ask for what is left, or nearly."""
        self.request(max(0, self.call(self.remaining, self.state) + off), align)

    @operation(
        "freed_sizes", which=OneOf("freed_sizes"), off=st.integers(-1, 1), align="alignments"
    )
    def allocate_again(self, which: int, off: int, align: int | None) -> None:
        """Ask for the size of something that was given back, or nearly."""
        sizes = self.freed_sizes
        self.request(max(0, sizes[which % len(sizes)] + off), align)

    @operation(
        "bad_request",
        nbytes=st.sampled_from([-1, -(2**63), 2**63 - 1, 2**63, 2**64 - 1, 2**64, 2**200]),
        align="alignments",
    )
    def allocate_impossible(self, nbytes: int, align: int | None) -> None:
        """Ask for what cannot be."""
        assert self.bad_request is not None
        with self.refused(self.bad_request, f"a request of {nbytes} bytes"):
            self.call(self.allocate, self.state, nbytes, align)

    @operation("zeroed", nbytes="sizes")
    def allocate_zeroed(self, nbytes: int) -> None:
        """Ask for zeros, and see that they are."""
        before = self.snapshot()
        try:
            block = self.call(self.zeroed, self.state, nbytes)
        except self.refusals:
            self.unchanged(before, f"a request of {nbytes} zeros")
            return
        known = self.take_in(block, nbytes, None)
        for offset, length in windows(nbytes) if self.read is not None else ():
            check_reads(self.serial + 1, known, offset, self.call(self.read, block, offset, length))
        self.admit(block, nbytes)

    @operation("live", which=OneOf("live"), fill=st.integers(1, 255))
    def overwrite(self, which: int, fill: int) -> None:
        """Write something else into a block."""
        known = self.pick_live(which)[1]
        known.fill = fill
        self.fill(known)

    @operation("free", "live", which=OneOf("live"))
    def free_block(self, which: int) -> None:
        """Give a block back."""
        self.call(self.free, self.state, self.gone(self.pick_live(which)[0]))

    @operation("double_free", "free", "live", which=OneOf("live"))
    def free_twice(self, which: int) -> None:
        """Give a block back, and once more."""
        assert self.double_free is not None
        block = self.gone(self.pick_live(which)[0])
        self.call(self.free, self.state, block)
        self.reached("a double free")
        with self.refused(self.double_free, "a double free"):
            self.call(self.free, self.state, block)

    @operation("mark")
    def push_mark(self) -> None:
        """Mark a place."""
        used = None if self.used is None else self.call(self.used, self.state)
        self.marks.append(MarkRecord(self.call(self.mark, self.state), self.serial, used))

    @operation("reset", "marks", which=OneOf("marks"))
    def reset_to_mark(self, which: int) -> None:
        """Give back what is younger than a mark, which stays; the marks after it end."""
        index = which % len(self.marks)
        record = self.marks[index]
        if index + 1 < len(self.marks):
            self.reached("a reset ends newer marks")
        self.call(self.reset, self.state, record.mark)
        self.stale.extend(newer.mark for newer in self.marks[index + 1 :])
        del self.marks[index + 1 :]
        self.end_blocks(record.serial)
        if self.used is not None and record.clean and not self.survivors_ever:
            used = self.call(self.used, self.state)
            assert used == record.used, f"{used} used after the reset, {record.used} at the mark"

    @operation("reset")
    def reset_all(self) -> None:
        """Give back everything, and end all marks."""
        self.call(self.reset, self.state)
        self.stale.extend(record.mark for record in self.marks)
        self.marks.clear()
        self.end_blocks(0)
        if self.used is not None and not self.survivors_ever:
            used = self.call(self.used, self.state)
            assert used == self.used_when_new, f"{used} used after a reset of everything"

    @operation("stale_mark", "stale", which=OneOf("stale"))
    def reset_to_stale_mark(self, which: int) -> None:
        """Reset to a mark that has ended."""
        assert self.stale_mark is not None
        self.reached("a stale mark")
        with self.refused(self.stale_mark, "a stale mark"):
            self.call(self.reset, self.state, self.stale[which % len(self.stale)])

    @operation("refills", nbytes="sizes")
    def refill(self, nbytes: int) -> None:
        """Give everything back, and see that as much is served as by a new allocator."""
        self.give_all_back()
        served = self.how_many(self.state, nbytes)
        new = self.how_many(self.call(lambda: self.make(**self.config)), nbytes)
        assert served == new, f"emptied, it serves {served} of {nbytes} bytes; a new one {new}"

    def give_all_back(self) -> None:
        """Nothing is live after this."""
        while self.free is not None and self.live:
            self.call(self.free, self.state, self.gone(next(reversed(self.live))))
        if self.reset is not None:
            self.call(self.reset, self.state)
            self.stale.extend(record.mark for record in self.marks)
            self.marks.clear()
            self.end_blocks(0)

    def how_many(self, state: Any, nbytes: int) -> int:
        """Blocks of this size that an empty allocator serves, up to a limit; it is empty again."""
        blocks: list[Any] = []
        with contextlib.suppress(*self.refusals):
            while len(blocks) < REFILL_MOST:
                blocks.append(self.call(self.allocate, state, nbytes, None))
        count = len(blocks)
        if count < REFILL_MOST:
            self.reached("filled up")
        while self.free is not None and blocks:
            self.call(self.free, state, blocks.pop())
        if self.reset is not None:
            self.call(self.reset, state)
        return count

    # Invariants ----------------------------------------------------------------------------------

    @invariant()
    def all_is_well(self) -> None:
        """Look, once there is something to look at."""
        if self.started:
            with self.failures_kept():
                self.look()
