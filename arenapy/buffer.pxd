# The C surface of Buffer.
from arenapy.abi cimport ARENAPY_ABI
from cpython.object cimport PyObject

from arenapy.atomic cimport ARENAPY_GIL
from arenapy.block cimport Block, Keeper


cdef enum:
    KEPT_OBJECTS = 256        # dead roots that a keeper keeps for reuse, about 30 KB


# A root Buffer is one block of an allocator, or one range of a region. It adds nothing to the
# state of a Block.
cdef class Buffer(Block):
    pass


# A slice or a typed view: shares the root's bytes and state, and adds a layout (C order).
cdef class View(Buffer):
    cdef int ndim
    cdef Py_ssize_t* dims                # ndim lengths, then ndim strides in bytes
    cdef readonly tuple shape
    cdef Py_ssize_t itemsize
    cdef object descr                    # the NumPy dtype; None: plain bytes
    cdef str typestr                     # NumPy's, e.g. "<f4"
    cdef bytes format                    # PEP 3118; None: the type has no such code


cdef extern from *:
    """
    #ifndef ARENAPY_REVIVE
    #define ARENAPY_REVIVE
    /* A dead object of a static type, its type and method table in place: alive again. (What
       _Py_NewReference does more is for tracemalloc, which does not see freelists.) */
    static CYTHON_INLINE PyObject *arenapy_revive(PyObject *o) {
    #if defined(Py_REF_DEBUG) || defined(Py_TRACE_REFS)
        _Py_NewReference(o);
    #else
        Py_SET_REFCNT(o, 1);
    #endif
        return o;
    }
    #endif
    """
    object arenapy_revive(PyObject* o)
    void count_up "Py_INCREF" (PyObject* o) noexcept


# A root not from the freelist; new_block's.
cdef Buffer fresh_block(Keeper keeper)


# An open, unheld root. The caller fills in ptr, tag and pad, at once: they are not set.
cdef inline Buffer new_block(Keeper keeper, Py_ssize_t size):
    cdef Buffer b
    cdef PyObject* o = keeper.kept
    if ARENAPY_GIL and o != NULL:
        keeper.kept = <PyObject*>(<Buffer>o).ptr
        keeper.n_kept -= 1
        count_up(<PyObject*>keeper)
        b = <Buffer>arenapy_revive(o)
    else:
        b = fresh_block(keeper)
    b.size = size
    b.word = 0
    return b


# After its keeper has taken on memory of a user's object: the collector has to see the Buffer.
cdef void track(Buffer b) noexcept


# An open, unheld root over a range of a region.
cdef Buffer new_range(Keeper keeper, char* ptr, Py_ssize_t size)
