"""The model of an allocator: its hooks, and what is known of it without asking it.

What lives here: the hooks that a user fills in, the books (`live`, what somebody can still see, and
the stack `marks`), and what each request and return does to them. The rules that decide what is
asked are in machine.py, what is compared in ranges.py, how a rule becomes a step in operations.py.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import inspect
import operator
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import hypothesis
from hypothesis import strategies as st
from hypothesis.errors import HypothesisException, UnsatisfiedAssumption
from hypothesis.stateful import RuleBasedStateMachine

from arenapy.testing import steps
from arenapy.testing.faults import Fault, kind_of
from arenapy.testing.operations import Operation
from arenapy.testing.ranges import (
    Live,
    check_apart,
    check_inside,
    check_reads,
    fill_of,
    shared_by_empty,
    windows,
)
from arenapy.testing.steps import Program, Step
from arenapy.testing.strategies import alignments, sizes
from arenapy.testing.tally import Tally

__all__ = ["AllocatorModel", "MarkRecord"]

LARGE_ALIGN = 4096
KEPT_SIZES = 8  # of blocks given back, to be asked for again


@dataclass(eq=False, slots=True)
class MarkRecord:
    """The facts about one mark.

    Attributes
    ----------
    mark : object
        The result of the hook `mark`.
    serial : int
        Blocks with a larger serial number are in the frame of this mark, or in a newer one.
    used : object
        The result of the hook `used` at that time.
    clean : bool
        False after something older than the mark was freed.

    Examples
    --------
    >>> from arenapy.testing import MarkRecord
    >>> MarkRecord(mark="first", serial=3, used=96).clean
    True
    """

    mark: Any
    serial: int
    used: Any
    clean: bool = True  # False once something older than the mark was given back after it


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """No garbage goes in here: a block in a cycle of its user's is not what a refusal changed."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def as_int(found: Any, call: str, wanted: str) -> int:
    """What a hook returned. NumPy's integers would overflow where they are added up."""
    try:
        return operator.index(found)
    except TypeError:
        raise TypeError(f"{call} returned {found!r}: return {wanted}, as int") from None


