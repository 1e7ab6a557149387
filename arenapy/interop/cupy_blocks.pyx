"""A Pool's blocks as CuPy's memory, on CuPy's current stream.

What lives here: the allocator that CuPy calls for each array. What does not: its public functions
(cupy), and when a block may be used again (pool).

An array's memory is CuPy's own UnownedMemory, whose owner is a Buffer, so an array that ends drops
its Buffer. Making the two objects by calling their classes would take half the time of
`cupy.empty`. So their fields are set here, if they are where this file expects them: `fields_known`
compares them with those of objects that CuPy made.

CuPy's current stream comes from the C functions that CuPy's own modules call.
"""
cimport cython
from cpython.object cimport PyObject
from cpython.pycapsule cimport PyCapsule_GetName, PyCapsule_GetPointer
from libc.stdint cimport intptr_t

from arenapy.base.atomic cimport arenapy_count
from arenapy.base.dicts cimport found_in
from arenapy.base.sealed cimport seal
from arenapy.buffer.buffer cimport Buffer
from arenapy.cuda.stream_ref cimport StreamRef
from arenapy.pool.pool cimport Pool

import gc
import importlib

from arenapy.errors import OutOfMemory

cdef extern from "Python.h":
    void count_up "Py_INCREF" (PyObject* o) noexcept
    void count_down "Py_DECREF" (PyObject* o) noexcept

cdef extern from *:
    """
    struct arenapy_cupy_memory {             /* UnownedMemory */
        PyObject_HEAD
        intptr_t ptr;
        size_t size;
        int device_id;
        PyObject *owner;
    };
    struct arenapy_cupy_pointer {            /* MemoryPointer */
        PyObject_HEAD
        void *functions;
        intptr_t ptr;
        int device_id;
        PyObject *mem;
    };
    #define arenapy_new(type, nothing) \\
        ((PyTypeObject *)(type))->tp_new((PyTypeObject *)(type), nothing, NULL)
    #define arenapy_object_bytes(type) (((PyTypeObject *)(type))->tp_basicsize)
    """
    cdef struct CupyMemory "arenapy_cupy_memory":
        intptr_t ptr
        size_t size
        int device_id
        PyObject* owner

    cdef struct CupyPointer "arenapy_cupy_pointer":
        intptr_t ptr
        int device_id
        PyObject* mem

    object new_object "arenapy_new" (object type, object nothing)
    Py_ssize_t object_bytes "arenapy_object_bytes" (object type) noexcept

ctypedef intptr_t (*StreamFunction)() except? -1
ctypedef int (*DeviceFunction)(int) except? -1

cdef enum:
    LEGACY = 1               # the legacy default stream, for which CuPy says 0
    PER_THREAD = 2           # the calling thread's
    MAX_KEPT = 4             # streams that are found without a question

cdef StreamFunction current_stream = NULL
cdef DeviceFunction current_device = NULL
cdef object memory_type, pointer_type, out_of_memory, stream_object
cdef bint fields_known = False
cdef tuple nothing = ()
cdef list used = []          # Pools that have given arrays memory; the process keeps them


cdef void* c_function(str module, str name, bytes signature) except NULL:
    capsule = importlib.import_module(module).__pyx_capi__[name]
    if PyCapsule_GetName(capsule) != signature:
        raise LookupError(f"{module}.{name} is {PyCapsule_GetName(capsule).decode()}")
    return PyCapsule_GetPointer(capsule, signature)


def connect():
    """Find what is needed of CuPy; LookupError: it does not have it."""
    global current_stream, current_device, memory_type, pointer_type, out_of_memory, stream_object
    global fields_known
    memory = importlib.import_module("cupy.cuda.memory")
    memory_type, pointer_type = memory.UnownedMemory, memory.MemoryPointer
    out_of_memory = memory.OutOfMemoryError
    stream_object = importlib.import_module("cupy.cuda.stream").get_current_stream
    current_device = <DeviceFunction>c_function(
        "cupy_backends.cuda.api.runtime", "getDevice", b"int (int __pyx_skip_dispatch)")
    current_stream = <StreamFunction>c_function(
        "cupy_backends.cuda.stream", "get_current_stream_ptr", b"intptr_t (void)")
    fields_known = look_at_fields()


