# The C surface of Buffer.
from arenapy.base.abi cimport ARENAPY_ABI
from cpython.object cimport PyObject

from arenapy.base.assertion cimport arenapy_assert
from arenapy.base.atomic cimport ARENAPY_GIL
from arenapy.buffer.block cimport Block, MemoryOwner, Freelist, freelist_of


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


# A View of the root of `buffer`; the caller has checked that it fits.
cdef View new_view(Buffer buffer, char* ptr, tuple shape, Py_ssize_t itemsize, object descr,
                   str typestr, bytes format, bint sealed)


cdef extern from *:
    """
    #ifndef ARENAPY_REVIVE
    #define ARENAPY_REVIVE
    /* A dead object of a static type, its type and method table in place: alive again. (What
       _Py_NewReference does more is for tracemalloc, which does not see freelists; but without a
       GIL it also makes this thread the owner of the object's count.) */
    static CYTHON_INLINE PyObject *arenapy_revive(PyObject *o) {
    #if defined(Py_REF_DEBUG) || defined(Py_TRACE_REFS) || defined(Py_GIL_DISABLED)
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


# A root from no freelist; new_block's.
cdef Buffer fresh_block(MemoryOwner owner)


# The first root of a freelist that is not empty, alive again, at ptr. The caller fills in the rest,
# before or after.
cdef inline object freelist_pop(PyObject* owner, Freelist* freelist, char* ptr):
    cdef PyObject* o = freelist.kept
    arenapy_assert(freelist.n_kept > 0, b"dead Buffers on a freelist are counted")
    arenapy_assert((<Buffer>o).hold == NULL, b"a Buffer on a freelist has no hold")
    arenapy_assert(<PyObject*>(<Buffer>o).owner == owner, b"a Buffer is on its owner's freelist")
    freelist.kept = <PyObject*>(<Buffer>o).ptr
    freelist.n_kept -= 1
    (<Buffer>o).ptr = ptr
    if not ARENAPY_GIL:
        (<Buffer>o).shard = owner = freelist.shard
    count_up(owner)
    return arenapy_revive(o)


# An open, unheld root. The caller fills in ptr, tag and pad, at once: they are not set.
cdef inline Buffer new_block(MemoryOwner owner, Py_ssize_t size):
    cdef Freelist* freelist = freelist_of(<PyObject*>owner)
    cdef Buffer b
    if freelist.kept != NULL:
        b = <Buffer>freelist_pop(<PyObject*>owner, freelist, NULL)
    else:
        b = fresh_block(owner)
    b.size = size
    b.word = 0
    return b


# An open, unheld root over a range of a region.
cdef Buffer new_range(MemoryOwner owner, char* ptr, Py_ssize_t size)


# -- moving bytes into blocks and out of them

# Copy the whole block from, or to, another object of the same size; set all its bytes.
cdef int copy_in(Block block, object source, object stream) except -1
cdef int copy_out(Block block, object target, object stream) except -1
cdef int fill_bytes(Block block, object value, object stream) except -1
# The same by this processor, at once. `inward`: from the other object.
cdef int copy_bytes(Block block, object other, bint inward) except -1
# Move n bytes (without a source: set them to `byte`) in or out of an open block.
cdef int move_bytes(Block block, char* to, const char* source, Py_ssize_t n, int byte) except -1
