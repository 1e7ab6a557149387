"""Memory that kernels allocate from while they run.

What lives here: the host's side of KernelArena and KernelSlab: their memory, the struct in front of
it, and what the host sees of it. What does not: allocation itself, which is device code
(device-code/arenapy.cuh).

A Buffer over a part of the memory keeps a `Window`, and a reset is refused while there is one. So
no byte is handed out again while somebody on the host can see it. A reset in a graph is the
exception: nobody is asked when the graph is launched. The window keeps the memory itself, and not
the object that has it: a second ``__init__`` of that one gives it other memory.
"""

import struct
import weakref
from pathlib import Path
from time import sleep
from typing import NoReturn

from arenapy.base.text import format_bytes
from arenapy.buffer.buffer import Buffer
from arenapy.cuda.foreign import Window, asbuffer, window_of
from arenapy.cuda.ordering import drop_finished
from arenapy.cuda.sources import Device, DriverPool, Managed
from arenapy.cuda.stream import wait_for
from arenapy.memory.host_request import SIZE_LIMIT, checked_index, checked_size

__all__ = ["KernelArena", "KernelSlab", "include_dir"]

LINE = 128  # bytes: counters that kernels write have a cache line of their own
PATIENCE = 100  # milliseconds
STRUCT = 2 * LINE  # bytes of arenapy::arena and arenapy::slab
#: size; used, overflowed, misused
ARENA = struct.Struct("<Q120x Q Q Q 104x")
#: stride, count, first, words; vacant, overflowed, misused
SLAB = struct.Struct("<QQQQ96x q Q Q 104x")
#: The second line of either.
COUNTERS = struct.Struct("<qQQ")
WORD = 32  # items in a word of the bitmap
ALIGN = 16  # bytes


def include_dir() -> str:
    """Return the folder of ``arenapy.cuh``, for the compiler's option ``-I``.

    Returns
    -------
    str

    Notes
    -----
    Thread-safety: may be called from any thread.

    Examples
    --------
    >>> import os
    >>> from arenapy import cuda
    >>> os.listdir(cuda.include_dir())
    ['arenapy.cuh']
    """
    return str(Path(__file__).parent / "device-code")


class _Reset:
    """A reset that is under way."""


