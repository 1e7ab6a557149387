"""A state machine that attacks any allocator, with a model that never asks it for the answer.

Subclass `AllocatorMachine`, say how to `make` an allocator, `allocate` from it and find a block's
`address`; whatever else it can do (`free`, `mark` and `reset`, `used`, `remaining`) is a further
hook, and a hook left at None switches its rules off::

    class Mine(AllocatorMachine):
        def make(self, nbytes): return MyArena(nbytes)
        def allocate(self, allocator, nbytes, align): return allocator.get(nbytes, align or 1)
        def address(self, block): return block.ptr

    TestMine = Mine.TestCase

The model is `live`, ``{serial: Block}`` of what somebody can still see, and the stack `marks`.
Every block is filled with its own byte, behind the allocator's back, and read again after every
step. A step is written to `TRACE` with `os.write` before it runs, so that a crash of the process
still says what led to it.
"""

import atexit
import contextlib
import functools
import os
import tempfile
from dataclasses import dataclass, field

from helpers import PAGE, peek, poke
from hypothesis import event
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

DEFAULT_ALIGN = 64
MAX_ALIGN_LOG2 = 21  # alignments are powers of two up to 2 MiB
TRACE = os.path.join(tempfile.gettempdir(), f"arenapy-machine-{os.getpid()}.trace")


@functools.cache
def _trace_fd():
    owner = os.getpid()
    fd = os.open(TRACE, os.O_CREAT | os.O_RDWR | os.O_TRUNC, 0o600)
    # A process that gets as far as atexit did not crash; forked children leave the file alone.
    atexit.register(lambda: os.getpid() == owner and os.unlink(TRACE))
    return fd


def note(text):
    """A line of `TRACE`."""
    os.write(_trace_fd(), f"{text}\n".encode())


def forget_notes():
    """Of the example before."""
    os.ftruncate(_trace_fd(), 0)
    os.lseek(_trace_fd(), 0, os.SEEK_SET)


def step(function):
    """Write the call to `TRACE` before it runs."""

    @functools.wraps(function)
    def traced(self, **arguments):
        note(f"{function.__name__}({arguments})")
        return function(self, **arguments)

    return traced


def drawn(name):
    """The strategy that the running machine calls `name`, so that a subclass can replace it."""
    return st.runner().flatmap(lambda machine: getattr(machine, name))


def choice(name):
    """One key or index of the running machine's collection `name`."""

    def pick(machine):
        items = getattr(machine, name)
        return st.sampled_from(sorted(items) if isinstance(items, dict) else range(len(items)))

    return st.runner().flatmap(pick)


def needs(*names):
    """A rule runs only while each of the machine's attributes `names` is there and not empty."""
    return precondition(lambda machine: all(getattr(machine, name) for name in names))


@dataclass(eq=False)
class Block:
    """What the model knows of one allocation."""

    start: int
    nbytes: int
    fill: int
    handles: list = field(default_factory=list)
    survivor: bool = False  # a reset went past it and somebody still held it

    @property
    def extent(self):
        """Bytes that must not be shared: an empty block is still somewhere of its own."""
        return max(self.nbytes, 1)

    @property
    def end(self):
        return self.start + self.extent


@dataclass(eq=False)
class MarkRecord:
    mark: object
    serial: int  # blocks with a larger serial belong to this frame or a newer one
    used: int | None
    clean: bool = True  # False once something older than the mark was given back after it


