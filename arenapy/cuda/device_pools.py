"""Several devices of one host: a Pool for each, behind one object.

What lives here: the choice of a Pool for each call, the sum of the figures, and the choice between
peer access and copies through the host. What does not: pools, and copies between devices (copies,
peers).

The user need not set a context or a stream: a Pool over a device enters that device's context for
each call of the driver, and its default stream is that device's.

Thread-safety: everything here may be called from any thread.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NoReturn, Protocol, SupportsIndex

from arenapy.buffer.buffer import Buffer
from arenapy.cuda import peers
from arenapy.cuda.driver import device_count
from arenapy.cuda.errors import CudaError
from arenapy.cuda.ordering import memory_of
from arenapy.cuda.sources import Device
from arenapy.cuda.stream_ref import device_meant
from arenapy.memory.host_request import checked_index
from arenapy.memory.region import Region
from arenapy.pool.pool import Pool
from arenapy.stats import PoolStats, sum_of

__all__ = ["Devices"]


class _Source(Protocol):
    def region(self, nbytes: int, /) -> Region: ...


class Devices:
    """A Pool for each of several devices, behind one object.

    Parameters
    ----------
    devices : iterable of int, optional
        Ordinals of the devices. By default, all devices that the driver shows.
    max_bytes : int, optional
        Limit of the memory that the Pool of each device reserves. By default, there is no limit.
    source : callable
        ``source(ordinal)`` returns the memory source of a device: a `Device` or a `DriverPool`.
    initial_bytes, trim_after, on_oom, rounding, debug, trim_thread
        Options of each Pool. See `arenapy.Pool`.
    peer_access : bool, optional
        By default, a device accesses the memory of another one directly wherever the driver allows
        it, and other copies go through pinned memory of the host. True: an error is raised if the
        driver refuses access between any two devices. False: copies of 1 MiB or more between the
        devices go through the host, and the driver makes smaller ones in its own way.

    Attributes
    ----------
    pools : mapping of int to Pool
        The Pool of each device, by ordinal. ``devices[ordinal]`` is one Pool, and iteration gives
        all Pools: ``arenapy.interop.torch.use(*devices)``.
    refused : mapping of (int, int) to str
        For each pair (device, other device) without access: why the first one cannot access the
        memory of the second one. Empty if all devices access each other.

    Raises
    ------
    CudaError
        If the driver refused, or if ``peer_access=True`` and two devices have no access.
    Unavailable
        If there is no driver, no device or no cuda-python.
    ValueError, TypeError
        If an ordinal or an option is invalid.
    OutOfMemory
        If a device does not have `initial_bytes` of free memory.

    Notes
    -----
    arenapy asks the driver for peer access once for each pair of devices. Access stays enabled
    until the process ends, because other libraries use it too. `peer_access` holds for the whole
    process: the `Devices` that was made last decides for its devices.

    Thread-safety: every method may be called from any thread, whichever device is current there.

    Examples
    --------
    >>> from arenapy import cuda
    >>> gpus = cuda.Devices(max_bytes=8 << 20)
    >>> there = gpus.alloc(4096, device=1)
    >>> here = gpus.alloc(4096, device=0).copy_from(there)
    >>> gpus.stats().active_allocations, gpus[1].stats().active_allocations
    (2, 1)
    """

    def __init__(
        self,
        devices: Iterable[SupportsIndex] | None = None,
        max_bytes: int | None = None,
        *,
        source: Callable[[int], _Source] = Device,
        initial_bytes: int = 0,
        trim_after: float | None = None,
        on_oom: Callable[[int], Any] | None = None,
        rounding: str = "step",
        debug: bool | None = None,
        trim_thread: bool = False,
        peer_access: bool | None = None,
    ) -> None:
        if peer_access is not None and not isinstance(peer_access, bool):
            raise TypeError(f"peer_access={peer_access!r}: need True, False or None")
        if isinstance(devices, (int, str)):
            raise TypeError(f"devices={devices!r}: need ordinals, like [0, 1]")
        ordinals = _checked(range(device_count()) if devices is None else devices)
        options: dict[str, Any] = {
            "initial_bytes": initial_bytes,
            "trim_after": trim_after,
            "on_oom": on_oom,
            "rounding": rounding,
            "debug": debug,
            "trim_thread": trim_thread,
        }
        pools = {one: Pool(max_bytes, source(one), **options) for one in ordinals}
        for one, pool in pools.items():
            memory, _ = memory_of(pool)
            if (memory.kind, memory.device_id) != ("device", one):
                raise ValueError(
                    f"source({one}) gives {memory.kind} memory of device {memory.device_id}; give "
                    "cuda.Device or cuda.DriverPool, which take the ordinal"
                )
        refused = {}
        if peer_access is not False:
            for pair in ((one, other) for one in ordinals for other in ordinals if one != other):
                why = peers.why_no_access(*pair)
                if why is not None:
                    refused[pair] = why
        if peer_access and refused:
            raise CudaError(
                f"peer_access=True: {'; '.join(refused.values())}. Leave the option out, and "
                "copies between these go through pinned memory of the host"
            )
        self.pools: Mapping[int, Pool] = MappingProxyType(pools)
        self.refused: Mapping[tuple[int, int], str] = MappingProxyType(refused)
        peers.stage(ordinals, peer_access is False)

    def alloc(
        self,
        nbytes: int,
        align: int | None = None,
        *,
        device: SupportsIndex | None = None,
        stream: object = None,
    ) -> Buffer:
        """Allocate a block on a device.

        Parameters
        ----------
        nbytes, align
            Size and alignment in bytes. See `arenapy.Pool.alloc`.
        device : int, optional
            Ordinal of the device. By default, the device of `stream`, or without a stream the
            current device of this thread.
        stream : stream, optional
            The stream that will use the block. See `arenapy.Pool.alloc`.

        Returns
        -------
        Buffer

        Raises
        ------
        ValueError, TypeError
            If there is no Pool for that device, or `arenapy.Pool.alloc` raises it.
        OutOfMemory, CudaError
            If `arenapy.Pool.alloc` raises it.

        Examples
        --------
        >>> gpus = cuda.Devices()
        >>> gpus.alloc(4096, device=1).device_id
        1
        >>> gpus.alloc(4096, stream=cuda.Stream(1)).device_id
        1
        """
        if device is not None:
            pool = self[device]
        else:
            meant = device_meant(stream)
            if meant not in self.pools:
                whose = "the current device is" if stream is None else f"{stream!r} is of device"
                raise ValueError(
                    f"{whose} {meant}, and there are Pools of {sorted(self.pools)}; give device="
                )
            pool = self.pools[meant]
        return pool.alloc(nbytes, align, stream)

    def stats(self) -> PoolStats:
        """Return the sum of the figures of all Pools.

        ``devices[ordinal].stats()`` has the figures of one Pool. `peak_bytes` is the sum of the
        peaks, which the Pools had at different times. `largest_free_block` is the largest one of
        any device.

        Returns
        -------
        PoolStats

        Examples
        --------
        >>> gpus = cuda.Devices()
        >>> blocks = [gpus.alloc(1 << 20, device=i) for i in (0, 1)]
        >>> gpus.stats().allocated_bytes
        2097152
        >>> {i: pool.stats().allocated_bytes for i, pool in gpus.pools.items()}
        {0: 1048576, 1: 1048576}
        """
        return sum_of([pool.stats() for pool in self])

    def trim(self, keep_bytes: int = 0) -> int:
        """Return idle memory to the devices, and the pinned memory of copies through the host.

        Parameters
        ----------
        keep_bytes : int
            Bytes that the Pool of each device may keep.

        Returns
        -------
        int
            Bytes that were returned, on all devices together.

        Raises
        ------
        ValueError, TypeError
            If `keep_bytes` is not a size.

        Examples
        --------
        >>> gpus = cuda.Devices()
        >>> gpus.alloc(1 << 20, device=0).release()
        >>> gpus.trim() >= 1 << 20
        True
        """
        freed = sum(pool.trim(keep_bytes) for pool in self)
        peers.trim_relays()  # last: a bad keep_bytes changes nothing
        return freed

    def check(self) -> None:
        """Verify the bookkeeping of every Pool. See `arenapy.Pool.check`.

        Raises
        ------
        AssertionError
            If the bookkeeping of a Pool is broken. The message names the blocks.

        Examples
        --------
        >>> cuda.Devices().check()
        """
        for pool in self:
            pool.check()

    def __getitem__(self, device: SupportsIndex) -> Pool:
        """Return the Pool of a device."""
        ordinal = checked_index("device", device)
        try:
            return self.pools[ordinal]
        except KeyError:
            raise ValueError(
                f"device={ordinal}: there are Pools of {sorted(self.pools)} here"
            ) from None

    def __iter__(self) -> Iterator[Pool]:
        """Iterate over the Pools, in the order in which the devices were given."""
        return iter(self.pools.values())

    def __len__(self) -> int:
        return len(self.pools)

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Devices is not copied or pickled; make one in the other process")

    def __repr__(self) -> str:
        return f"<Devices {', '.join(f'{one}: {pool!r}' for one, pool in self.pools.items())}>"


def _checked(devices: Iterable[SupportsIndex]) -> list[int]:
    count, found = device_count(), []
    for device in devices:
        ordinal = checked_index("devices", device)
        if not 0 <= ordinal < count:
            raise ValueError(f"devices: {ordinal} is not a CUDA device; there are {count}")
        if ordinal in found:
            raise ValueError(f"devices: {ordinal} is given twice; a device has one Pool here")
        found.append(ordinal)
    if not found:
        raise ValueError("devices is empty; give at least one ordinal, or leave it out")
    return found
