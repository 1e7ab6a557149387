"""Several devices of one host: a Pool for each, behind one object.

What lives here: which device's Pool a call means, figures in sum, and whether peer access is to be
used. What does not: pools, and copies between devices (copies, peers).

Contexts and streams need no care: a Pool over a device enters that device's context for each call
of the driver, and its default stream is that device's.

Thread-safety: everything here may be called from any thread.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Protocol, SupportsIndex

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
        Their ordinals; by default all that the driver shows.
    max_bytes : int, optional
        The most that the Pool of each device reserves; by default as much as there is.
    source : callable
        ``source(ordinal)`` is where the memory of a device comes from: `Device` or `DriverPool`.
    initial_bytes, trim_after, on_oom, rounding, debug, trim_thread
        As for `arenapy.Pool`; they hold for the Pool of each device.
    peer_access : bool, optional
        Whether devices access each other's memory themselves. By default, wherever the driver
        allows it; other copies go through pinned memory of the host. True: it is an error if the
        driver does not allow it between any two of them. False: all copies between them go through
        the host.

    Attributes
    ----------
    pools : mapping of int to Pool
        The Pools, by ordinal of their device. ``devices[ordinal]`` is one of them, and iteration
        gives them all: ``arenapy.interop.torch.use(*devices)``.
    refused : mapping of (int, int) to str
        The pairs (device, other one) of which the first cannot access the memory of the second, and
        the reason. Empty if every device reaches every other one.

    Raises
    ------
    CudaError
        The driver refused; with ``peer_access=True`` also where there is none, with the reason.
    Unavailable
        There is no driver, no device or no cuda-python.
    ValueError, TypeError
        A device or an option that cannot be.
    OutOfMemory
        A device has no `initial_bytes` free.

    Notes
    -----
    The driver is asked for peer access once for each pair, and access stays enabled until the
    process ends, since other libraries use it too. Whether copies use it is the process's: the
    `Devices` made last decides for its devices.

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
            As for `arenapy.Pool.alloc`.
        device : int, optional
            Ordinal of the device; by default the one of `stream`, or, without a stream, the one
            that is current in this thread.
        stream
            As for `arenapy.Pool.alloc`.

        Returns
        -------
        Buffer

        Raises
        ------
        ValueError, TypeError
            There is no Pool of that device; else as `arenapy.Pool.alloc`.
        OutOfMemory, CudaError
            As `arenapy.Pool.alloc`.

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
        """Figures of all Pools in sum; ``devices[ordinal].stats()`` has those of one.

        `peak_bytes` is the sum of the peaks, which the Pools had at different times, and
        `largest_free_block` is that of any device.

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
        """Give idle memory back to the devices, and pinned memory that copies went through.

        Parameters
        ----------
        keep_bytes : int
            How much the Pool of each device may keep.

        Returns
        -------
        int
            Bytes that were given back on all devices.

        Raises
        ------
        ValueError, TypeError
            `keep_bytes` is no size.

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
        """Verify the bookkeeping of every Pool, as `arenapy.Pool.check`.

        Raises
        ------
        AssertionError
            It is broken; the message names the blocks.

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

    def __repr__(self) -> str:
        return f"<Devices {', '.join(f'{one}: {pool!r}' for one, pool in self.pools.items())}>"


def _checked(devices: Iterable[SupportsIndex]) -> list[int]:
    count, found = device_count(), []
    for device in devices:
        ordinal = checked_index("devices", device)
        if not 0 <= ordinal < count:
            raise ValueError(f"devices: {ordinal} is no CUDA device; there are {count}")
        if ordinal in found:
            raise ValueError(f"devices: {ordinal} is given twice; a device has one Pool here")
        found.append(ordinal)
    if not found:
        raise ValueError("devices is empty; give at least one ordinal, or leave it out")
    return found
