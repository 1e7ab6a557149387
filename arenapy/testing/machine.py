"""A state machine that attacks any allocator, with a model that never asks it for the answer.

What lives here: the rules, which decide what is asked and when. The hooks, and what is known of the
allocator, are in model.py.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import invariant

from arenapy.testing.model import AllocatorModel, MarkRecord, uncollected
from arenapy.testing.operations import OneOf, operation
from arenapy.testing.ranges import check_reads, windows
from arenapy.testing.search import report, search

__all__ = ["AllocatorMachine"]

SEVERAL = 8  # blocks asked for in a row, at most
REFILL_MOST = 64  # blocks that a refill counts
REFILL_LARGEST = 1 << 20  # bytes
LAST_REFILL = 64  # bytes of the blocks at the end of an example


def several(machine: Any) -> st.SearchStrategy[list[list[Any]]]:
    """Some requests, as [bytes, alignment]."""
    request = st.tuples(machine.sizes, machine.alignments).map(list)
    return st.lists(request, max_size=SEVERAL)


class AllocatorMachine(AllocatorModel):
    """Test an allocator with random programs: subclass, and define make, allocate and address.

    A hook that is None turns its rules off. ``Mine.TestCase`` is a `unittest.TestCase` that pytest
    collects.

    Attributes
    ----------
    state : object
        The result of `make`.
    config : dict
        The arguments of `make`.
    live : dict of int to Live
        The live blocks, by serial number.
    marks : list of MarkRecord
        The marks that are valid, oldest first.

    sizes, alignments : strategy
        The requests. An alignment of None means a request without one. These and all attributes
        below are class attributes.
    configs : strategy
        A strategy of dicts, the keyword arguments of `make`. Vary the capacity, if there is one.
    default_align : int
        The alignment of a block that was requested without one.
    refusals : tuple of exceptions
        The exceptions of a request that cannot be served.
    bad_request : tuple of exceptions or None
        The exceptions of an invalid size. None: do not try.
    double_free, stale_mark : tuple of exceptions or None
        The exceptions of a second `free`, and of a `reset` to a mark that has ended. None, the
        default: do not try.
    smallest : int
        The smallest size to request.
    empty_is_apart : bool
        Whether a block of 0 bytes has an address that no other live block has.
    grows : bool
        Whether more may be served than `remaining` says.
    contiguous : bool
        Whether a request for all `remaining` bytes, without an alignment, is served.
    refills : tuple of str
        The operations, of ``"free"`` (of all blocks) and ``"reset"``, after which an allocator
        serves as much as a new one. Leave it empty if an allocator cannot be made twice.
    allow : tuple of str
        The kinds of faults that are no failure, such as ``("negative", "empty-shared")``.

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

    @operation(first=True, config="configs")
    def start(self, config: dict[str, Any]) -> None:
        """Make the allocator."""
        self.begin(config)

    @operation(nbytes="sizes", align="alignments")
    def allocate_block(self, nbytes: int, align: int | None) -> None:
        """Ask for a block."""
        self.request(nbytes, align)

    @operation(requests=several)
    def allocate_several(self, requests: list[list[Any]]) -> None:
        """Ask for some blocks in a row: neighbours, most likely."""
        for nbytes, align in requests:
            self.request(nbytes, align)

    @operation("remaining", off=st.integers(-2, 2), align="alignments")
    def allocate_near_the_end(self, off: int, align: int | None) -> None:
        """Ask for what is left, or nearly."""
        room = self.room()
        assert room is not None
        self.request(max(self.smallest, room + off), align)

    @operation(
        "freed_sizes", which=OneOf("freed_sizes"), off=st.integers(-1, 1), align="alignments"
    )
    def allocate_again(self, which: int, off: int, align: int | None) -> None:
        """Ask for the size of something that was given back, or nearly."""
        sizes = self.freed_sizes
        self.request(max(self.smallest, sizes[which % len(sizes)] + off), align)

    @operation(
        "bad_request",
        nbytes=st.sampled_from([-1, -(2**63), 2**63 - 1, 2**63, 2**64 - 1, 2**64, 2**200]),
        align="alignments",
    )
    def allocate_impossible(self, nbytes: int, align: int | None) -> None:
        """Ask for what cannot be."""
        assert self.bad_request is not None
        kind = "negative" if nbytes < 0 else "oversize"
        if self.allows(kind):
            return  # a block of such a size may well hurt others
        if 0 <= nbytes < sys.maxsize:
            return  # shrinking tries smaller sizes, and an allocator may serve those
        with self.refused(self.bad_request, f"a request of {nbytes} bytes", kind):
            self.ask(self.state, nbytes, align)

    @operation("zeroed", nbytes="sizes", again=st.booleans())
    def allocate_zeroed(self, nbytes: int, again: bool) -> None:
        """Ask for zeros, or as many as of the largest block given back, and see that they are."""
        if again and self.freed_sizes:
            nbytes = max(self.freed_sizes)
        self.request_zeros(nbytes)

    @uncollected()
    def request_zeros(self, nbytes: int) -> None:
        """The same, within another step."""
        before = self.snapshot()
        try:
            block = self.call(self.zeroed, self.state, nbytes)
        except self.refusals:
            self.unchanged(before, f"a request of {nbytes} zeros")
            return
        known = self.take_in(block, nbytes, None)
        for offset, length in windows(nbytes) if self.checks_contents() else ():
            seen = self.call(self.read, block, offset, length)
            check_reads(self.serial + 1, known, offset, length, seen)
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
        self.give_back(self.pick_live(which)[0])

    @operation("free", "live", nth=st.sampled_from([2, 3, 1]))
    def free_every(self, nth: int) -> None:
        """Give back every second block, or third, which leaves holes; or all."""
        for serial in list(self.live)[::nth]:
            self.give_back(serial)

    @operation("free", "live", which=OneOf("live"), off=st.integers(-1, 1))
    def replace_block(self, which: int, off: int) -> None:
        """Give a block back, and ask for its size at once, or nearly."""
        serial, known = self.pick_live(which)
        self.give_back(serial)
        self.request(max(self.smallest, known.nbytes + off), None)

    @operation("double_free", "free", "live", which=OneOf("live"))
    def free_twice(self, which: int) -> None:
        """Give a block back, and once more."""
        assert self.double_free is not None
        if self.allows("double-free"):
            return
        block = self.gone(self.pick_live(which)[0])
        self.let_go(self.state, block)
        self.reached("a double free")
        with self.refused(self.double_free, "a double free", "double-free"):
            self.let_go(self.state, block)

    @operation("mark")
    def push_mark(self) -> None:
        """Mark a place."""
        self.add_mark()

    def add_mark(self) -> None:
        """The same, within another step."""
        used = None if self.used is None else self.call(self.used, self.state)
        self.marks.append(MarkRecord(self.call(self.mark, self.state), self.serial, used))

    @operation("reset", "marks", which=OneOf("marks"))
    def reset_to_mark(self, which: int) -> None:
        """Give back what is younger than a mark, which stays; the marks after it end."""
        self.go_back(which % len(self.marks))

    @operation("mark", "reset", requests=several)
    def frame(self, requests: list[list[Any]]) -> None:
        """Mark, allocate, go back, and allocate the same again: zeros, if there are."""
        self.add_mark()
        for nbytes, align in requests:
            self.request(nbytes, align)
        self.go_back(len(self.marks) - 1)
        for nbytes, align in requests:
            if self.zeroed is None:
                self.request(nbytes, align)
            else:
                self.request_zeros(nbytes)

    @operation("mark", "reset", requests=several, times=st.integers(1, 3))
    def frames_outlived(self, requests: list[list[Any]], times: int) -> None:
        """Frames whose blocks, and then the mark, end after the reset: what a function leaves."""
        for _ in range(times):
            self.add_mark()
            first = self.serial
            for nbytes, align in requests:
                self.request(nbytes, align)
                if self.zeroed is not None:
                    self.request_zeros(nbytes)
            self.go_back(len(self.marks) - 1)
            self.marks.pop()
            for serial in [key for key in self.live if key > first]:
                if self.free is None:
                    self.gone(serial)
                else:
                    self.give_back(serial)

    @operation("marks", which=OneOf("marks"))
    def forget_mark(self, which: int) -> None:
        """Drop a mark that no reset goes back to."""
        del self.marks[which % len(self.marks)]

    def go_back(self, index: int) -> None:
        """Reset to a mark, within a step."""
        record = self.marks[index]
        if index + 1 < len(self.marks):
            self.reached("a reset ends newer marks")
        self.rewind(self.state, record.mark)
        self.stale.extend(newer.mark for newer in self.marks[index + 1 :])
        del self.marks[index + 1 :]
        self.end_blocks(record.serial)
        if self.used is not None and record.clean and not self.survivors_ever:
            used = self.call(self.used, self.state)
            told = f"{used} used after the reset, {record.used} at the mark"
            self.expect("books", used == record.used, told)

    @operation("reset")
    def reset_all(self) -> None:
        """Give back everything, and end all marks."""
        self.reset_everything()

    def reset_everything(self) -> None:
        """The same, within another step."""
        self.rewind(self.state)
        self.stale.extend(record.mark for record in self.marks)
        self.marks.clear()
        self.end_blocks(0)
        if self.used is not None and not self.survivors_ever:
            used = self.call(self.used, self.state)
            told = f"{used} used after a reset of everything"
            self.expect("books", used == self.used_when_new, told)

    @operation("stale_mark", "stale", which=OneOf("stale"))
    def reset_to_stale_mark(self, which: int) -> None:
        """Reset to a mark that has ended."""
        assert self.stale_mark is not None
        if self.allows("stale-mark"):
            return
        self.reached("a stale mark")
        with self.refused(self.stale_mark, "a stale mark", "stale-mark"):
            self.rewind(self.state, self.stale[which % len(self.stale)])

    @operation("refills", which=OneOf("refills"), nbytes="sizes")
    def refill(self, which: int, nbytes: int) -> None:
        """Give everything back, and see that as much is served as by a new allocator."""
        how = self.refills[which % len(self.refills)]
        self.give_all_back(how)
        new = self.call(lambda: self.make(**self.config))
        largest = self.largest(new, how)
        served = self.serves(self.state, largest, 1, how)
        told = f"emptied, it refuses {largest} bytes, which a new one serves"
        self.expect("leak", served, told)
        expected = self.serves(new, nbytes, REFILL_MOST, how)
        served = self.serves(self.state, nbytes, REFILL_MOST, how)
        told = f"emptied, it serves {nbytes} bytes {served} times, and a new one {expected} times"
        self.expect("leak", served == expected, told)

    def teardown(self) -> None:
        """Check after each example that nothing was lost, and give everything back."""
        if (
            self.started and not self.over and sys.exc_info()[1] is self.handled
        ):  # else it has failed already
            for which in range(len(self.refills)):
                self.refill(which=which, nbytes=LAST_REFILL)
            if self.free is not None and self.live:
                self.free_every(nth=1)
        super().teardown()

    def give_all_back(self, how: str) -> None:
        """Nothing is live after this, unless it survives a reset."""
        if how == "reset":
            self.reset_everything()
        while self.free is not None and self.live:
            self.give_back(next(reversed(self.live)))

    def serves(self, state: Any, nbytes: int, most: int, how: str) -> int:
        """How many blocks of this size an empty allocator serves; it is empty again."""
        blocks: list[Any] = []
        with contextlib.suppress(*self.refusals):
            while len(blocks) < most:
                blocks.append(self.ask(state, nbytes, None))
        count = len(blocks)
        if count < most:
            self.reached("filled up")
        if how == "reset":
            self.rewind(state)
        while how == "free" and blocks:
            self.let_go(state, blocks.pop())
        return count

    def largest(self, state: Any, how: str) -> int:
        """The largest block that an empty allocator serves, up to a limit."""
        low, high = 0, REFILL_LARGEST
        while low < high:
            middle = (low + high + 1) // 2
            if self.serves(state, middle, 1, how):
                low = middle
            else:
                high = middle - 1
        return low

    @classmethod
    @functools.cache  # Hypothesis's, too: settings of the test case stay
    def _to_test_case(cls) -> Any:
        """A test that goes on after a fault, and lists each kind."""
        base = super()._to_test_case()

        def run(self: Any) -> None:
            tally = search(cls, self.settings)
            if tally.findings:
                raise AssertionError(report(tally, cls)) from None

        names = {"__module__": base.__module__, "__qualname__": base.__name__}
        return type(base.__name__, (base,), {"runTest": run, **names})

    # Invariants ----------------------------------------------------------------------------------

    @invariant()
    def all_is_well(self) -> None:
        """Look, once there is something to look at."""
        if self.started:
            with self.failures_kept():
                self.look()
