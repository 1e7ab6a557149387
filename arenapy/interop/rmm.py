"""RMM, and cuDF through it, with arenapy's memory.

What lives here: RMM's side, which is its CallbackMemoryResource. What does not: memory, and when it
may be used again (the pool).
"""

from typing import Any

from arenapy.buffer.buffer import Buffer
from arenapy.interop.device_pools import by_device, library
from arenapy.pool.pool import Pool

__all__ = ["resource"]

OLDEST = (24, 12)
LEGACY = 1  # the legacy default stream, for which RMM says 0, too


def resource(pool: Pool) -> Any:
    """Make an RMM memory resource of a Pool.

    Parameters
    ----------
    pool : Pool
        Over ``cuda.Device(n)`` or ``cuda.DriverPool``. The resource keeps it.

    Returns
    -------
    rmm.mr.CallbackMemoryResource
        For ``rmm.mr.set_current_device_resource``, or as the upstream of another resource.

    Raises
    ------
    ImportError
        There is no RMM, or it is too old; the message says what to install.
    TypeError, ValueError
        If `pool` is not a Pool over memory of a device.

    Notes
    -----
    Blocks are allocated and given back in the order of the streams that RMM names. RMM names a
    stream by a number alone, so a block of a stream that is not the Pool's own costs events. A
    request that does not fit raises MemoryError with the Pool's figures. RMM calls Python
    functions here, which take the GIL: for many small allocations, put an
    ``rmm.mr.PoolMemoryResource`` in front.

    A DeviceBuffer keeps the resource. Keep it yourself for an address that its ``allocate`` gave.

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
    blocks: dict[int, Buffer] = {}  # by address, all that are out

    def allocate(nbytes: int, stream: Any) -> int:
        block = pool.alloc(nbytes, stream=stream.__cuda_stream__()[1] or LEGACY)
        address = block.address
        blocks[address] = block
        return address

    def deallocate(address: int, nbytes: int, stream: Any) -> None:
        block = blocks.pop(address)
        block.release(stream.__cuda_stream__()[1] or LEGACY)

    return made(allocate, deallocate)
