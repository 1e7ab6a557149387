"""RMM, and cuDF through it, with arenapy's memory.

Contents: RMM's side, a CallbackMemoryResource. The memory, and the decision when it is used again,
are the Pool's.
"""

from typing import Any

from arenapy.buffer.buffer import Buffer
from arenapy.interop.device_pools import by_device, library
from arenapy.pool.pool import Pool

__all__ = ["resource"]

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
    blocks: dict[int, Buffer] = {}  # the live blocks, by address

    def allocate(nbytes: int, stream: Any) -> int:
        block = pool.alloc(nbytes, stream=stream.__cuda_stream__()[1] or LEGACY)
        address = block.address
        blocks[address] = block
        return address

    def deallocate(address: int, nbytes: int, stream: Any) -> None:
        block = blocks.pop(address)
        block.release(stream.__cuda_stream__()[1] or LEGACY)

    return made(allocate, deallocate)
