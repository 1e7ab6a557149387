"""Where CUDA memory comes from: the recipes `Device`, `Pinned`, `Managed` and `DriverPool`.

What lives here: their options, and what is refused before the driver is asked. What does not:
calling the driver (backing), and when memory may be used again (ordering).

Thread-safety: sources may be used from any thread. None of them touches the driver before its first
region, or the first allocator over it, is made.
"""

import importlib
from dataclasses import dataclass, field
from numbers import Real
from typing import SupportsIndex

from arenapy.base.text import format_bytes
from arenapy.buffer.block import StreamHooks
from arenapy.buffer.buffer import Buffer
from arenapy.cuda import backing
from arenapy.cuda.copies import advise as _advise
from arenapy.cuda.copies import prefetch as _prefetch
from arenapy.cuda.device import driver_memory
from arenapy.errors import OutOfMemory
from arenapy.memory.host_request import (
    HugePages,
    check_flag,
    check_ordinal,
    checked_index,
    checked_size,
)
from arenapy.memory.region import Region
from arenapy.memory.sources import Host

__all__ = ["Device", "DriverPool", "Managed", "Pinned"]


@dataclass(frozen=True, slots=True)
class Device:
    """Memory of a device, by ``cuMemAlloc``.

    Parameters
    ----------
    ordinal : int
        The number of the device, as the driver counts.
    grow : bool
        Let a Bump or Pool grow in place: it has one range of addresses, and maps memory into it in
        pieces of 2 MiB (``cuMemMap``). Free memory merges across growth, and `trim` returns it
        wherever it lies. The limit of a Pool is rounded up to 2 MiB. Blocks can be sent to other
        processes, as those of `Shared` are (not those of a Slab).

    Raises
    ------
    ValueError, TypeError
        If `ordinal` is invalid.

    Notes
    -----
    Streams order the blocks. The blocks of an allocator belong to its `stream` (by default the
    legacy default stream), and to the streams that `alloc`, `record_stream` and copies name.
    Thread-safety: immutable; may be used from any thread.

    Examples
    --------
    >>> import arenapy
    >>> from arenapy import cuda
    >>> pool = arenapy.Pool(source=cuda.Device(0), max_bytes=8 << 20)
    >>> block = pool.alloc(4096)
    >>> block.kind, block.device_id
    ('device', 0)
    """

    ordinal: int = 0
    grow: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        """Refuse what cannot be, before anything depends on it."""
        check_ordinal(self.ordinal)
        check_flag("grow", self.grow)
        if self.grow:
            # Its blocks can be sent. This imports multiprocessing, which others need not have.
            importlib.import_module("arenapy.cuda.sharing")

    @property
    def hooks(self) -> StreamHooks:
        """Internal: what an allocator over this source asks about streams."""
        return backing.device_memory(self.ordinal)

    def reserve(self, nbytes: int) -> backing.DeviceReservation:
        """Internal: addresses for `nbytes` bytes of memory, which get it part by part.

        Raises
        ------
        OutOfMemory, Unavailable, CudaError, ValueError, TypeError
            As `region` does; ValueError also if the device cannot do so.
        """
        return backing.reserve_device(self.hooks, checked_size(nbytes))

    def region(self, nbytes: int) -> Region:
        """Allocate `nbytes` bytes of device memory.

        Parameters
        ----------
        nbytes : int
            Size in bytes, more than 0.

        Returns
        -------
        Region

        Raises
        ------
        OutOfMemory
            If the device does not have enough free memory. The message says how much it has.
        Unavailable
            If there is no driver, no device or no cuda-python.
        CudaError
            If the driver refused something else.
        ValueError, TypeError
            If `nbytes` is not a size, or there is no such device.

        Examples
        --------
        >>> cuda.Device().region(1 << 20).kind
        'device'
        """
        return backing.device_region(self.hooks, checked_size(nbytes))