class AllocatorMachine(RuleBasedStateMachine):
    """Attack one allocator; see the module's docstring."""

    free = mark = reset = used = remaining = None
    refusals = (MemoryError,)  # how a request that cannot be served is refused
    bad_request = (ValueError, MemoryError)
    configs = st.fixed_dictionaries({"nbytes": st.integers(1, 24).map(lambda n: n * PAGE)})
    sizes = st.one_of(st.integers(0, 300), st.integers(0, PAGE), st.integers(0, 8 * PAGE))
    alignments = st.none() | st.one_of(st.integers(0, 8), st.integers(0, MAX_ALIGN_LOG2)).map(
        lambda log2: 1 << log2
    )

    def __init__(self):
        super().__init__()
        forget_notes()
        self.allocator = None
        self.live = {}
        self.marks = []
        self.stale = []
        self.serial = 0
        self.retired_ever = False

    # Hooks -----------------------------------------------------------------------------------

    def make(self, nbytes):
        """A fresh allocator of about `nbytes` bytes."""
        raise NotImplementedError

    def allocate(self, allocator, nbytes, align):
        """A block, or an exception from `refusals`; `align` None is the allocator's own."""
        raise NotImplementedError

    def address(self, block):
        """Where `block` starts."""
        raise NotImplementedError

    def survives(self, block):
        """Whether a reset must leave this block of the model alone."""
        return False

    def sure_room(self):
        """A request that fits this many bytes, slack for alignment included, must be served."""
        return 0

    def most(self):
        """A request of more bytes than this must be refused; None: no limit known."""
        return None

    def snapshot(self):
        """All that the allocator says about itself, to be the same after a refusal."""
        hooks = (self.used, self.remaining)
        return [hook(self.allocator) for hook in hooks if hook is not None]

    # The model -------------------------------------------------------------------------------

    @contextlib.contextmanager
    def unchanged(self):
        before = self.snapshot()
        yield
        assert self.snapshot() == before, "a refused call changed something"

    @contextlib.contextmanager
    def refused(self, *errors):
        """The body must raise one of `errors` and change nothing."""
        with self.unchanged():
            try:
                yield
            except errors:
                return
            raise AssertionError(f"accepted; expected {errors}")

    def admit(self, handle, nbytes, align, start=None):
        """Take a new block into the model and make its bytes its own; return its serial."""
        start = self.address(handle) if start is None else start
        align = DEFAULT_ALIGN if align is None else align
        assert start % align == 0, f"{start:#x} is not aligned to {align}"
        self.serial += 1
        block = Block(start, nbytes, fill=1 + self.serial % 255, handles=[handle])
        for serial, other in self.live.items():
            assert block.end <= other.start or other.end <= block.start, (
                f"[{block.start:#x}, {block.end:#x}) overlaps block {serial}: {other}"
            )
        self.write(block)
        self.live[self.serial] = block
        return self.serial

    def windows(self, nbytes):
        """(offset, length) of the parts of a block that are filled and read: here, all of it."""
        return [(0, nbytes)]

    def write(self, block):
        """Make the block's bytes its own."""
        for offset, length in self.windows(block.nbytes):
            poke(block.start + offset, length, block.fill)

    def request(self, nbytes, align):
        """Allocate; served or refused, the model knows whether that is right."""
        sure = nbytes + (align or DEFAULT_ALIGN) <= self.sure_room()
        most = self.most()
        before = self.snapshot()
        try:
            handle = self.allocate(self.allocator, nbytes, align)
        except self.refusals:
            event("refused")
            assert self.snapshot() == before, "a refused request changed something"
            assert not sure, f"refused {nbytes} bytes at {align} with {self.sure_room()} free"
            return None
        assert most is None or nbytes <= most, f"served {nbytes} bytes where only {most} can be"
        return self.admit(handle, nbytes, align)

    def gone(self, serial):
        """Nobody sees the block any more, and its bytes went back or will at the next reset."""
        for record in self.marks:
            record.clean = record.clean and record.serial < serial
        return self.live.pop(serial)

    def end_frame(self, record, *, keep):
        """The model's side of a reset to `record`, whose mark stays valid if `keep`."""
        index = self.marks.index(record)
        if index + 1 < len(self.marks):
            event("a reset ends newer marks")
        self.stale.extend(newer.mark for newer in self.marks[index + keep :])
        del self.marks[index + keep :]
        self.end_blocks(record.serial)
        if self.used is not None and record.clean and not self.retired_ever:
            assert self.used(self.allocator) == record.used, "the cursor is not back at the mark"

    def end_blocks(self, serial):
        """What a reset does to every block younger than `serial`."""
        for young in [key for key in self.live if key > serial]:
            if self.survives(self.live[young]):
                self.live[young].survivor = self.retired_ever = True
                event("a block survives a reset")
            else:
                self.live.pop(young)

    # Rules -----------------------------------------------------------------------------------

    @initialize(config=drawn("configs"))
    @step
    def start(self, config):
        self.config = config
        self.allocator = self.make(**config)

    @rule(nbytes=drawn("sizes"), align=drawn("alignments"))
    @step
    def alloc(self, nbytes, align):
        self.request(nbytes, align)

    @precondition(lambda self: self.remaining is not None)
    @rule(off=st.integers(-2, 2), align=st.sampled_from([1, 2, 64]))
    @step
    def alloc_near_the_end(self, off, align):
        self.request(max(0, self.remaining(self.allocator) + off), align)

    @rule(
        nbytes=st.sampled_from([-1, -(2**63), 2**63 - 1, 2**63, 2**64 - 1, 2**64, 2**200]),
        align=st.sampled_from([None, 1, 4096]),
    )
    @step
    def alloc_impossible_size(self, nbytes, align):
        with self.refused(*self.bad_request):
            self.allocate(self.allocator, nbytes, align)

    @rule(nbytes=st.integers(0, 100), align=st.sampled_from([-64, -1, 0, 3, 48, 65, 2**22, 2**64]))
    @step
    def alloc_impossible_alignment(self, nbytes, align):
        with self.refused(ValueError):
            self.allocate(self.allocator, nbytes, align)

    @needs("live")
    @rule(serial=choice("live"), fill=st.integers(0, 255))
    @step
    def overwrite(self, serial, fill):
        block = self.live[serial]
        block.fill = fill
        self.write(block)

    @precondition(lambda self: self.free is not None and self.live)
    @rule(serial=choice("live"))
    @step
    def free_one(self, serial):
        block = self.gone(serial)
        self.free(self.allocator, block.handles.pop())

    @precondition(lambda self: self.mark is not None)
    @rule()
    @step
    def push_mark(self):
        used = None if self.used is None else self.used(self.allocator)
        self.marks.append(MarkRecord(self.mark(self.allocator), self.serial, used))

    @precondition(lambda self: self.reset is not None and self.marks)
    @rule(index=choice("marks"))
    @step
    def reset_to_mark(self, index):
        record = self.marks[index]
        self.reset(self.allocator, record.mark)
        self.end_frame(record, keep=True)

    @precondition(lambda self: self.reset is not None and self.stale)
    @rule(index=choice("stale"))
    @step
    def reset_to_stale_mark(self, index):
        event("a stale mark")
        with self.refused(ValueError):
            self.reset(self.allocator, self.stale[index])

    # Invariants ------------------------------------------------------------------------------

    @invariant()
    def all_is_well(self):
        self.look()

    def look(self):
        """What must hold after every step; subclasses add to it."""
        self.contents_survive()
        self.blocks_are_disjoint()
        if self.used is not None and self.marks and not self.retired_ever:
            used = self.used(self.allocator)
            assert used >= self.marks[-1].used, "the cursor moved back over a mark"

    def contents_survive(self):
        for serial, block in self.live.items():
            for offset, length in self.windows(block.nbytes):
                seen = peek(block.start + offset, length)
                if seen != bytes([block.fill]) * length:
                    at = next(i for i, byte in enumerate(seen) if byte != block.fill)
                    raise AssertionError(
                        f"block {serial}, byte {offset + at} of {block.nbytes}: {seen[at]}, "
                        f"not {block.fill}"
                    )

    def blocks_are_disjoint(self):
        last = None
        for block in sorted(self.live.values(), key=lambda block: block.start):
            assert last is None or last.end <= block.start, f"{last} overlaps {block}"
            last = block
