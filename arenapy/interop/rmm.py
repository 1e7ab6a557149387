"""RMM, and cuDF through it, with arenapy's memory; and arenapy's allocators with RMM's memory.

Contents: RMM's side of a Pool, a CallbackMemoryResource, and a source over a resource of RMM. The
decision when memory is used again is the allocator's in both.
"""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from arenapy.base.text import format_bytes
from arenapy.buffer.block import StreamHooks
from arenapy.cuda import backing
from arenapy.cuda.foreign import asbuffer
from arenapy.errors import OutOfMemory
from arenapy.interop.device_pools import by_device, library
from arenapy.interop.raw_blocks import rmm_callbacks
from arenapy.memory.host_request import check_ordinal, checked_size
from arenapy.memory.region import Region
from arenapy.pool.pool import Pool

__all__ = ["Source", "resource"]

OLDEST = (24, 12)
LEGACY = 1  # the legacy default stream, for which RMM also uses 0


def resource(pool: Pool) -> Any:
    """Make an RMM memory resource of a Pool.

    Parameters
    ----------
    pool : Pool
        Over ``cuda.Device(n)`` or ``cuda.DriverPool``. The resource keeps it alive.

    Returns
    -------
    rmm.mr.CallbackMemoryResource
        For ``rmm.mr.set_current_device_resource``, or as the upstream of another resource.

    Raises
    ------
    ImportError
        If RMM is missing or too old. The message says what to install.
    TypeError, ValueError
        If `pool` is not a Pool over memory of a device.

    Notes
    -----
    Blocks are allocated and freed in the order of the streams that RMM names. RMM names a stream
    only by its number, so a block of another stream than the Pool's own costs events. A request
    that does not fit raises MemoryError with the Pool's figures. RMM calls Python functions here,
    which take the GIL. For many small allocations, put an ``rmm.mr.PoolMemoryResource`` in front.

    A DeviceBuffer keeps the resource alive. If you call ``allocate`` of the resource, keep it
    alive yourself.

    Examples
    --------
    >>> import arenapy
    >>> from arenapy import cuda
    >>> from arenapy.interop import rmm as arenapy_rmm
    >>> pool = arenapy.Pool(source=cuda.Device())
    >>> resource = arenapy_rmm.resource(pool)                              # doctest: +SKIP
    >>> rmm.mr.set_current_device_resource(resource)                       # doctest: +SKIP
    """
    by_device((pool,))
    made = library("rmm", OLDEST).mr.CallbackMemoryResource
    return made(*rmm_callbacks(pool, LEGACY))


@dataclass(frozen=True, slots=True)
class Source:
    """Memory of an RMM resource, for arenapy's allocators.

    Parameters
    ----------
    resource : rmm.mr.DeviceMemoryResource
        It has to give memory of a device, not managed or pinned memory.
    ordinal : int
        The number of the device that `resource` was made for.

    Raises
    ------
    ValueError, TypeError
        If `ordinal` is invalid, or `resource` is none.

    Notes
    -----
    An allocator takes whole regions from the resource, and gives one back when all streams of the
    device have done their work. For this, each region takes another 2 MiB of the device. The
    allocator can take a region only while no blocking stream is captured.
    Streams order the blocks, as those of ``cuda.Device``. A region keeps the resource alive. Do not
    give a resource that itself takes from the same Pool.
    Thread-safety: immutable; may be used from any thread if the resource may.

    Examples
    --------
    >>> import arenapy
    >>> from arenapy.interop import rmm as arenapy_rmm
    >>> import rmm                                                         # doctest: +SKIP
    >>> shared = rmm.mr.CudaAsyncMemoryResource()                          # doctest: +SKIP
    >>> pool = arenapy.Pool(source=arenapy_rmm.Source(shared))             # doctest: +SKIP
    """

    resource: Any
    ordinal: int = 0

    def __post_init__(self) -> None:
        """Refuse what cannot be, before anything depends on it."""
        check_ordinal(self.ordinal)
        for name in ("allocate", "deallocate"):
            if not callable(getattr(self.resource, name, None)):
                raise TypeError(
                    f"resource={self.resource!r} has no method {name!r}; give a resource of "
                    "rmm.mr, such as rmm.mr.get_current_device_resource()"
                )

    @property
    def hooks(self) -> StreamHooks:
        """Internal: what an allocator over this source asks about streams."""
        return backing.device_memory(self.ordinal)

    def region(self, nbytes: int) -> Region:
        """Allocate `nbytes` bytes of the resource.

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
            If the resource does not have so much. The message is RMM's.
        Unavailable, CudaError
            As ``cuda.Device.region``.
        ValueError, TypeError
            If `nbytes` is not a size, there is no such device, or the resource gave memory that is
            not the device's.

        Examples
        --------
        >>> arenapy_rmm.Source(shared).region(1 << 20).kind                # doctest: +SKIP
        'device'
        """
        nbytes = checked_size(nbytes)
        mr = self.resource

        def check(address: int) -> None:
            given = {"data": (address, False), "shape": (nbytes,), "typestr": "|u1", "version": 2}
            found = asbuffer(SimpleNamespace(__cuda_array_interface__=given))
            if (found.kind, found.device_id) != ("device", self.ordinal):
                where = f"{found.kind} memory of device {found.device_id}"
                raise ValueError(
                    f"RMM's {type(mr).__name__} gave {where}, and memory of device {self.ordinal} "
                    "is needed: give the resource of that device, or ordinal="
                )

        try:
            return backing.lent_region(self.hooks, nbytes, mr.allocate, mr.deallocate, check)
        except OutOfMemory:  # of the device itself
            raise
        except MemoryError as error:
            raise OutOfMemory(
                f"{format_bytes(nbytes)} of RMM's {type(mr).__name__} were refused: {error}; "
                "ask for less, or for a larger resource"
            ) from error
