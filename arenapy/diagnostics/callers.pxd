# The C surface of allocation sites: what the recorder asks when an allocation is to be recorded.
from libc.stdint cimport uint32_t

cdef extern from *:
    """
    /* Does this thread run Python code's side of things: may it call the interpreter? */
    static inline int arenapy_attached(void) {
    #if PY_VERSION_HEX >= 0x030D0000
        return PyThreadState_GetUnchecked() != NULL;
    #elif PY_VERSION_HEX >= 0x030C0000
        return _PyThreadState_UncheckedGet() != NULL;
    #else
        return PyGILState_Check();
    #endif
    }
    """
    bint attached "arenapy_attached" () noexcept nogil


cdef class Callers:
    cdef readonly int depth  # callers of an allocation that are told apart, innermost first
    cdef dict numbers        # of stacks, by the bytes of their Callers
    cdef list codes          # of these stacks: no other code gets their addresses

    # The number of the stack that is calling, 0: none, or too many already. If it is a new one,
    # its line of text, else None. One thread at a time, which is attached.
    cdef bytes look(self, uint32_t* number)