@dataclass(frozen=True, slots=True)
class Pinned:
    """Host memory that devices can access directly, so copies run at full speed.

    It is a region of `Host` that is faulted in and then registered with ``cuMemHostRegister``.

    Parameters
    ----------
    huge_pages, lock, numa_node, guard, threads
        As for `Host`.
    portable : bool
        Pin the memory for every device, not only for the first.
    mapped : bool
        Let kernels read and write the memory in place.
    max_ram_fraction : float
        The largest share of the machine's memory that arenapy pins in this process, in total.

    Raises
    ------
    ValueError, TypeError
        If an option is invalid.

    Notes
    -----
    A forked child does not have the memory, and allocators over it are closed there.
    Thread-safety: immutable; may be used from any thread.

    Examples
    --------
    >>> import arenapy, numpy as np
    >>> from arenapy import cuda
    >>> staging = arenapy.Slab(4096, count=2, source=cuda.Pinned())
    >>> item = staging.alloc()
    >>> item.array(dtype="f4")[:] = 1        # ordinary memory to this processor
    >>> block = arenapy.Pool(source=cuda.Device()).alloc(4096).copy_from(item)
    """

    huge_pages: HugePages = "auto"
    lock: bool = False
    numa_node: int | None = None
    guard: bool = False
    threads: int | None = field(default=None, kw_only=True)
    portable: bool = field(default=True, kw_only=True)
    mapped: bool = field(default=True, kw_only=True)
    max_ram_fraction: float = field(default=0.25, kw_only=True)

    def __post_init__(self) -> None:
        """Refuse what cannot be, before anything depends on it."""
        self._host()
        check_flag("portable", self.portable)
        check_flag("mapped", self.mapped)
        share = self.max_ram_fraction
        if not isinstance(share, Real):
            raise TypeError(
                f"max_ram_fraction={share!r}: need a number, not {type(share).__name__}"
            )
        if not 0 < share <= 1:
            raise ValueError(
                f"max_ram_fraction={share!r} is not a valid share of the memory: "
                "give more than 0, and at most 1"
            )

    def _host(self) -> Host:
        return Host(
            huge_pages=self.huge_pages,
            lock=self.lock,
            numa_node=self.numa_node,
            guard=self.guard,
            fork="skip",
            threads=self.threads,
        )

    @property
    def hooks(self) -> StreamHooks:
        """Internal: what an allocator over this source asks about streams."""
        return backing.pinned_memory(self.mapped)

    def region(self, nbytes: int) -> Region:
        """Map, fault in and register `nbytes` bytes.

        Parameters
        ----------
        nbytes : int
            Size in bytes, more than 0.

        Returns
        -------
        Region

        Raises
        ------
        OutOfMemory
            As `Host.region`; also if the request exceeds `max_ram_fraction`.
        Unavailable, CudaError
            As `Device.region`.
        OSError, ValueError, TypeError
            As `Host.region`; with `mapped`, also if the device cannot access this memory.

        Examples
        --------
        >>> cuda.Pinned().region(1 << 20).kind
        'pinned'
        """
        return backing.pinned_region(
            self.hooks,
            self._host(),
            checked_size(nbytes),
            self.max_ram_fraction,
            self.portable,
            self.mapped,
        )


@dataclass(frozen=True, slots=True)
class Managed:
    """Memory whose pages move between host and device when they are touched (unified memory).

    Parameters
    ----------
    ordinal : int
        The device whose free memory is the limit.
    oversubscribe : bool
        Allow more than the free memory of the device. A device that runs out of memory in this way
        swaps with the host, and may hang (we have seen this).

    Raises
    ------
    ValueError, TypeError
        If an option is invalid.

    Notes
    -----
    The host may access it at any time only if the device has concurrent managed access. Otherwise
    (on Windows and WSL) Buffers export no host memory, and you have to copy.
    Thread-safety: immutable; may be used from any thread.

    Examples
    --------
    >>> import arenapy
    >>> from arenapy import cuda
    >>> block = arenapy.Pool(source=cuda.Managed()).alloc(4096)
    >>> block.kind
    'managed'
    """

    ordinal: int = 0
    oversubscribe: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        """Refuse what cannot be, before anything depends on it."""
        check_ordinal(self.ordinal)
        check_flag("oversubscribe", self.oversubscribe)

    @property
    def hooks(self) -> StreamHooks:
        """Internal: what an allocator over this source asks about streams."""
        return backing.managed_memory(self.ordinal)

    def region(self, nbytes: int) -> Region:
        """Allocate `nbytes` bytes. Each page is placed where it is first touched.

        Parameters
        ----------
        nbytes : int
            Size in bytes, more than 0.

        Returns
        -------
        Region

        Raises
        ------
        OutOfMemory
            If the device does not have enough free memory, and `oversubscribe` is not set.
        Unavailable, CudaError, ValueError, TypeError
            As `Device.region`.

        Examples
        --------
        >>> cuda.Managed().region(1 << 20).kind
        'managed'
        """
        nbytes = checked_size(nbytes)
        memory = self.hooks
        _, free, _ = driver_memory(self.ordinal)
        if nbytes > free and not self.oversubscribe:
            raise OutOfMemory(
                f"{format_bytes(nbytes)} of managed memory is more than the "
                f"{format_bytes(free)} that device {self.ordinal} has free: ask for less, or pass "
                "oversubscribe=True and let it swap with the host"
            )
        return backing.managed_region(memory, nbytes)

    @staticmethod
    def prefetch(buffer: Buffer, device_id: SupportsIndex, stream: object = None) -> None:
        """Move pages to the place of their next use, as `arenapy.cuda.prefetch`.

        Parameters
        ----------
        buffer, device_id, stream
            As for `arenapy.cuda.prefetch`.

        Examples
        --------
        >>> block = arenapy.Pool(source=cuda.Managed()).alloc(4096)
        >>> cuda.Managed.prefetch(block, 0)
        """
        _prefetch(buffer, device_id, stream)

    @staticmethod
    def advise(buffer: Buffer, advice: str, device_id: SupportsIndex = 0) -> None:
        """Tell the driver how the memory will be used, as `arenapy.cuda.advise`.

        Parameters
        ----------
        buffer, advice, device_id
            As for `arenapy.cuda.advise`.

        Examples
        --------
        >>> block = arenapy.Pool(source=cuda.Managed()).alloc(4096)
        >>> cuda.Managed.advise(block, "read_mostly")
        """
        _advise(buffer, advice, device_id)


