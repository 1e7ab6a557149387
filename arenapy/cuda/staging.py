"""Data larger than the device's memory, chunk by chunk, each copied while others are worked on.

What lives here: the iterator `chunks`, and what it reads from. What does not: streams and events
(own_stream), copies (copies), and when memory may be used again (the allocators).

Three things go on at once. A thread reads a piece of the source into pinned memory (a staging item)
and gives its copy to a stream of its own; the device copies; the consumer works on what was copied
before. The thread is given one task a chunk, never more than `depth` of them: so no task ever waits
for the consumer, and nothing is left waiting when the consumer stops early or the interpreter ends.

Who waits for what:

- the stream that copies waits for all streams that a source of CUDA memory was told of;
- the consumer's stream waits for the event of a chunk's copy, nobody else does;
- a staging item is read into again once the event of the copy out of it is over, which the reading
  thread waits for;
- a chunk's memory on the device is allocated for the stream that copies, by the thread that
  iterates. The Buffer knows the consumer's stream (`record_stream`) and is released when the next
  chunk is asked for: then its allocator lets the copies wait for the consumer. One that something
  was exported from comes back when that is gone. Until then there is less ahead.
"""

import os
import re
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from threading import get_ident
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import DTypeLike

from arenapy.base.text import format_bytes
from arenapy.buffer.buffer import Buffer
from arenapy.cuda.driver import device_count
from arenapy.cuda.ordering import let_wait, memory_of
from arenapy.cuda.sources import Device, Pinned
from arenapy.cuda.stream import Event, Stream, wait_on
from arenapy.errors import OutOfMemory
from arenapy.linux import vm
from arenapy.memory.host_request import checked_index, checked_size
from arenapy.memory.region import Region
from arenapy.memory.sources import File
from arenapy.pool.pool import Pool
from arenapy.slab.slab import Slab

__all__ = ["chunks"]

LEGACY = 1  # the legacy default stream
READERS = 4  # threads, at most
PART = 8 << 20  # bytes that one of them reads at a time
HERE = ("pinned", "managed", "device")  # kinds of memory that copies start from as it is

Progress: TypeAlias = Callable[[int, int], object]
_AnyPath: TypeAlias = str | bytes | os.PathLike[str] | os.PathLike[bytes]


class _Source(Protocol):
    """Bytes that are read from the beginning to the end."""

    @property
    def nbytes(self) -> int: ...
    @property
    def staged(self) -> bool:
        """Are they to be read into pinned memory, or copied from where they are?"""
        ...

    def open(self) -> AbstractContextManager[object]: ...
    def read(self, start: int, into: Buffer) -> None: ...
    def at(self, start: int, nbytes: int) -> Buffer: ...


