# Call sites: where the program is, as numbers that C code can keep. One walker of frames serves
# both kinds: the site of a debug message, and the stack of a recorded allocation.
from libc.stdint cimport uint32_t

cdef extern from *:
    """
    /* May this thread call the interpreter now (has it the GIL)? */
    static inline int arenapy_attached(void) {
    #if PY_VERSION_HEX >= 0x030D0000
        return PyThreadState_GetUnchecked() != NULL;
    #elif PY_VERSION_HEX >= 0x030C0000
        return _PyThreadState_UncheckedGet() != NULL;
    #else
        PyThreadState *mine = PyGILState_GetThisThreadState();
        return mine != NULL && mine == _PyThreadState_UncheckedGet();
    #endif
    }
    """
    bint attached "arenapy_attached" () noexcept nogil

# -- sites: the innermost frames outside arenapy, with a text for good

cdef enum:
    NO_SITE = 0              # the number of no site
    SITE_IN_C = 1            # a thread that ran no Python then
    MAX_SITES = 1 << 16

# Where the running thread is. With or without the GIL, and with an exception on its way; under no
# lock of arenapy.
cdef uint32_t call_site() noexcept nogil
# The text of a site's number, NUL-terminated, valid for good.
cdef const char* site_text(uint32_t site) noexcept nogil
# " (allocated at ...)", to follow the name of a block; nothing for NO_SITE.
cdef str allocated_at(uint32_t site)


# -- stacks: what the recorder asks when an allocation is to be recorded

cdef class CallStacks:
    cdef readonly int depth  # frames of an allocation that are told apart, innermost first
    cdef dict numbers        # of stacks, by the bytes of their array of CodePoint
    cdef list codes          # of these stacks: no other code gets their addresses

    # The number of the stack that is calling, 0: none, or too many already. If it is a new one,
    # its line of text, else None. One thread at a time, which is attached.
    cdef bytes number_of_this(self, uint32_t* number)
