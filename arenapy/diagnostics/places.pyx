"""Places: where a program is, as a number that C code without the GIL can keep.

What lives here: walking the frames of the running thread, and a text for each place that was found.
What does not: what was done there (ledger).

A place is the innermost frames outside arenapy, file and line. Each is found once and then has its
number; numbers and texts are never given back, so that one may be shown at any time, from any
thread. A program has few: some per line that allocates.
"""
from cpython.object cimport PyObject
from libc.stdint cimport uint32_t, uint64_t
from libc.string cimport strdup

import os

from arenapy.base.atomic cimport arenapy_add, arenapy_finalizing, arenapy_load

cdef extern from *:
    """
    /* Does this thread run Python now (has it the GIL)? */
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
    bint arenapy_attached() noexcept nogil

cdef extern from "Python.h":
    PyObject* PyEval_GetFrame() noexcept
    void PyErr_Fetch(PyObject** kind, PyObject** value, PyObject** trace) noexcept
    void PyErr_Restore(PyObject* kind, PyObject* value, PyObject* trace) noexcept

cdef enum:
    FRAMES = 3               # of a place, at most
    ELSEWHERE = 2            # all places once there are MOST_PLACES

cdef char* texts[MOST_PLACES]
cdef uint64_t n_places = 3               # atomic
cdef dict numbers = {}                   # by file, line and function of each frame
cdef str PACKAGE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "")

texts[NOWHERE] = <char*>b"an unknown place"
texts[IN_C] = <char*>b"C code"
texts[ELSEWHERE] = <char*>b"a place too many to tell"


cdef uint32_t here() noexcept nogil:
    cdef uint32_t place = IN_C
    if arenapy_finalizing() or not arenapy_attached():
        return IN_C
    with gil:
        place = find()
    return place


cdef uint32_t find() noexcept:
    cdef PyObject* kind
    cdef PyObject* value
    cdef PyObject* trace
    cdef uint32_t place = IN_C
    PyErr_Fetch(&kind, &value, &trace)
    try:
        place = walk()
    except MemoryError:
        pass
    PyErr_Restore(kind, value, trace)
    return place


cdef uint32_t walk() except NOWHERE:
    cdef list found = []
    cdef PyObject* running = PyEval_GetFrame()
    cdef object frame = <object>running if running != NULL else None
    cdef object number
    while frame is not None and len(found) < FRAMES:
        code = frame.f_code
        if not code.co_filename.startswith(PACKAGE):
            found.append((code.co_filename, frame.f_lineno, code.co_name))
        frame = frame.f_back
    if not found:
        return IN_C
    key = tuple(found)
    number = numbers.get(key)
    if number is None:
        if arenapy_load(&n_places) >= MOST_PLACES:
            return ELSEWHERE                 # and `numbers` has no more, either
        number = numbers.setdefault(key, add(found))
    return number


cdef object add(list found):
    cdef uint64_t number
    lines = [f"{file}:{line} in {function}" for file, line, function in found]
    text = ", called at ".join(lines).encode("utf-8", "backslashreplace")
    number = arenapy_add(&n_places, 1)
    if number >= MOST_PLACES:
        return ELSEWHERE
    texts[number] = strdup(text)
    return number


cdef const char* text_of(uint32_t place) noexcept nogil:
    cdef const char* text = texts[place] if place < MOST_PLACES else NULL
    return text if text != NULL else texts[NOWHERE]


cdef str said(uint32_t place):
    if place == NOWHERE:
        return ""
    return f" (allocated at {(<bytes>text_of(place)).decode('utf-8', 'replace')})"
