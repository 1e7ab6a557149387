"""Simulated streams: work that is done when a test says so, in any order that it may be done in.

What lives here: streams, events, and who came before whom. What may not: blocks and allocators.

Every piece of work has a clock, a number for each stream: how much of that stream's work is done
before it begins. A wait joins clocks. So "is this done before that" is one comparison, and does not
depend on what happened to be done when. The host has a clock as well, of what it has seen done.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Sequence

from arenapy.testing.ranges import Live, check_reads, windows

__all__ = ["SimulatedEvent", "SimulatedStream", "SimulatedStreams", "Work"]

HOST = -1  # in the place of a stream's number
Clock = list[int]


def join(clock: Clock, other: Sequence[int]) -> None:
    """Let `clock` come after `other`, too."""
    clock[:] = map(max, clock, other)


class Work:
    """Something that a stream is to do, or that the host did at once.

    Attributes
    ----------
    stream, number : int
        Whose it is, and the how manieth there, from 1.
    clock : list of int
        The work that is done before.
    what : str
        For messages.
    """

    __slots__ = ("clock", "number", "run", "stream", "what")

    def __init__(
        self, stream: int, number: int, clock: Sequence[int], what: str, run: Callable[[], None]
    ) -> None:
        self.stream, self.number, self.what, self.run = stream, number, what, run
        self.clock = list(clock)

    def __str__(self) -> str:
        """Name the work and the place."""
        return f"{self.what} {'by the host' if self.stream == HOST else f'on stream {self.stream}'}"


class SimulatedEvent:
    """A point in a stream to wait for.

    Attributes
    ----------
    closed : bool

    Raises
    ------
    RuntimeError
        If it is used after `close`.

    Notes
    -----
    Thread-safety: all streams of one `SimulatedStreams` are used by one thread.

    Examples
    --------
    >>> from arenapy.testing import SimulatedStreams
    >>> streams = SimulatedStreams(2)
    >>> one, other = streams.streams
    >>> one.submit(lambda: print("done"))
    >>> event = one.record()
    >>> other.wait(event)
    >>> event.query()
    False
    >>> other.synchronize()
    done
    >>> event.query()
    True
    """

    def __init__(self, owner: SimulatedStreams) -> None:
        self.closed = False
        self._owner = owner
        self._clock: Clock = [0] * len(owner.streams)

    def record(self, stream: SimulatedStream) -> None:
        """Stand for all that `stream` was given until now, and no longer for anything else."""
        self._open()
        self._clock = list(stream.clock)

    def query(self) -> bool:
        """True if the work before the event is done."""
        self._open()
        return self._owner.seen(self._clock)

    def synchronize(self) -> None:
        """Wait for it."""
        self._open()
        self._owner.finish_clock(self._clock)

    def close(self) -> None:
        """Destroy it. Streams that wait for it already go on waiting."""
        self.closed = True

    def _open(self) -> None:
        if self.closed:
            raise RuntimeError("an event is used that was closed")


class SimulatedStream:
    """A queue of work, which is done in order.

    Attributes
    ----------
    index : int
        The number of the stream.

    Notes
    -----
    Thread-safety: as `SimulatedEvent`. There is no default stream: streams wait for each other only
    on request.

    Examples
    --------
    >>> from arenapy.testing import SimulatedStreams
    >>> stream = SimulatedStreams(1).streams[0]
    >>> stream.submit(lambda: print("done"))
    >>> stream.query()
    False
    >>> stream.synchronize()
    done
    """

    def __init__(self, owner: SimulatedStreams, index: int, count: int) -> None:
        self.index = index
        self.clock: Clock = [0] * count  # what its next work comes after
        self.queue: deque[Work] = deque()
        self._owner = owner

    def __repr__(self) -> str:
        """By its number."""
        return f"<simulated stream {self.index}>"

    def submit(self, run: Callable[[], None], what: str = "work") -> None:
        """Queue a call."""
        self._owner.submit(self.index, what, run)

    def record(self, event: SimulatedEvent | None = None) -> SimulatedEvent:
        """An event, or this one, that stands for all that was given to this stream until now."""
        event = SimulatedEvent(self._owner) if event is None else event
        event.record(self)
        return event

    def wait(self, event: SimulatedEvent) -> None:
        """Let later work of this stream run after `event`."""
        event._open()
        join(self.clock, event._clock)

    def query(self) -> bool:
        """True if all work is done."""
        return self._owner.seen(self.clock)

    def synchronize(self) -> None:
        """Wait until all is done."""
        self._owner.finish_clock(self.clock)


class SimulatedStreams:
    """Streams without a GPU, for a `StreamMachine`.

    Work is done only by `progress`, or when somebody waits for it. A wait does only the necessary
    work.

    Parameters
    ----------
    count : int

    Attributes
    ----------
    streams : tuple of SimulatedStream
        The streams for the allocator.

    Raises
    ------
    ValueError
        If `count` is less than 1.

    Notes
    -----
    Thread-safety: as `SimulatedEvent`.

    Examples
    --------
    >>> from arenapy.testing import SimulatedStreams
    >>> streams = SimulatedStreams(2)
    >>> for stream in streams.streams:
    ...     stream.submit(lambda stream=stream: print(stream))
    >>> streams.progress(1)
    <simulated stream 1>
    >>> streams.finish_all()
    <simulated stream 0>
    """

    def __init__(self, count: int = 3) -> None:
        if count < 1:
            raise ValueError(f"count={count}: need 1 or more")
        self.streams = tuple(SimulatedStream(self, index, count) for index in range(count))
        self._done: Clock = [0] * count
        self._host: Clock = [0] * count
        self._wrong: list[str] = []

    # The interface for a machine -----------------------------------------------------------------

    def write(self, stream: int, known: Live, serial: int) -> Work:
        """Fill a block with its byte."""
        start, nbytes, fill = known.start, known.nbytes, known.fill

        def run() -> None:
            for offset, length in windows(nbytes):
                ctypes.memset(start + offset, fill, length)

        return self.submit(stream, f"the writing of block {serial}", run)

    def check(self, stream: int, known: Live, serial: int) -> Work:
        """Read a block, and see that it has its byte."""
        was = Live(None, known.start, known.nbytes, known.fill, known.extent)

        def run() -> None:
            for offset, length in windows(was.nbytes):
                try:
                    seen = ctypes.string_at(was.start + offset, length)
                    check_reads(serial, was, offset, length, seen)
                except AssertionError as error:
                    self._wrong.append(f"{error}, when stream {stream} read it")

        return self.submit(stream, f"the reading of block {serial}", run)

    def wait(self, stream: int, work: Work) -> None:
        """Let later work of `stream` run after `work`. The host waits for it."""
        clock = self._after(work)
        if stream == HOST:
            self.finish_clock(clock)
        else:
            join(self.streams[stream].clock, clock)

    def ordered(self, before: Work, after: Work) -> bool:
        """True if `before` is done when `after` begins, however fast the streams are."""
        return before.stream == HOST or after.clock[before.stream] >= before.number

    def progress(self, which: int) -> None:
        """Do one piece of work, of those that may be done, counted round."""
        ready = [stream for stream in self.streams if stream.queue and self._may(stream.queue[0])]
        if ready:
            self._do(ready[which % len(ready)])

    def finish(self, stream: int) -> None:
        """Let the host wait for a stream."""
        if stream != HOST:
            self.streams[stream].synchronize()

    def finish_all(self) -> None:
        """Let the host wait for all streams."""
        for stream in self.streams:
            stream.synchronize()

    def wrong(self) -> list[str]:
        """List the reads so far that did not see the bytes that had been written."""
        return self._wrong

    def close(self) -> None:
        """Drop the work that is not done."""
        for stream in self.streams:
            stream.queue.clear()

    # Behind it -----------------------------------------------------------------------------------

    def submit(self, stream: int, what: str, run: Callable[[], None]) -> Work:
        """Queue a call; the host makes it at once."""
        if stream == HOST:
            run()
            return Work(HOST, 0, self._host, what, run)
        one = self.streams[stream]
        join(one.clock, self._host)
        work = Work(stream, one.clock[stream] + 1, one.clock, what, run)
        one.clock[stream] += 1
        one.queue.append(work)
        return work

    def seen(self, clock: Sequence[int]) -> bool:
        """True if all of it is done. Then the host's clock notes that it knows this."""
        if any(done < number for done, number in zip(self._done, clock, strict=True)):
            return False
        join(self._host, clock)
        return True

    def finish_clock(self, clock: Sequence[int]) -> None:
        """Do what it needs."""
        left = [(self.streams[i], number) for i, number in enumerate(clock)]
        for stream, number in left:
            while self._done[stream.index] < number:
                self.finish_clock(stream.queue[0].clock)
                self._do(stream)
        self.seen(clock)

    def _after(self, work: Work) -> Clock:
        clock = list(work.clock)
        if work.stream != HOST:
            clock[work.stream] = work.number
        return clock

    def _may(self, work: Work) -> bool:
        return all(done >= need for done, need in zip(self._done, work.clock, strict=True))

    def _do(self, stream: SimulatedStream) -> None:
        self._done[stream.index] += 1
        stream.queue.popleft().run()
