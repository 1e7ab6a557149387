# The C surface of Buffer, and of Keeper, which is whatever a Buffer's bytes belong to.
from cpython.object cimport PyObject
from libc.stdint cimport uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport malloc

from arenapy.atomic cimport arenapy_lock

cdef enum:
    GONE_NOT = 0
    GONE_CLOSED = 1      # the region was closed
    GONE_FORKED = 2      # this process is a forked child and the memory stayed with the parent

    HOLD_RETIRED = 1     # outlived a reset of its frame
    HOLD_EMPTY = 2       # a 0-byte block

# One held block: a root Buffer that was ever exported. Owned by the Buffer until `ended`
# passes it to the keeper. start < end always: a 0-byte block occupies one byte.
cdef struct Hold:
    Hold* next           # in its frame's, the retired or the leased list
    Hold* prev
    Hold* ended_next     # in the keeper's list of ended holds
    uintptr_t start
    uintptr_t end
    uint64_t tag         # the Buffer's tag
    uint32_t pad         # bytes skipped before start for alignment
    uint32_t flags       # HOLD_*
    Py_ssize_t region    # the keeper's: which region it is in, once retired or leased


# What bytes belong to: a Region, or the core of an allocator. It keeps them mapped, knows
# whether an unheld Buffer is still valid, and is told when a held one ends.
cdef class Keeper:
    cdef readonly str kind
    cdef readonly int device_id          # -1: the host
    cdef readonly bint readonly
    cdef readonly bint host_accessible
    cdef readonly bint device_accessible
    cdef bint foreign                    # reaches a user's object: its Buffers join the cycle collector
    cdef bint checked                    # check() has something to check
    cdef bint may_lease                  # other processes may see bytes: ask before reuse
    cdef int gone                        # GONE_*
    cdef arenapy_lock lock
    cdef Hold* spare                     # ended holds, linked by next, for reuse; under lock

    # Called with `lock` held, but for `ended`: on any thread, without lock or GIL.
    cdef bint alive(self, Buffer root) noexcept nogil
    cdef void enlist(self, Hold* hold) noexcept nogil
    cdef void give_back(self, Buffer root) noexcept nogil
    cdef void ended(self, Hold* hold) noexcept nogil
    # For allocators' cores: the end of a region, and fork (see region.pyx).
    cdef bint has_holds(self) noexcept nogil
    cdef void disable(self, int why) noexcept nogil
    cdef void forked(self, bint unmapped) noexcept nogil
    cdef int lease_live(self, PyObject* region, int fd) noexcept nogil
    cdef int check(self) except -1
    cdef object owner_of(self)


# A root Buffer: one block. `word` is its whole state, changed as one atomic:
#   bit 0 CLOSED, bit 1 HELD (was exported), the rest: live exports in units of ONE_EXPORT.
cdef class Buffer:
    cdef char* ptr
    cdef Py_ssize_t size
    cdef uint64_t word
    cdef uint64_t tag                    # the keeper's: which frame or slot the block is in
    cdef uint32_t pad                    # the keeper's: bytes skipped before ptr
    cdef bint is_view                    # this is a View
    cdef Hold* hold                      # not NULL once HELD; ended by the dealloc
    cdef Keeper keeper                   # keeps the bytes mapped


# A slice or a typed view: shares the root's block and state, and adds a layout (C order).
cdef class View(Buffer):
    cdef Buffer root                     # keeps the block, and is what counts as held
    cdef int ndim
    cdef Py_ssize_t* dims                # ndim lengths, then ndim strides in bytes
    cdef readonly tuple shape
    cdef Py_ssize_t itemsize
    cdef object descr                    # the NumPy dtype
    cdef str typestr                     # NumPy's, e.g. "<f4"
    cdef bytes format                    # PEP 3118; None: the type has no such code
    cdef bint sealed                     # read-only although the memory is not


cdef Buffer new_root(Keeper keeper, char* ptr, Py_ssize_t size, uint64_t tag, uint32_t pad)
cdef Buffer root_of(Buffer buffer) noexcept
cdef bint is_open(Buffer buffer) noexcept
cdef int check_open(Buffer buffer) except -1
cdef bint is_readonly(Buffer buffer) noexcept
# Mark the root held and count one live export (or, with count False, only mark it).
cdef int acquire(Buffer buffer, bint count) except -1
cdef void unacquire(Buffer buffer) noexcept
# A hold for a new export, reused or allocated; lock held; NULL without memory.
cdef inline Hold* new_hold(Keeper keeper) noexcept nogil:
    cdef Hold* hold = keeper.spare
    if hold == NULL:
        return <Hold*>malloc(sizeof(Hold))
    keeper.spare = hold.next
    return hold


cdef inline void drop_hold(Keeper keeper, Hold* hold) noexcept nogil:
    hold.next = keeper.spare
    keeper.spare = hold


# For an allocator that exports at birth: link an already made hold (lock held, cannot fail).
cdef void born_held(Buffer root, Hold* hold) noexcept nogil
cdef Py_ssize_t as_size(object value, str what) except -1
cdef Py_ssize_t as_align(object value) except -1
cdef int no_stream(Keeper keeper, object stream) except -1