class _Path:
    """A file, read by system calls: nothing is mapped."""

    staged = True

    def __init__(self, path: _AnyPath) -> None:
        self.path = os.fspath(path)
        if not os.path.isfile(self.path):
            os.stat(self.path)  # which says why, if it is not there
            raise ValueError(f"{self.path!r} is not a regular file: its size is not known")
        self.nbytes = os.stat(self.path).st_size
        self.file: vm.Descriptor | None = None

    @contextmanager
    def open(self) -> Iterator[None]:
        with vm.open_file(self.path, os.O_RDONLY) as self.file:
            os.posix_fadvise(self.file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
            yield

    def read(self, start: int, into: Buffer) -> None:
        assert self.file is not None
        with memoryview(into) as view:
            done = 0
            while done < len(view):
                n = os.preadv(self.file.fileno(), [view[done:]], start + done)
                if n == 0:
                    raise EOFError(
                        f"{self.path!r} had {self.nbytes} bytes, and ends after {start + done} now"
                    )
                done += n

    def at(self, start: int, nbytes: int) -> Buffer:
        raise NotImplementedError


class _Memory:
    """A Buffer, or an object that has one."""

    def __init__(self, source: Any) -> None:
        self.staged = not (isinstance(source, Buffer) and source.kind in HERE)
        self.bytes: Any
        if isinstance(source, Buffer):
            self.bytes = source.view()
        else:
            self.bytes = _bytes_of(source)
        self.nbytes: int = self.bytes.nbytes

    def open(self) -> AbstractContextManager[object]:
        return nullcontext()

    def read(self, start: int, into: Buffer) -> None:
        # Not copy_from: that waits for the last copy of the stream, and `into` is free before it.
        with memoryview(into) as view:
            np.copyto(np.frombuffer(view, np.uint8), self.bytes[start : start + into.nbytes])

    def at(self, start: int, nbytes: int) -> Buffer:
        part: Buffer = self.bytes[start : start + nbytes]
        return part


def _bytes_of(source: Any) -> np.ndarray[Any, Any]:
    try:
        view = memoryview(source)
    except TypeError:
        raise TypeError(
            f"source: this {type(source).__name__} is not a path, Buffer, Region, File or array of "
            "the host"
        ) from None
    if not view.c_contiguous:
        raise BufferError(
            f"this {type(source).__name__} is not C-contiguous; give a contiguous copy of it"
        )
    if "O" in re.sub(":[^:]*:", "", view.format):  # but for the names of fields
        raise TypeError("source holds Python objects, which have no meaning on a device")
    return np.frombuffer(source, np.uint8) if view.nbytes else np.empty(0, np.uint8)


def _source_of(source: Any) -> _Source:
    if isinstance(source, File):
        return _Path(source.path)
    if isinstance(source, (str, os.PathLike)):
        return _Path(source)
    return _Memory(source.buffer() if isinstance(source, Region) else source)


def chunks(
    source: Any,
    chunk_bytes: int,
    dtype: DTypeLike | None = None,
    depth: int = 2,
    *,
    pool: Pool | Slab | None = None,
    device_id: int = 0,
    stream: Any = None,
    progress: bool | Progress | None = None,
) -> Generator[Buffer, None, None]:
    """Iterate over data on a device in chunks, while the next chunks are read and copied.

    Parameters
    ----------
    source : path, File, Region, Buffer or array
        The data. A path (``str`` or ``os.PathLike``) or a `File` is opened and read, not mapped.
        Any other source is a C-contiguous object with a buffer. The data may be larger than the
        device's memory. Memory of arenapy.cuda is not staged. The data must not change during the
        iteration.
    chunk_bytes : int
        Bytes of a chunk. The last chunk may have fewer.
    dtype : dtype-like, optional
        The type of the elements of a chunk, which has one dimension. By default bytes.
    depth : int
        The number of chunks to read and copy ahead, at least 1. This needs `depth` times
        `chunk_bytes` of pinned memory, and one chunk more of device memory.
    pool : Pool or Slab, optional
        The allocator of the chunks, over `Device` or `Managed` memory. The iterating thread uses
        it. By default, one is made and dropped at the end.
    device_id : int
        Ordinal of the device, also of `pool`.
    stream : stream, optional
        The stream of your work. It waits for the copy of each chunk before it continues. By default
        the legacy default stream.
    progress : bool or callable, optional
        If True, show a progress bar (rich) on the terminal. A callable is called after each chunk
        as ``progress(done_bytes, total_bytes)``.

    Yields
    ------
    Buffer
        A chunk on the device: one dimension of `dtype`. It is closed when you ask for the next
        chunk. Before that, give all work with it to `stream`. If another stream uses it, call
        ``record_stream``. Arrays made from it (CuPy, torch) may live longer, and keep its memory.
        If all memory is kept, OutOfMemory is raised.

    Raises
    ------
    ValueError
        If `chunk_bytes` or the size of `source` is not a multiple of the size of `dtype`, `depth`
        is less than 1, or a file is not a regular file.
    TypeError
        If `source` or an option has the wrong type.
    BufferError
        If an array is not contiguous, or `pool` is not on a device.
    OSError
        If the file cannot be read. This may also be raised during the iteration.
    OutOfMemory, Unavailable, CudaError
        As from `Device`, `Pinned` and copies, during the iteration.

    Notes
    -----
    The iterator is a generator. ``close()``, an early ``break`` and its end stop the reading
    thread, wait for its present operation, and close the file. Without `pool` they also wait for
    the streams that still use chunks.

    Thread-safety: one thread at a time may iterate. Several iterators may be used at once.

    Examples
    --------
    >>> import numpy as np
    >>> from arenapy import cuda
    >>> np.arange(1000, dtype="f4").tofile("data.f4")
    >>> last = np.empty(1, "f4")
    >>> for chunk in cuda.chunks("data.f4", 1000, "f4"):     # of 1000 bytes, on the device
    ...     _ = chunk[-1:].copy_to(last)                     # or cupy.asarray(chunk).sum(), say
    ...     print(chunk.shape, last[0])
    (250,) 249.0
    (250,) 499.0
    (250,) 749.0
    (250,) 999.0
    """
    chunk_bytes = checked_size(chunk_bytes)
    depth = checked_index("depth", depth)
    if depth < 1:
        raise ValueError(f"depth={depth}: need at least 1 chunk ahead")
    kind = np.dtype("u1" if dtype is None else dtype)
    data = _source_of(source)
    for name, nbytes in (("chunk_bytes", chunk_bytes), ("source has", data.nbytes)):
        if kind.itemsize == 0 or nbytes % kind.itemsize:
            raise ValueError(
                f"{name} {nbytes} bytes, which is not a multiple of the {kind.itemsize} of "
                f"dtype={kind}: an item would be in two chunks"
            )
    if kind.hasobject:
        raise TypeError(f"dtype={kind} holds Python objects, which have no meaning on a device")
    if pool is not None and not isinstance(pool, (Pool, Slab)):
        raise TypeError(f"pool={pool!r} is not a Pool or Slab")
    device_id = checked_index("device_id", device_id)
    if pool is not None:
        memory, _ = memory_of(pool)
        if memory.kind not in ("device", "managed"):
            raise BufferError(f"pool has {memory.kind} memory; give one over cuda.Device")
        if memory.device_id != device_id:
            raise ValueError(f"pool is on device {memory.device_id}, and device_id={device_id}")
    if isinstance(pool, Slab) and pool.item_size < min(chunk_bytes, data.nbytes):
        raise ValueError(f"pool has items of {pool.item_size} bytes, and chunk_bytes={chunk_bytes}")
    if progress is not None and not isinstance(progress, bool) and not callable(progress):
        raise TypeError(f"progress={progress!r}: need True, False or a callable")
    consumer = LEGACY if stream is None else stream
    line = _Line(data, min(chunk_bytes, data.nbytes), depth, pool, device_id, consumer)
    return _iterate(line, kind, progress)


class _Line:
    """The way of the chunks from the source to the device."""

    def __init__(
        self,
        source: _Source,
        chunk_bytes: int,
        depth: int,
        pool: Pool | Slab | None,
        device_id: int,
        consumer: Any,
    ) -> None:
        self.source = source
        self.chunk_bytes = chunk_bytes
        self.depth = min(depth, -(-source.nbytes // chunk_bytes)) if chunk_bytes else 0
        self.pool = pool
        self.device_id = device_id
        self.consumer = consumer
        self.readers: ThreadPoolExecutor
        self.threads: set[int] = set()  # idents of those that read and copy
        self.next = 0  # the first byte that no task is to read yet
        # Items ahead, oldest first: memory of the device, and the end of the task that fills it.
        self.ahead: deque[tuple[Buffer, Future[Event]]] = deque()
        self.items: list[Buffer] = []  # pinned, one after the other
        self.copied: list[Event | None] = []  # of each item: the copy out of it
        self.tasks = 0

    def executor(self, n: int, name: str) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(n, name, _note_this, (self.threads,))

    def begin(self) -> None:
        """Take all memory. Unavailable and other errors of CUDA are raised here."""
        self.stream = Stream(self.device_id)
        if self.pool is None:
            count = self.depth + 1  # and the one that the consumer has
            source = Device(self.device_id)
            self.pool = Slab(self.chunk_bytes, count, source, stream=self.stream)
        if self.source.staged:
            staging = Slab(self.chunk_bytes, self.depth, Pinned(mapped=False))
            self.items = [staging.alloc() for _ in range(self.depth)]
            self.copied = [None] * self.depth
            if isinstance(self.source, _Memory):  # copy_from waits for streams that still write it
                self.items[0][:1].copy_from(self.source.bytes[:1])
        elif isinstance(self.source, _Memory):
            let_wait(self.source.bytes, self.stream)  # nobody else can name that stream

    def fill(self, executor: ThreadPoolExecutor, *, must: bool) -> None:
        """Give the thread tasks until `depth` chunks are ahead; one there `must` be."""
        assert self.pool is not None
        while len(self.ahead) < self.depth and self.next < self.source.nbytes:
            nbytes = min(self.chunk_bytes, self.source.nbytes - self.next)
            try:
                block = self.pool.alloc(nbytes, stream=self.stream)
            except OutOfMemory as error:
                if self.ahead or not must:  # the consumer has one to go on with, and may let go
                    return
                raise OutOfMemory(
                    f"no memory for a chunk of {format_bytes(nbytes)}: either arrays made from "
                    "earlier chunks are kept, so copy or drop those, or `pool` is too small "
                    f"({error})"
                ) from error
            self.ahead.append((block, executor.submit(self.task, self.tasks, self.next, block)))
            self.tasks += 1
            self.next += nbytes

    def task(self, number: int, start: int, block: Buffer) -> Event:
        """Read one chunk, and let it be copied. On the thread."""
        if not self.source.staged:
            block.copy_from(self.source.at(start, block.nbytes), stream=self.stream)
            return self.stream.record()
        which = number % self.depth
        before = self.copied[which]
        if before is not None:
            before.synchronize()
        item = self.items[which][: block.nbytes]
        self.read(start, item)
        block.copy_from(item, stream=self.stream)
        copied = self.copied[which] = self.stream.record()
        return copied

    def read(self, start: int, item: Buffer) -> None:
        """In parts at once: one processor copies out of the page cache slower than a bus takes."""
        parts = [slice(at, at + PART) for at in range(0, item.nbytes, PART)]
        done = [
            self.readers.submit(self.source.read, start + part.start, item[part]) for part in parts
        ]
        wait(done)
        for one in done:
            one.result()

    def take(self) -> Buffer:
        """The oldest chunk, for the consumer's stream."""
        device_count()  # raises in a forked child, which lacks the thread to wait for
        block, task = self.ahead.popleft()
        wait_on(self.consumer, task.result(), self.device_id)
        block.record_stream(self.consumer)
        return block


def _iterate(
    line: _Line, dtype: np.dtype[Any], progress: bool | Progress | None
) -> Generator[Buffer, None, None]:
    total, done = line.source.nbytes, 0
    if not total:
        return
    with _shown(progress, total) as tell, line.source.open():
        line.begin()
        executor = line.executor(1, "arenapy chunks")
        line.readers = line.executor(
            min(READERS, len(os.sched_getaffinity(0))), "arenapy chunks, reading"
        )
        try:
            line.fill(executor, must=True)
            while line.ahead:
                block = line.take()
                line.fill(executor, must=False)  # with what the last chunk has left, perhaps
                done += block.nbytes
                yield block.view(dtype=dtype)
                _let_go(block)
                del block  # else it would keep what it could not let go
                tell(done, total)
                line.fill(executor, must=True)
        finally:
            # At the end of the interpreter the threads were joined already, and the name is None.
            if sys is not None and not sys.is_finalizing():
                # One of these threads may be the one that ends this: as the collector.
                wait_for_them = get_ident() not in line.threads
                executor.shutdown(wait_for_them, cancel_futures=True)
                line.readers.shutdown(wait_for_them)


def _note_this(threads: set[int]) -> None:
    threads.add(get_ident())


def _let_go(block: Buffer) -> None:
    with suppress(BufferError):  # somebody looks at it now, and has it until then
        block.release()


@contextmanager
def _shown(progress: bool | Progress | None, total: int) -> Iterator[Progress]:
    if not progress:
        yield lambda done, total: None
    elif callable(progress):
        yield progress
    else:
        from rich import progress as bars  # here: it takes longer to import than all of arenapy

        columns = (
            bars.BarColumn(),
            bars.DownloadColumn(binary_units=True),
            bars.TransferSpeedColumn(),
            bars.TimeRemainingColumn(),
        )
        with bars.Progress(*columns) as bar:
            task = bar.add_task("chunks", total=total)
            yield lambda done, total: bar.update(task, completed=done)
