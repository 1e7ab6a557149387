# What tells objects that live apart.
from libc.stdint cimport uintptr_t


cdef inline object id_of(object one):
    """Its `id()`, without the audit event, for which a user's hook may run any code."""
    return <uintptr_t><void*>one