cdef bint look_at_fields() except -1:
    owner = object()
    memory = memory_type(0x1230, 77, owner, 5)
    pointer = pointer_type(memory, 0x10)
    cdef CupyMemory* m = <CupyMemory*><PyObject*>memory
    cdef CupyPointer* p = <CupyPointer*><PyObject*>pointer
    return (object_bytes(memory_type) == sizeof(CupyMemory)
            and object_bytes(pointer_type) == sizeof(CupyPointer)
            and m.ptr == 0x1230 and m.size == 77 and m.device_id == 5
            and m.owner == <PyObject*>owner
            and p.ptr == 0x1240 and p.device_id == 5 and p.mem == <PyObject*>memory)


def knows_fields(known=None):
    """Are CuPy's objects made here? A test may forbid it."""
    global fields_known
    if known is not None:
        fields_known = known and look_at_fields()
    return fields_known


cdef object pointer_to(Buffer block, int device):
    cdef CupyMemory* m
    cdef CupyPointer* p
    cdef intptr_t ptr = <intptr_t>block.ptr if block.size else 0
    if not fields_known:
        return pointer_type(memory_type(ptr, block.size, block, device), 0)
    memory = new_object(memory_type, nothing)
    m = <CupyMemory*><PyObject*>memory
    m.ptr, m.size, m.device_id = ptr, block.size, device
    put(&m.owner, block)
    pointer = new_object(pointer_type, nothing)
    p = <CupyPointer*><PyObject*>pointer
    p.ptr, p.device_id = ptr, device
    put(&p.mem, memory)
    return pointer


cdef inline void put(PyObject** field, object value) noexcept:
    cdef PyObject* before = field[0]
    count_up(<PyObject*>value)
    field[0] = <PyObject*>value
    count_down(before)                       # None


@cython.final
cdef class Kept:
    """A stream of CuPy's that keeps its handle."""
    cdef intptr_t handle
    cdef object stream


seal(Kept)