class _KernelMemory:
    """Common part of both: a struct with counters in its second line, then the memory."""

    _all: Buffer
    _address: int  # also where the memory is closed
    # Not WeakSets, whose callback is Python code, in which a signal's exception is lost.
    _windows: set[weakref.ref[Window]]
    _resets: set[weakref.ref[_Reset]]
    _fresh: bytes  # what a reset writes to the beginning of the struct
    _first: int  # of the memory, from the struct
    _end: int

    def _begin(self, memory: Buffer, first: int, fresh: bytes, **figures: int) -> None:
        memory[: len(fresh)].copy_from(fresh)
        # All in one call: a second __init__ that fails or is interrupted changes nothing.
        self.__dict__.update(
            figures, _all=memory, _address=memory.address, _fresh=fresh, _first=first,
            _end=memory.nbytes, _windows=set(), _resets=set(),
        )  # fmt: skip

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"a {type(self).__name__} is not copied or pickled: kernels know its memory by address"
        )

    @property
    def address(self) -> int:
        """The pointer that a kernel takes, an int."""
        return self._all.address

    @property
    def device_id(self) -> int:
        """Ordinal of the device."""
        return self._all.device_id

    def buffer(self, address: int, nbytes: int, *, stream: object = None) -> Buffer:
        """Return a Buffer over memory that a kernel allocated.

        Parameters
        ----------
        address : int
            An address that a kernel got.
        nbytes : int
            Size in bytes.
        stream : stream, optional
            The stream of the kernel that wrote the memory. The host waits for it. Without it, the
            kernel must be done before the call.

        Returns
        -------
        Buffer
            It keeps the memory. A reset raises BufferError while anything uses it.

        Raises
        ------
        ValueError, TypeError
            If the bytes are not inside the memory, or an argument is not a number or a stream.
        BufferError
            If the memory is being reset during the call.

        Notes
        -----
        Thread-safety: may be called from any thread.

        Examples
        --------
        >>> from arenapy import cuda
        >>> arena = cuda.KernelArena(1 << 20)
        >>> block = arena.buffer(arena.address + 256, 64)    # the first address of a new arena
        >>> block.nbytes
        64
        """
        n, at = checked_size(nbytes), checked_index("address", address)
        start, end = self.address + self._first, self.address + self._end
        if not start <= at <= end - n:
            raise ValueError(
                f"address={at}: {n} bytes from there are not inside the memory, which is "
                f"from {start:#x} to {end:#x}; give what the kernel got"
            )
        if stream is not None:
            wait_for(stream, self.device_id)
        window = window_of(self._all, at, n)
        self._windows.add(weakref.ref(window, self._windows.discard))
        try:
            if self._resets:  # which has looked for windows already, perhaps
                raise BufferError(f"{self!r} is being reset now; call again after the reset")
            return asbuffer(window)
        finally:
            del window  # a traceback may keep this frame

    def reset(self, stream: object = None) -> None:
        """Free all memory that kernels have allocated, and set the counters to 0.

        Parameters
        ----------
        stream : stream, optional
            The reset comes after the work that this stream has received so far. By default, it is
            done on return, and comes after the work of the legacy default stream and of all
            blocking streams. If the stream is captured, each launch of the graph resets the
            memory, and does not look for Buffers.

        Raises
        ------
        BufferError
            If a Buffer over a part of the memory is in use. Nothing is changed.
        CudaError
            If the driver refused.

        Notes
        -----
        Thread-safety: may be called from any thread. Kernels on other streams must be done.

        Examples
        --------
        >>> from arenapy import cuda
        >>> arena = cuda.KernelArena(1 << 20)
        >>> arena.reset()
        """
        here = _Reset()
        # Before the windows are counted: `buffer` does it the other way.
        self._resets.add(weakref.ref(here, self._resets.discard))
        try:
            for _ in range(PATIENCE):
                if not self._windows or drop_finished():  # which streams have kept
                    break
                sleep(0.001)
            n = len(self._windows)
            if n:
                raise BufferError(
                    f"{n} Buffers over parts of {self!r} are in use; drop them and all arrays "
                    "made from them, or make another one"
                )
            self._all[: len(self._fresh)].copy_from(self._fresh, stream=stream)
        finally:
            del here  # a traceback may keep this frame

    def _counters(self, stream: object) -> tuple[int, int, int]:
        found = bytearray(COUNTERS.size)
        if stream is not None:  # a copy on one that is captured would be a part of the graph
            wait_for(stream, self.device_id)
        self._all[LINE : LINE + COUNTERS.size].copy_to(found, stream=stream)
        if stream is not None:
            wait_for(stream, self.device_id)
        first, overflowed, misused = COUNTERS.unpack(found)
        return first, overflowed, misused

    @property
    def overflowed(self) -> int:
        """The number of requests since the last reset that did not fit.

        The host waits for the legacy default stream, for all blocking streams, and for the streams
        that `used`, `in_use` and `reset` got. After a kernel on another stream, synchronize first.
        """
        return self._counters(None)[1]

    @property
    def misused(self) -> int:
        """The number of wrong calls since the last reset. They had no effect.

        Such a call asked for an alignment that is not a power of two, gave back an item that was
        not in use, or gave back a pointer that is not an item. The host waits as for `overflowed`.
        """
        return self._counters(None)[2]


class KernelArena(_KernelMemory):
    """An arena from which kernels allocate blocks of any size. A reset frees all of them at once.

    In a kernel, ``arenapy::arena_alloc(arena, nbytes, align)`` of ``arenapy.cuh`` returns memory,
    or NULL if it does not fit.

    Parameters
    ----------
    nbytes : int
        Bytes for all allocations. Each takes a multiple of 16 bytes, and for a larger alignment
        further ``alignment - 16`` bytes.
    source : source, optional
        The source of the memory: `Device` (the default, of device 0), `DriverPool` or `Managed`.

    Raises
    ------
    ValueError, TypeError
        If `nbytes` is not a positive size, or the source has other memory.
    OutOfMemory, CudaError, Unavailable
        If the source raises it.

    Notes
    -----
    Keep the object until the kernels that use it are done. Kernels on several streams may allocate
    at the same time. A stream that `used` or `reset` gets as an integer must exist as long as the
    object.

    The threads of a warp share one atomic addition.

    Thread-safety: every method may be called from any thread.

    Examples
    --------
    >>> from arenapy import cuda
    >>> arena = cuda.KernelArena(8 << 20)
    >>> # kernel(..., arenapy::arena* arena): launch it with arena.address
    >>> arena.used(), arena.overflowed
    (0, 0)
    """

    _size: int

    def __init__(self, nbytes: int, source: Device | DriverPool | Managed | None = None) -> None:
        size = _positive("nbytes", nbytes)
        memory = _memory(STRUCT + size, source, f"nbytes={size}")
        self._begin(memory, STRUCT, ARENA.pack(size, 0, 0, 0), _size=size)

    def used(self, stream: object = None) -> int:
        """Return the bytes that kernels have allocated since the last reset, including alignment.

        Parameters
        ----------
        stream : stream, optional
            The host waits for the work that this stream has received so far. By default, it waits
            as for `overflowed`.

        Returns
        -------
        int
            After a request that did not fit, this may be the size of the arena.

        Raises
        ------
        CudaError
            If the driver refused.

        Notes
        -----
        Thread-safety: may be called from any thread.

        Examples
        --------
        >>> from arenapy import cuda
        >>> cuda.KernelArena(1 << 20).used()
        0
        """
        return min(self._counters(stream)[0], self._size)

    def __repr__(self) -> str:
        return f"<KernelArena {format_bytes(self._size)} at {self._address:#x}>"


