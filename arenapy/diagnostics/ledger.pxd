# The C surface of the ledger of debug mode: which bytes belong to which block, and where that was
# allocated and given back.
from libc.stdint cimport uint32_t, uintptr_t

from arenapy.base.atomic cimport arenapy_spin

cdef enum:
    FREED_BYTE = 0xDB        # what given-back memory is filled with
    MAX_DAMAGES = 16         # that wait to be raised; later ones are dropped

# Bytes of one block: live, given back, or (filled) free.
cdef struct Stretch:
    uintptr_t start, end     # disjoint from all others
    uintptr_t block          # where the block began, and the bytes that were asked for
    size_t nbytes
    uint32_t born            # places
    uint32_t gone            # NO_SITE: it is live
    bint filled              # nobody has it, and all of it reads as FREED_BYTE

# A write after free.
cdef struct Damage:
    Stretch of
    uintptr_t first          # damaged byte, and how many there are
    size_t count
    unsigned char reads      # what the first one is now
    bint told                # on stderr


cdef class Ledger:
    cdef arenapy_spin lock           # guards all below; nothing is called under it
    cdef Stretch* items              # by address
    cdef Py_ssize_t n, capacity
    cdef Damage[MAX_DAMAGES] found
    cdef Py_ssize_t n_found
    cdef uint32_t place              # of a reset that is under way
    cdef bint over                   # the allocator is gone, or its memory: nothing is handed out
    cdef Py_ssize_t n_looking        # threads that read or fill memory without the lock
    cdef readonly str what           # "pool", "slab" or "arena"; in C:
    cdef const char* name
    cdef bytes spelled               # keeps it
    cdef readonly object allocator   # weakref to what the user holds, once it is whole
    cdef readonly int process        # that made it
    cdef object __weakref__

    # All of these without the GIL or with it. A block of nbytes has [start, end) now; what was free
    # of it is looked at first.
    cdef void begin(
        self, uintptr_t start, uintptr_t end, size_t nbytes, uint32_t born) noexcept nogil
    # The block that begins there has been given back. False: no live one does.
    cdef bint leave(self, uintptr_t block, uint32_t gone) noexcept nogil
    # [start, end) is free, and is filled if `fill`.
    cdef void end(self, uintptr_t start, uintptr_t end, bint fill) noexcept nogil
    # It is not ours any more.
    cdef void forget(self, uintptr_t start, uintptr_t end) noexcept nogil
    # The memory is about to go: from now on nothing here reads or fills it.
    cdef void close(self) noexcept nogil
    # Look at all that is free of [start, end), and fill again what was damaged.
    cdef void scan(self, uintptr_t start, uintptr_t end) noexcept nogil
    # Where the live block that begins there was allocated; NO_SITE: there is none.
    cdef uint32_t born_at(self, uintptr_t block) noexcept nogil
    # Say on stderr what was found; why `call` of an address was refused.
    cdef void tell(self) noexcept nogil
    cdef void refuse(self, const char* call, uintptr_t at) noexcept nogil
    # The oldest of what was found, which is then forgotten; None: nothing.
    cdef str take_damage(self)
    # internal
    cdef bint look(self) noexcept nogil
    cdef void have_looked(self) noexcept nogil
    cdef Py_ssize_t first(self, uintptr_t at) noexcept nogil
    cdef Py_ssize_t split(self, uintptr_t at) noexcept nogil
    cdef void insert(self, Py_ssize_t i, Stretch stretch) noexcept nogil
    cdef void remove(self, Py_ssize_t i, Py_ssize_t j) noexcept nogil
    cdef void note(self, Damage* damage) noexcept nogil