@cython.final
cdef class Allocator:
    """CuPy's allocator of memory of Pools, one for each device.

    Its figures are those of the current device's Pool, as those of ``cupy.cuda.MemoryPool`` are.
    """
    cdef readonly dict pools                 # by ordinal of the device
    cdef Pool first
    cdef int first_device
    cdef list kept                           # replaced, and never changed

    def __call__(self, size):
        """Memory of `size` bytes, as CuPy wants it, for the current device and stream."""
        cdef int device = current_device(0)
        cdef intptr_t handle = current_stream()
        cdef Pool pool = self.first if device == self.first_device else self.pool_of(device)
        block = None
        if handle <= LEGACY and (<StreamRef>pool.core.hooks.own).handle == <void*>LEGACY:
            block = pool.usual_alloc(size)
            if block is None:
                block = self.general(pool, size, None)
        else:
            block = self.general(pool, size, self.stream_of(handle, pool))
        return pointer_to(<Buffer>block, device)

    malloc = __call__

    cdef Pool pool_of(self, int device):
        pool = found_in(self.pools, device)
        if pool is None:
            raise RuntimeError(
                f"CuPy's current device is {device}, and no pool was given for it, only for "
                f"{sorted(self.pools)}; give one for each device that the program uses"
            )
        return <Pool>pool

    cdef object stream_of(self, intptr_t handle, Pool pool):
        """The stream argument that stands for CuPy's current stream."""
        cdef Kept one
        cdef StreamRef named
        cdef list kept
        with cython.critical_section(self):
            kept = self.kept
        for one in kept:
            if one.handle == handle:
                return one.stream
        if 0 <= handle <= PER_THREAD:
            return max(handle, LEGACY)
        stream = stream_object()
        named = <StreamRef>pool.core.hooks.named(stream)
        if named.lasting and named.owner is stream:
            one = Kept.__new__(Kept)
            one.handle, one.stream = handle, stream
            with cython.critical_section(self):
                self.kept = [one, *self.kept[:MAX_KEPT - 1]]
        return stream

    cdef object general(self, Pool pool, object size, object stream):
        try:
            return pool.general_alloc(size, None, stream)
        except OutOfMemory:
            gc.collect()                     # arrays may be in cycles; CuPy's own pool does so
        try:
            return pool.general_alloc(size, None, stream)
        except OutOfMemory as error:
            told = out_of_memory(size, pool.stats().reserved_bytes, pool.max_bytes or 0)
            told.args = (str(error),)
            raise told from error

    # -- what CuPy's MemoryPool has

    cdef Pool current(self):
        return self.pool_of(current_device(0))

    def used_bytes(self):
        """Bytes of the arrays that there are, and of those that streams still work on."""
        stats = self.current().stats()
        return stats.allocated_bytes + stats.pending_bytes

    def total_bytes(self):
        """Bytes that the Pool has of its device."""
        return self.current().stats().reserved_bytes

    def free_bytes(self):
        """Bytes that it has, and no array."""
        return self.total_bytes() - self.used_bytes()

    def n_free_blocks(self):
        """Ranges of idle pages."""
        return sum([block.state == "idle" for block in self.current().blocks()])

    def free_all_blocks(self, stream=None):
        """Give the device back what is idle. `stream` is not looked at."""
        self.current().trim()

    def get_limit(self):
        """The Pool's max_bytes; 0: none."""
        return self.current().max_bytes or 0

    def set_limit(self, size=None, fraction=None):
        """Refused: the limit of a Pool does not change."""
        raise RuntimeError(
            f"the limit of {self.current()!r} cannot be changed; make it with "
            "arenapy.Pool(max_bytes=...)"
        )


seal(Allocator, "an Allocator of CuPy's memory is made by arenapy.interop.cupy.allocator")


@cython.final
cdef class PinnedMemory:
    """Pinned memory as CuPy uses it: an address, a size, and an object that keeps the block."""
    cdef readonly Buffer block
    cdef readonly intptr_t ptr
    cdef readonly Py_ssize_t size


seal(PinnedMemory)


@cython.final
cdef class PinnedAllocator:
    """CuPy's allocator of pinned memory of a Pool."""
    cdef Pool pool
    cdef object pointer_type                 # CuPy's PinnedMemoryPointer

    def __call__(self, size):
        """Memory of `size` bytes, as CuPy wants it."""
        cdef PinnedMemory memory = PinnedMemory.__new__(PinnedMemory)
        block = self.pool.usual_alloc(size)
        if block is None:
            block = self.pool.general_alloc(size, None, None)
        memory.block = <Buffer>block
        memory.size = memory.block.size
        memory.ptr = <intptr_t>memory.block.ptr if memory.size else 0
        return self.pointer_type(memory, 0)


seal(PinnedAllocator, "it is made by arenapy.interop.cupy.pinned_allocator")


def pinned_allocator_of(Pool pool not None, pointer_type):
    """The allocator of a Pool of pinned memory, which keeps the Pool."""
    cdef PinnedAllocator made = PinnedAllocator.__new__(PinnedAllocator)
    made.pool, made.pointer_type = pool, pointer_type
    return made


def allocator_of(dict pools not None):
    """The Allocator of these Pools, by the ordinal of their device; after `connect`."""
    cdef Allocator made = Allocator.__new__(Allocator)
    cdef Pool pool
    for pool in pools.values():
        if not any([pool is one for one in used]):
            # Regions stay open, whatever happens to the Pool: CuPy knows addresses.
            arenapy_count(&pool.core.n_held, 1)
            used.append(pool)
    made.pools, made.kept = pools, []
    made.first_device, made.first = next(iter(pools.items()))
    return made