@dataclass(frozen=True, slots=True, eq=False)
class DriverPool:
    """Device memory from a stream-ordered pool of the driver (``cuMemPoolCreate``).

    Parameters
    ----------
    ordinal : int
        The number of the device.
    release_threshold : int, optional
        Bytes that the driver keeps when they are returned to it. By default all.

    Raises
    ------
    ValueError, TypeError
        If an option is invalid.

    Notes
    -----
    The first region creates the pool. It lives as long as this source or a region of it.
    Thread-safety: may be used from any thread.

    Examples
    --------
    >>> import arenapy
    >>> from arenapy import cuda
    >>> pool = arenapy.Pool(source=cuda.DriverPool(0, release_threshold=1 << 30))
    >>> pool.alloc(4096).kind
    'device'
    """

    ordinal: int = 0
    release_threshold: int | None = None
    _made: list[backing.DriverPoolHandle] = field(default_factory=list, init=False, repr=False)

    def __post_init__(self) -> None:
        """Refuse what cannot be, before anything depends on it."""
        check_ordinal(self.ordinal)
        threshold = self.release_threshold
        if threshold is not None and not (
            0 <= checked_index("release_threshold", threshold) < 2**64
        ):
            raise ValueError(
                f"release_threshold={threshold!r}: need bytes, from 0 to less than 2**64, or None"
            )

    @property
    def hooks(self) -> StreamHooks:
        """Internal: what an allocator over this source asks about streams."""
        return backing.device_memory(self.ordinal)

    def _pool(self) -> backing.DriverPoolHandle:
        if not self._made:
            self._made.append(backing.DriverPoolHandle(self.ordinal, self.release_threshold))
            del self._made[1:]  # of two that were made at once, one is dropped
        return self._made[0]

    def region(self, nbytes: int) -> Region:
        """Allocate `nbytes` bytes from the driver's pool.

        Errors are those of `Device.region`.

        Parameters
        ----------
        nbytes : int
            Size in bytes, more than 0.

        Returns
        -------
        Region

        Examples
        --------
        >>> cuda.DriverPool().region(1 << 20).kind
        'device'
        """
        return backing.pooled_region(self.hooks, self._pool(), checked_size(nbytes))

    def trim(self, keep_bytes: int = 0) -> None:
        """Let the driver return the memory that it keeps beyond `keep_bytes`.

        Parameters
        ----------
        keep_bytes : int
            The number of bytes that the driver may keep.

        Examples
        --------
        >>> source = cuda.DriverPool()
        >>> region = source.region(1 << 20)
        >>> region.close()
        >>> source.trim()                        # the device has all of it back
        """
        if checked_index("keep_bytes", keep_bytes) < 0:
            raise ValueError(f"keep_bytes={keep_bytes!r}: need bytes, 0 or more")
        if self._made:
            self._made[0].trim_to(keep_bytes)