class AllocatorModel(RuleBasedStateMachine):
    """The hooks and the books of an `AllocatorMachine`, whose docstring says what they are.

    Notes
    -----
    Thread-safety: one thread runs a machine.
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
    alignments: st.SearchStrategy[int | None] = alignments()
    configs: st.SearchStrategy[dict[str, Any]] = st.just({})
    default_align: int = 1
    refusals: tuple[type[BaseException], ...] = (MemoryError,)
    bad_request: tuple[type[BaseException], ...] | None = (Exception,)
    double_free: tuple[type[BaseException], ...] | None = None
    stale_mark: tuple[type[BaseException], ...] | None = None
    smallest: int = 0
    empty_is_apart: bool = True
    grows: bool = False
    contiguous: bool = False
    refills: tuple[str, ...] = ()
    allow: tuple[str, ...] = ()

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
        self.steers = True
        self.started = False
        self.over = False  # after a fault that is allowed
        self.survivors_ever = False
        self.used_when_new: Any = None
        self.freed: dict[int, int] = {}  # start: bytes, of what was given back
        self.handled = sys.exc_info()[1]  # whatever is being handled around this machine
        self.tally.begin()
        steps.begin(self.recipe())

    # Hooks ---------------------------------------------------------------------------------------

    def make(self, *_arguments: Any, **config: Any) -> Any:
        """Return a new allocator. The other hooks get it as `state`."""
        raise NotImplementedError("say how to make() an allocator")

    def allocate(self, state: Any, nbytes: int, align: int | None) -> Any:
        """Return a block, or raise one of `refusals`. `align` is None without an alignment."""
        raise NotImplementedError("say how to allocate()")

    def address(self, block: Any) -> int:
        """Return the address of a block."""
        raise NotImplementedError("say where a block starts: address()")

    def start_of(self, block: Any) -> int:
        """Call `address`."""
        wanted = "the address of the block that allocate() returned"
        return as_int(self.address(block), "address(block)", wanted)

    def room(self) -> int | None:
        """Call `remaining`, if there is such a hook."""
        if self.remaining is None:
            return None
        found = self.call(self.remaining, self.state)
        return as_int(found, "remaining(state)", "the bytes that are left")

    def ranges(self) -> list[tuple[int, int]]:
        """Call `bounds`."""
        told = "bounds(state), in a pair,", "an address and the number of bytes"
        found = self.call(self.bounds, self.state)
        return [(as_int(start, *told), as_int(nbytes, *told)) for start, nbytes in found]

    def write(self, block: Any, offset: int, data: bytes) -> None:
        """Write the contents of a block. With ``write = None``, contents are not checked."""
        ctypes.memmove(self.start_of(block) + offset, data, len(data))

    def read(self, block: Any, offset: int, nbytes: int) -> bytes:
        """Return contents of a block."""
        return ctypes.string_at(self.start_of(block) + offset, nbytes)

    def survives(self, known: Live) -> bool:
        """True if a block stays valid after a reset, because it is in use."""
        return False

    def look(self) -> None:
        """Check conditions after every step. A subclass may add to it."""
        self.contents_survive()
        if self.used is not None and self.live:
            used = self.call(self.used, self.state)
            held = sum(known.nbytes for known in self.live.values() if not known.survivor)
            self.expect("books", used >= held, f"{used} bytes are used, and {held} are live")

    def call(self, hook: Any, *arguments: Any) -> Any:
        """Call a hook. A subclass may call it in another thread."""
        return hook(*arguments)

    def ask(self, state: Any, nbytes: int, align: int | None) -> Any:
        """Call `allocate`."""
        return self.call(self.allocate, state, nbytes, align)

    def let_go(self, state: Any, block: Any) -> None:
        """Call `free`."""
        self.call(self.free, state, block)

    def rewind(self, state: Any, *mark: Any) -> None:
        """Call `reset`, with a mark or to the start."""
        self.call(self.reset, state, *mark)

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
        """Put the program of a failure into the tally. An allowed failure ends the example."""
        try:
            yield
        except HypothesisException:  # an assumption, or wrong use: no failure of the allocator
            raise
        except Exception as error:
            kind = kind_of(error)
            allowed = self.allows(kind)
            if kind not in self.allow:
                self.tally.failed(Program(tuple(self.program)), error)
            if not allowed:
                raise
            # Steps after such a fault say nothing: the example ends.
            raise UnsatisfiedAssumption from None

    def allows(self, kind: str) -> bool:
        """True if faults of this kind are no failure: allowed by the class, or found already."""
        return kind in self.allow or self.tally.set_aside(kind)

    def expect(self, kind: str, condition: object, message: str) -> None:
        """Fail unless the condition is true, or faults of this kind are allowed."""
        if not condition and not self.allows(kind):
            raise Fault(kind, message)

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
        if self.over or self.started == (step.name == "start") or not told.possible(self):
            return False
        try:
            function(**step.arguments)
            with self.failures_kept():
                self.look()
        except UnsatisfiedAssumption:
            self.over = True
        return True

    def reached(self, state: str) -> None:
        """Count a rare state for the summary."""
        self.tally.reached(state)

    def teardown(self) -> None:
        """Steer Hypothesis to where much is live at once."""
        if self.steers and self.started and hypothesis.currently_in_test_context():
            hypothesis.target(float(self.most_live), label="blocks live at once")
        self.live.clear()  # now, and not when the garbage collector comes across the machine
        self.marks.clear()
        self.stale.clear()
        self.state = None

    # The model -----------------------------------------------------------------------------------

    def begin(self, config: dict[str, Any]) -> None:
        """The model of a new allocator."""
        self.config = config
        self.state = self.call(lambda: self.make(**config))
        self.started = True
        if self.used is not None:
            self.used_when_new = self.call(self.used, self.state)

    def pick_live(self, which: int) -> tuple[int, Live]:
        """(serial number, block) of an index that an operation drew, counted round."""
        serial = list(self.live)[which % len(self.live)]
        return serial, self.live[serial]

    def snapshot(self) -> list[Any]:
        """All that the allocator says about itself, to be the same after a refusal."""
        hooks = (self.used, self.remaining, self.stats)
        return [self.call(hook, self.state) for hook in hooks if hook is not None]

    @contextlib.contextmanager
    def refused(
        self, errors: tuple[type[BaseException], ...], what: str, kind: str
    ) -> Iterator[None]:
        """The body must raise one of `errors`, and change nothing."""
        with uncollected():
            before = self.snapshot()
            try:
                yield
            except errors as error:
                # Since CPython 3.12 this frame, contextlib's and the error are a cycle, which keeps
                # the block that was refused until somebody collects garbage.
                error.__traceback__ = None
                self.unchanged(before, what)
                return
        raise Fault(kind, f"{what} was accepted")

    def unchanged(self, before: list[Any], what: str) -> None:
        """`snapshot` is what it was before a request that was refused."""
        after = self.snapshot()
        told = f"{what} was refused and changed something: {before}, {after}"
        self.expect("changed", after == before, told)

    @uncollected()
    def request(self, nbytes: int, align: int | None) -> int | None:
        """Allocate; the serial number of the new block, or None if it was refused."""
        before = self.snapshot()
        room = self.room()
        try:
            block = self.ask(self.state, nbytes, align)
        except self.refusals:
            self.reached("refused")
            self.unchanged(before, f"a request of {nbytes} bytes")
            needed = max(nbytes, 1) if self.empty_is_apart else nbytes
            fits = self.contiguous and align is None and room is not None and needed <= room
            self.expect("room", not fits, f"{nbytes} bytes of {room} were refused")
            return None
        fits = self.grows or room is None or nbytes <= room
        self.expect("room", fits, f"{nbytes} bytes of {room} were served")
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
        start = self.start_of(block)  # before the next line: an adapter learns from it
        extent = max(nbytes, 1) if self.empty_is_apart else nbytes
        known = Live(block, start, nbytes, 0, extent)
        self.expect_aligned(start, align or self.default_align)
        if extent:
            check_apart(known, self.live.items())
            shared = shared_by_empty(known, self.live.items())
            self.expect("empty-shared", shared is None, shared or "")
        if self.bounds is not None:
            check_inside(known, self.ranges())
        return known

    def expect_aligned(self, start: int, align: int) -> None:
        """A block starts where it was asked to."""
        largest = start & -start if start else align
        told = (
            f"{start:#x} is not aligned to {align}. If the allocator promises no more than "
            f"{largest}, set alignments = alignments({largest}), or st.none() if it takes no "
            f"alignment (arenapy fuzz: --max-align {largest})"
        )
        self.expect("misaligned", start % align == 0, told)

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

    def checks_contents(self) -> bool:
        """Whether blocks may be read, also those of zeros."""
        return self.read is not None and self.write is not None

    def contents_survive(self) -> None:
        """Every block reads as it was written."""
        if not self.checks_contents():
            return
        for serial, known in self.live.items():
            for offset, length in windows(known.nbytes):
                seen = self.call(self.read, known.block, offset, length)
                check_reads(serial, known, offset, length, seen)

    def gone(self, serial: int) -> Any:
        """A block leaves the model; what `allocate` returned."""
        for record in self.marks:
            record.clean = record.clean and record.serial < serial
        known = self.live.pop(serial)
        self.note_freed(known)
        block, known.block = known.block, None
        return block

    def note_freed(self, known: Live) -> None:
        """Its place and its size are worth another request."""
        self.freed[known.start] = known.nbytes
        self.freed_sizes = [known.nbytes, *self.freed_sizes][:KEPT_SIZES]

    def give_back(self, serial: int) -> None:
        """Free a block, which leaves the model."""
        self.let_go(self.state, self.gone(serial))

    def end_blocks(self, serial: int) -> None:
        """The model's side of a reset: what is younger goes, but for what somebody sees."""
        for young in [key for key in self.live if key > serial]:
            if self.survives(self.live[young]):
                self.live[young].survivor = self.survivors_ever = True
                self.reached("a block survives a reset")
            else:
                self.note_freed(self.live.pop(young))
