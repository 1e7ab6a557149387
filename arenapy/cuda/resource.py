"""arenapy's memory for cuda.core: an allocator as a ``MemoryResource`` of it.

What lives here: the facade. What does not: memory, and when it may be used again (the allocator).

A Buffer of cuda.core keeps its resource. A resource that kept those Buffers would live for ever
with them, so this one keeps arenapy's own, by address, which know nothing of it.
"""

import importlib
from typing import Any

from arenapy.allocator.allocator import Allocator
from arenapy.buffer.buffer import Buffer
from arenapy.cuda.errors import Unavailable
from arenapy.cuda.ordering import give_back, hold, memory_of

__all__ = ["memory_resource"]


def memory_resource(allocator: Allocator) -> Any:
    """Let cuda.core allocate from a Bump, Slab or Pool.

    Parameters
    ----------
    allocator : Bump, Slab or Pool
        An allocator over any source. With a source of arenapy.cuda, blocks are allocated and
        released in the order of the streams that cuda.core names. With other sources, blocks are
        host memory, and streams do not matter.

    Returns
    -------
    cuda.core.MemoryResource
        ``Device.set_current``, ``Buffer`` and the rest of cuda.core accept it.
        It keeps the allocator alive.

    Raises
    ------
    Unavailable
        If there is no cuda.core. The message says what to install.
    TypeError
        If `allocator` is not an allocator.

    Notes
    -----
    A block of cuda.core counts as held: a reset of a Bump keeps it, and its region cannot be
    closed. `allocate` raises the errors of ``allocator.alloc``: OutOfMemory, and CudaError on a
    stream that is being captured. Thread-safety: that of the allocator.

    Examples
    --------
    >>> import arenapy
    >>> from arenapy import cuda
    >>> pool = arenapy.Pool(source=cuda.Device())
    >>> resource = cuda.memory_resource(pool)                # doctest: +SKIP
    >>> buffer = resource.allocate(1 << 20, stream=stream)   # doctest: +SKIP
    """
    if not isinstance(allocator, Allocator):
        raise TypeError(f"{allocator!r} is not an allocator; give a Bump, Slab or Pool")
    try:
        core = importlib.import_module("cuda.core")
        base, handed_out = core.MemoryResource, core.Buffer
    except (ImportError, AttributeError) as error:
        raise Unavailable(
            "memory_resource needs cuda.core 1.2 or later, which is not installed: "
            "pip install 'cuda-core>=1.2'"
        ) from error
    if base not in _classes:
        _classes[base] = type("ArenapyMemoryResource", (_Resource, base), {"__module__": __name__})
    return _classes[base](allocator, handed_out)


_classes: dict[type, Any] = {}  # on top of cuda.core's base class, of which tests have others


class _Resource:
    """What `memory_resource` gives, on top of cuda.core's base class."""

    def __init__(self, allocator: Any, handed_out: Any) -> None:
        self._allocator = allocator
        self._handed_out = handed_out  # cuda.core.Buffer
        self._blocks: dict[int, Buffer] = {}  # by address, all that are out
        self._memory, self._streams = memory_of(allocator)

    def allocate(self, size: int, *, stream: Any) -> Any:
        """A cuda.core Buffer of `size` bytes, for `stream`."""
        block = self._allocator.alloc(size, stream=stream if self._streams else None)
        address = block.address
        hold(block)  # or a reset of a Bump would hand the bytes out again
        self._blocks[address] = block
        try:
            return self._handed_out.from_handle(address, size, mr=self, stream=stream)
        except BaseException:
            self._blocks.pop(address, None)  # its cuda.core Buffer may have given it back
            raise

    def deallocate(self, ptr: Any, size: int, *, stream: Any) -> None:
        """Give a block back, once `stream` has done what it was given by then."""
        block = self._blocks.pop(int(ptr), None)
        if block is None:
            raise ValueError(f"{int(ptr):#x} is not a block of {self._allocator!r} (any more)")
        try:
            if self._streams:
                give_back(block, stream)
            else:
                block.release()
        except BaseException:
            self._blocks[int(ptr)] = block  # for good: nobody can tell what `stream` still does
            raise

    @property
    def is_device_accessible(self) -> bool:
        """Do kernels see the memory?"""
        return self._memory.device_accessible

    @property
    def is_host_accessible(self) -> bool:
        """Does this processor?"""
        return self._memory.host_accessible

    @property
    def is_managed(self) -> bool:
        """Does it move between both?"""
        return self._memory.kind == "managed"

    @property
    def device_id(self) -> int:
        """Ordinal of the device that it is on; -1: the host."""
        return self._memory.device_id
