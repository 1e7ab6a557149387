"""arenapy's memory for cuda.core: an allocator as a ``MemoryResource`` of it.

Contents: the facade. The memory, and the decision when it is used again, are the allocator's.

A Buffer of cuda.core keeps its resource. If the resource kept those Buffers, neither would ever be
freed. So it keeps arenapy's own Buffers, by address, which do not know it.
"""
cimport cython

from arenapy.allocator.allocator cimport Allocator
from arenapy.allocator.allocator_core cimport AllocatorCore
from arenapy.base.atomic cimport arenapy_count
from arenapy.base.dicts cimport found_in
from arenapy.base.sealed cimport seal
from arenapy.buffer.block cimport Block, acquire
from arenapy.buffer.buffer cimport Buffer
from arenapy.bump.bump cimport Bump
from arenapy.cuda.ordering cimport give_back
from arenapy.pool.pool cimport Pool
from cpython.object cimport PyObject
from libc.stdint cimport uintptr_t

import importlib

from arenapy.cuda.errors import Unavailable

__all__ = ["memory_resource"]

cdef extern from "Python.h":
    object PyObject_Vectorcall(object function, PyObject** given, size_t n, object names)

cdef tuple STREAM = ("stream",)


def memory_resource(allocator):
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
        cuda.core accepts it like its own memory resources. It keeps the allocator alive.

    Raises
    ------
    Unavailable
        If there is no cuda.core. The message says what to install.
    TypeError
        If `allocator` is not an allocator.

    Notes
    -----
    A block of cuda.core counts as held: a reset of a Bump keeps it, and its region cannot be
    closed. `allocate` raises the errors of ``allocator.alloc``. On a stream that is being captured,
    the block belongs to the graph. Thread-safety: that of the allocator.

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
        base, from_handle = core.MemoryResource, core.Buffer.from_handle
    except (ImportError, AttributeError) as error:
        raise Unavailable(
            "memory_resource needs cuda.core 1.2 or later, which is not installed: "
            "pip install 'cuda-core>=1.2'"
        ) from error
    if base not in _classes:
        _classes[base] = type("ArenapyMemoryResource", (_Resource, base), {"__module__": __name__})
    made = _classes[base]()
    made._out = new_handed_out(<Allocator>allocator, from_handle)
    made._blocks = (<HandedOut>made._out).blocks     # for tests
    return made


_classes = {}  # by cuda.core's base class; tests have others


@cython.final
cdef class HandedOut:
    """The blocks that cuda.core has. Internal."""
    cdef Allocator allocator
    cdef AllocatorCore memory
    cdef object from_handle              # of cuda.core's Buffer
    cdef dict blocks                     # Buffers, by address
    cdef bint streams                    # the memory is ordered by streams

    cdef object allocate(self, object size, object stream, object resource):
        cdef Buffer block
        cdef PyObject* given[5]
        cdef object address, named = stream if self.streams else None
        if isinstance(self.allocator, Pool):
            block = (<Pool>self.allocator).general_alloc(size, None, named)
        else:
            block = self.allocator.alloc(size, stream=named)
        address = <uintptr_t>(<Block>block).ptr
        # No reset of a Bump and no closed region may take its bytes. Other allocators have no
        # resets, and a block that is held takes longer to release. So it is merely counted there.
        if isinstance(self.allocator, Bump):
            acquire(block, False)
        else:
            arenapy_count(&(<Block>block).owner.n_held, 1)
        self.blocks[address] = block
        try:
            # from_handle(address, size, resource, None, stream=stream); no new tuple of names
            given = [<PyObject*>address, <PyObject*>size, <PyObject*>resource, <PyObject*>None,
                     <PyObject*>stream]
            return PyObject_Vectorcall(self.from_handle, given, 4, STREAM)
        except BaseException:
            # Else it has given the block back, and another call may have it.
            if found_in(self.blocks, address) is block:
                del self.blocks[address]
                self.uncount(block)
            raise

    cdef int uncount(self, Block block) except -1:
        if not isinstance(self.allocator, Bump):
            arenapy_count(&block.owner.n_held, -1)
        return 0

    cdef int deallocate(self, object address, object stream) except -1:
        cdef Buffer block = self.blocks.pop(address, None)
        if block is None:
            raise ValueError(f"{address:#x} is not a block of {self.allocator!r} (any more)")
        try:
            if self.streams:
                give_back(block, stream)
            else:
                block.release()
        except BaseException:
            self.blocks[address] = block     # for good: nobody knows the rest of the stream's work
            raise
        return self.uncount(block)


seal(HandedOut)


cdef HandedOut new_handed_out(Allocator allocator, object from_handle):
    cdef HandedOut made = HandedOut.__new__(HandedOut)
    made.allocator, made.memory, made.from_handle = allocator, allocator.base, from_handle
    made.blocks = {}
    made.streams = made.memory.hooks is not None
    return made


class _Resource:
    """Methods that `memory_resource` adds to cuda.core's base class."""

    def allocate(self, size, *, stream):
        """Return a cuda.core Buffer of `size` bytes for `stream`."""
        return (<HandedOut>self._out).allocate(size, stream, self)

    def deallocate(self, ptr, size, *, stream):
        """Free a block when `stream` has done all work that it has been given so far."""
        address = ptr if type(ptr) is int else int(ptr)
        (<HandedOut>self._out).deallocate(address, stream)

    @property
    def is_device_accessible(self):
        """Whether kernels can access the memory."""
        return (<HandedOut>self._out).memory.device_accessible

    @property
    def is_host_accessible(self):
        """Whether the host can access the memory."""
        return (<HandedOut>self._out).memory.host_accessible

    @property
    def is_managed(self):
        """Whether the memory moves between host and device."""
        return (<HandedOut>self._out).memory.kind == "managed"

    @property
    def device_id(self):
        """Ordinal of the device of the memory; -1 for the host."""
        return (<HandedOut>self._out).memory.device_id