class KernelSlab(_KernelMemory):
    """Items of one size that kernels allocate and give back while they run.

    In a kernel, ``arenapy::slab_alloc(slab)`` of ``arenapy.cuh`` returns an item, or NULL if all
    are in use. ``arenapy::slab_free(slab, item)`` gives it back, in any thread, in the same kernel
    or in a later one.

    Parameters
    ----------
    nbytes : int
        Bytes of an item. Items begin at multiples of 16 bytes.
    count : int
        The number of items.
    source : source, optional
        The source of the memory: `Device` (the default, of device 0), `DriverPool` or `Managed`.

    Raises
    ------
    ValueError, TypeError
        If `nbytes` or `count` is not positive, or the source has other memory.
    OutOfMemory, CudaError, Unavailable
        If the source raises it.

    Notes
    -----
    Keep the object until the kernels that use it are done. Kernels on several streams may allocate
    and give back at the same time. If all items are in use and some are given back at the same
    moment, a request may be refused. A stream that `in_use` or `reset` gets as an integer must
    exist as long as the object.

    A bitmap has a bit for each item. The threads of a warp look at up to 32 words of it together,
    beginning at a place that differs from warp to warp, as in A. Adinetz and D. Pleiter, "Halloc: a
    high-throughput dynamic memory allocator for GPGPU architectures", 2014.

    Thread-safety: every method may be called from any thread.

    Examples
    --------
    >>> from arenapy import cuda
    >>> slab = cuda.KernelSlab(64, 1000)
    >>> # kernel(..., arenapy::slab* slab): launch it with slab.address
    >>> slab.in_use(), slab.overflowed
    (0, 0)
    """

    _nbytes: int
    _count: int

    def __init__(
        self, nbytes: int, count: int, source: Device | DriverPool | Managed | None = None
    ) -> None:
        size, count = _positive("nbytes", nbytes), _positive("count", count)
        stride = -(-size // ALIGN) * ALIGN
        words = -(-count // WORD)
        first = STRUCT + -(-4 * words // LINE) * LINE
        memory = _memory(first + stride * count, source, f"nbytes={size}, count={count}")
        bitmap = bytearray(4 * words)
        if count % WORD:  # bits without an item
            bitmap[-4:] = (2**WORD - 2 ** (count % WORD)).to_bytes(4, "little")
        head = SLAB.pack(stride, count, first, words, count, 0, 0)
        self._begin(memory, first, head + bytes(bitmap), _nbytes=size, _count=count)

    def in_use(self, stream: object = None) -> int:
        """Return the number of items in use.

        Parameters
        ----------
        stream : stream, optional
            The host waits for the work that this stream has received so far. By default, it waits
            as for `overflowed`.

        Returns
        -------
        int

        Raises
        ------
        CudaError
            If the driver refused.

        Notes
        -----
        Thread-safety: may be called from any thread.

        Examples
        --------
        >>> from arenapy import cuda
        >>> cuda.KernelSlab(64, 1000).in_use()
        0
        """
        return self._count - self._counters(stream)[0]

    def __repr__(self) -> str:
        item = format_bytes(self._nbytes)
        return f"<KernelSlab {self._count} items of {item} at {self._address:#x}>"


def _memory(nbytes: int, source: Device | DriverPool | Managed | None, asked: str) -> Buffer:
    source = Device() if source is None else source
    if not hasattr(source, "region"):
        raise TypeError(f"source={source!r} is not a source; give one, like arenapy.cuda.Device()")
    if nbytes >= SIZE_LIMIT:
        raise ValueError(f"{asked}: no address space holds as much; ask for less")
    memory = source.region(nbytes).buffer(0, nbytes)
    if memory.device_id < 0:
        raise ValueError(
            f"source={source!r} gives {memory.kind} memory; give arenapy.cuda.Device, "
            "arenapy.cuda.DriverPool or arenapy.cuda.Managed"
        )
    return memory


def _positive(name: str, value: object) -> int:
    number = checked_index(name, value)
    if number <= 0:
        raise ValueError(f"{name}={number}: give at least 1")
    return number
