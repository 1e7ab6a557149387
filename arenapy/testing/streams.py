"""A state machine that attacks stream-ordered allocators: memory goes from stream to stream.

What lives here: the rules, and the oracle. Blocks are written and read by work on streams, which
the rules order as a careful user does: by one stream, by waiting, or by recording a stream. Then
a block's memory may be somebody else's when all work on it comes before the first work of its next
owner: which the streams know (timeline.py, or a GPU's), and the allocator is not asked.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from hypothesis import strategies as st

from arenapy.testing.machine import AllocatorMachine
from arenapy.testing.operations import OneOf, operation
from arenapy.testing.ranges import Live
from arenapy.testing.timeline import HOST, SimulatedStreams

__all__ = ["StreamMachine", "Streams"]

MANY = 15  # streams, or places in a queue, up to which numbers are drawn


class Streams(Protocol):
    """The streams for a `StreamMachine`: simulated ones (`SimulatedStreams`), or those of a GPU.

    A stream is named by its number. -1 is the host, which works immediately. `write` and `check`
    return an object that represents the work.

    Attributes
    ----------
    streams : sequence
        The streams for the allocator, by number.

    Examples
    --------
    >>> from arenapy.testing import SimulatedStreams
    >>> len(SimulatedStreams(2).streams)
    2
    """

    def __init__(self) -> None:
        if type(self) is Streams:
            raise TypeError("Streams only describes streams; pass SimulatedStreams(), or your own")

    @property
    def streams(self) -> Sequence[Any]: ...

    def write(self, stream: int, known: Live, serial: int) -> Any:
        """Fill a block with its byte, ``known.fill``."""

    def check(self, stream: int, known: Live, serial: int) -> Any:
        """Read a block, which must hold its byte."""

    def wait(self, stream: int, work: Any) -> None:
        """Let later work of `stream` come after `work`."""

    def ordered(self, before: Any, after: Any) -> bool:
        """True if one piece of work surely ends before another begins, or if it is not known."""

    def progress(self, which: int) -> None:
        """Do a piece of work."""

    def finish(self, stream: int) -> None:
        """Wait for a stream."""

    def finish_all(self) -> None:
        """Wait for all."""

    def wrong(self) -> list[str]:
        """Return the errors that `check` has found so far."""

    def close(self) -> None:
        """Close the streams."""


@dataclass(eq=False, slots=True)
class Uses:
    """The work on one block: (stream, work), and what the allocator was told."""

    home: int  # the stream of the allocation
    written: tuple[int, Any] | None = None  # the last time
    all: list[tuple[int, Any]] = field(default_factory=list)
    recorded: set[int] = field(default_factory=set)


class StreamMachine(AllocatorMachine):
    """Test an allocator whose blocks belong to streams.

    The hooks are those of `AllocatorMachine`, with these differences: ``allocate(state, nbytes,
    align, stream)``, ``free(state, block, stream)`` and ``reset(state, mark, stream)``, where a
    `mark` of None is the start. An additional hook is ``record_stream(state, block, stream)``.
    `stream` is one of the objects of `make_streams`. By default this is a `SimulatedStream`.
    Hypothesis decides when its work is done. The allocator under test orders it by
    ``event = stream.record()``, ``stream.wait(event)``, ``event.query()``,
    ``event.synchronize()`` and ``event.close()``.

    The machine finds a block whose memory is reused while work on it may still be under way. Work
    is over for later work on the same stream, after a wait for an event, and after the host has
    seen its end. With simulated streams, this check does not depend on timing. The machine also
    finds reads of wrong bytes.

    Attributes
    ----------
    frees_anywhere : bool
        Whether `free` may name another stream than `allocate`. This and all attributes below are
        class attributes.
    keeps_home : bool
        Whether the stream of `allocate` counts even if `free` names another one. If not, the
        latter waits for it.
    recording_lasts : bool
        Whether `record_stream` covers all work of the stream until the block is freed, and not
        only the work before the call.
    host_sees : bool
        Whether the host accesses the memory at once, without waiting for a stream. `stream` is then
        sometimes None, which means the host.

    Notes
    -----
    `zeroed` is not tested, because the host does not see zeros that a stream will write.
    Thread-safety: one thread runs a machine.

    Examples
    --------
    >>> import ctypes
    >>> from hypothesis import strategies as st
    >>> from arenapy.testing import StreamMachine
    >>> class Waiting:
    ...     '''Slots of 64 bytes, whose next user waits for the last one.'''
    ...     def __init__(self):
    ...         self.memory = (ctypes.c_char * 512)()
    ...         self.free = [(ctypes.addressof(self.memory) + 64 * i, None) for i in range(8)]
    ...     def get(self, nbytes, stream):
    ...         if nbytes > 64 or not self.free:
    ...             raise MemoryError(nbytes)
    ...         address, event = self.free.pop()
    ...         if event is not None:
    ...             stream.wait(event)
    ...         return address
    ...     def put(self, address, stream):
    ...         self.free.append((address, stream.record()))
    >>> class WaitingMachine(StreamMachine):
    ...     alignments = st.none()
    ...     def make(self):
    ...         return Waiting()
    ...     def allocate(self, state, nbytes, align, stream):
    ...         return state.get(nbytes, stream) if nbytes >= 0 else state.get(999, stream)
    ...     def address(self, block):
    ...         return block
    ...     def free(self, state, block, stream):
    ...         state.put(block, stream)
    >>> TestWaiting = WaitingMachine.TestCase
    """

    record_stream: Any = None  #: ``record_stream(state, block, stream)``: it is used there, too.
    frees_anywhere: bool = True
    keeps_home: bool = False
    recording_lasts: bool = True
    host_sees: bool = False

    def __init__(self) -> None:
        super().__init__()
        self.device: Any = None  # Streams
        self.on = 0  # the stream of what is done next
        self.retired: list[tuple[int, Live]] = []  # whose work may not be done

    # Hooks ---------------------------------------------------------------------------------------

    def make_streams(self) -> Streams:
        """The streams of one example."""
        return SimulatedStreams()

    def allocate(  # type: ignore[override]
        self, state: Any, nbytes: int, align: int | None, stream: Any
    ) -> Any:
        """A block that `stream` uses first, or one of `refusals`."""
        raise NotImplementedError("say how to allocate()")

    # Rules ---------------------------------------------------------------------------------------

    @property
    def places(self) -> list[int]:
        """The streams that there are, and the host."""
        return [*range(len(self.device.streams)), *([HOST] if self.host_sees else [])]

    @operation(stream=OneOf("places"))
    def switch(self, stream: int) -> None:
        """Go on with another stream."""
        self.on = self.place(stream)

    @operation("live", which=OneOf("live"), stream=OneOf("places"), record=st.booleans())
    def read_on(self, which: int, stream: int, record: bool) -> None:
        """Read a block on some stream, and record the stream if `record` says so."""
        self.use(self.pick_live(which), self.place(stream), write=False, record=record)

    @operation("live", which=OneOf("live"), stream=OneOf("places"), record=st.booleans())
    def write_on(self, which: int, stream: int, record: bool) -> None:
        """Write it on some stream, likewise."""
        self.use(self.pick_live(which), self.place(stream), write=True, record=record)

    @operation("record_stream", "live", which=OneOf("live"), stream=OneOf("places"))
    def record_early(self, which: int, stream: int) -> None:
        """Tell the allocator of a stream that will use a block; once more, if it has been told."""
        place = self.place(stream)
        if place != HOST:
            self.record(self.pick_live(which)[1], place)

    @operation("free", "live", which=OneOf("live"), stream=OneOf("places"), off=st.integers(-1, 1))
    def hand_over(self, which: int, stream: int, off: int) -> None:
        """Free a block, and ask for its size on another stream."""
        serial, known = self.pick_live(which)
        self.give_back(serial)
        self.on = self.place(stream)
        self.request(max(self.smallest, known.nbytes + off), None)

    @operation("free", "live", stream=OneOf("places"))
    def pass_through(self, stream: int) -> None:
        """Free two neighbours, or all that there are, and ask another stream for their sum."""
        blocks = sorted(self.live.items(), key=lambda pair: pair[1].start)[:2]
        for serial, _ in blocks:
            self.give_back(serial)
            self.on = (self.on + 1) % len(self.device.streams)
        self.on = self.place(stream)
        self.request(sum(known.nbytes for _, known in blocks), None)

    @operation(stream=OneOf("places"), other=OneOf("places"))
    def wait_for(self, stream: int, other: int) -> None:
        """Let one stream, or the host, wait for what another one was given until now."""
        one, before = self.place(stream), self.place(other)
        if one == HOST:
            self.device.finish(before)
        elif before not in (one, HOST):
            for _, known in [*self.live.items(), *self.retired]:
                for place, work in known.extra.all:
                    if place == before:
                        self.device.wait(one, work)

    @operation(which=st.integers(0, MANY), times=st.integers(1, 8))
    def progress(self, which: int, times: int) -> None:
        """Let some work be done."""
        for _ in range(times):
            self.device.progress(which)

    # Within steps --------------------------------------------------------------------------------

    def place(self, drawn: int) -> int:
        """A stream, or the host, of an index that an operation drew."""
        return self.places[drawn % len(self.places)]

    def stream(self, place: int) -> Any:
        """Return the stream object of a place. None stands for the host."""
        return None if place == HOST else self.device.streams[place]

    def use(self, picked: tuple[int, Live], place: int, *, write: bool, record: bool) -> None:
        """Work on a block, and record the stream for it if possible."""
        serial, known = picked
        self.work(serial, known, place, write=write)
        told = place in known.extra.recorded
        if record and place != HOST and self.record_stream is not None and not told:
            self.record(known, place)

    def record(self, known: Live, place: int) -> None:
        """Tell the allocator of a stream."""
        self.call(self.record_stream, self.state, known.block, self.stream(place))
        known.extra.recorded.add(place)
        self.reached("a stream was recorded")

    def work(self, serial: int, known: Live, place: int, *, write: bool) -> None:
        """Write or read a block, after what its user has to wait for."""
        uses: Uses = known.extra
        before = uses.all if write else [uses.written] if uses.written else []
        for other, work in before:
            if other != place:
                self.device.wait(place, work)
        act = self.device.write if write else self.device.check
        work = act(place, known, serial)
        self.look_at_former_owners(serial, known, work)
        if not self.recording_lasts:
            uses.recorded.discard(place)
        if write:
            uses.all.clear()  # which came before it
            uses.written = place, work
        uses.all.append((place, work))

    def look_at_former_owners(self, serial: int, known: Live, work: Any) -> None:
        """Check that all earlier work on these bytes ends before `work` begins."""
        for _, former in self.retired:
            if known.start < former.end and former.start < known.end:
                for place, earlier in former.extra.all:
                    assert self.device.ordered(earlier, work), (
                        f"{work} at {known} does not come after {earlier}, "
                        f"which was freed and lay at {former}"
                    )
                    if place != self.on:
                        self.reached("memory goes from stream to stream")

    def leave(self, known: Live) -> None:
        """Before a block is freed: what the allocator cannot know of is waited for."""
        told = known.extra.recorded | ({known.extra.home} if self.keeps_home else set())
        for place, work in known.extra.all:
            if place != self.on and place not in told:
                self.device.wait(self.on, work)

    @contextlib.contextmanager
    def at(self, place: int) -> Iterator[None]:
        """Do the work of the body at this place."""
        before, self.on = self.on, place
        try:
            yield
        finally:
            self.on = before

    # The steps of AllocatorMachine, with streams -------------------------------------------------

    def begin(self, config: dict[str, Any]) -> None:
        """Streams first: the allocator may want them."""
        self.device = self.make_streams()
        super().begin(config)

    def ask(self, state: Any, nbytes: int, align: int | None) -> Any:
        """Call `allocate`, on the stream whose turn it is."""
        return self.call(self.allocate, state, nbytes, align, self.stream(self.on))

    def let_go(self, state: Any, block: Any) -> None:
        """Call `free`, likewise."""
        self.call(self.free, state, block, self.stream(self.on))

    def rewind(self, state: Any, *mark: Any) -> None:
        """Call `reset`, likewise; what may go is no longer in use, or the stream waits for it."""
        if state is self.state:
            for known in self.live.values():
                self.leave(known)
        self.call(self.reset, state, mark[0] if mark else None, self.stream(self.on))

    def end_blocks(self, serial: int) -> None:
        """Remove younger blocks from the model. Their unfinished work stays."""
        before = dict(self.live)
        super().end_blocks(serial)
        self.retired.extend(pair for pair in before.items() if pair[0] not in self.live)

    def fill(self, known: Live) -> None:
        """Write a block, also a new one."""
        if known.extra is None:
            known.extra = Uses(self.on)
        serial = next((key for key, one in self.live.items() if one is known), self.serial)
        self.work(serial, known, self.on, write=True)

    def give_back(self, serial: int) -> None:
        """Free a block on this stream, or on its own."""
        home = self.live[serial].extra.home
        with self.at(self.on if self.frees_anywhere else home):
            super().give_back(serial)

    def gone(self, serial: int) -> Any:
        """It leaves the model, but for the work that may not be done."""
        known = self.live[serial]
        self.leave(known)
        self.retired.append((serial, known))
        return super().gone(serial)

    def give_all_back(self, how: str) -> None:
        """After this, all work is done."""
        super().give_all_back(how)
        self.device.finish_all()

    def contents_survive(self) -> None:
        """Nothing was read by now that was not as it had been written."""
        wrong = self.device.wrong()
        assert not wrong, "\n".join(wrong)

    def check_all(self) -> None:
        """Read every block, where it was written last."""
        for serial, known in self.live.items():
            self.work(serial, known, known.extra.written[0], write=False)

    def teardown(self) -> None:
        """See that all is done as it should, while the memory is there."""
        state, device = self.state, self.device  # the first to live until the other has ended
        fine = self.started and sys.exc_info()[1] is self.handled
        try:
            if fine:
                self.check_all()
            super().teardown()
            if fine:
                device.finish_all()
                with self.failures_kept():
                    self.contents_survive()
        finally:
            self.retired.clear()
            if device is not None:
                device.close()
            del state
