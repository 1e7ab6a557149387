"""Tables: arrays of metadata that grow in place. array.pxd says what for."""
from arenapy.linux.vm cimport vm_unmap
from arenapy.linux.reserved_space cimport vm_commit, vm_reserve

cdef enum:
    PAGE = 4096


cdef bint array_open(ReservedArray* t, size_t nbytes) noexcept nogil:
    nbytes = (nbytes + PAGE - 1) & ~<size_t>(PAGE - 1)
    t.ready = 0
    t.at = <char*>vm_reserve(nbytes, PAGE)
    t.reserved = nbytes if t.at != NULL else 0
    return t.at != NULL


cdef bint array_grow(ReservedArray* t, size_t nbytes) noexcept nogil:
    nbytes = (nbytes + PAGE - 1) & ~<size_t>(PAGE - 1)
    if nbytes <= t.ready:
        return True
    if nbytes > t.reserved or vm_commit(t.at + t.ready, nbytes - t.ready) < 0:
        return False
    t.ready = nbytes
    return True


cdef void array_close(ReservedArray* t) noexcept nogil:
    if t.at != NULL:
        vm_unmap(<size_t>t.at, t.reserved)
        t.at = NULL
        t.ready = t.reserved = 0
