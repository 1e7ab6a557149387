"""Call sites: where the program is, as numbers, and each number's meaning as text.

What lives here: walking the frames of the running thread, which both kinds of number do. A *site*
is the innermost frames outside arenapy, file and line, for debug mode: C code without the GIL keeps
its number. A *stack* is all frames up to a depth, for the recorder. What does not live here: what
was done there (ledger), when to look and where stacks are written (recorder), reading them again
(trace/format.py).

Why a stack is cheap: the walk gives an array of (code object, instruction), and the bytes of that
array are a key of a dict. Lines, functions and files are looked up once for every stack that is
new. Texts of sites are never given back, so that one may be shown at any time, from any thread. A
program has few: some for each line that allocates.

No Python code runs here, and the thread keeps the GIL: the caller may hold locks of its own. Up to
3.11 a new frame object may start the collector, which is therefore off meanwhile; later ones only
ask for it.
"""
import operator

cimport cython
from cpython.object cimport PyObject
from libc.stdint cimport intptr_t, uint32_t, uint64_t
from libc.string cimport strdup

from arenapy.base.atomic cimport arenapy_add, arenapy_finalizing, arenapy_load
from arenapy.base.dicts cimport found_in

import os

cdef extern from *:
    """
    typedef struct { PyCodeObject *code; intptr_t instruction; } arenapy_code_point;

    #if PY_VERSION_HEX < 0x030C0000
    #define COLLECTOR_OFF() PyGC_Disable()
    #define COLLECTOR_BACK(was) do { if (was) PyGC_Enable(); } while (0)
    #else
    #define COLLECTOR_OFF() 0
    #define COLLECTOR_BACK(was) (void)(was)
    #endif

    /* What imports and what runs ``python -m``: tracebacks show neither. */
    static int arenapy_is_machinery(PyObject *file) {
        const char *name;
        if (!PyUnicode_IS_COMPACT_ASCII(file)) return 0;
        name = (const char *)PyUnicode_DATA(file);
        return name[0] == '<' && (strncmp(name, "<frozen importlib", 17) == 0
                                  || strcmp(name, "<frozen runpy>") == 0);
    }

    /* The innermost frames of this thread, without those of machinery and of files whose name
       begins with `skip` (NULL: all); the frames keep their code objects. */
    static int arenapy_walk(arenapy_code_point *out, int max, PyObject *skip) {
        int n = 0, collected = COLLECTOR_OFF();
        PyFrameObject *frame = PyThreadState_GetFrame(PyThreadState_Get());
        while (frame != NULL && n < max) {
            PyFrameObject *back = PyFrame_GetBack(frame);
            PyCodeObject *code = PyFrame_GetCode(frame);
            if (!arenapy_is_machinery(code->co_filename) && (skip == NULL
                || PyUnicode_Tailmatch(code->co_filename, skip, 0, PY_SSIZE_T_MAX, -1) != 1)) {
                out[n].code = code;
                out[n].instruction = PyFrame_GetLasti(frame);
                n++;
            }
            Py_DECREF(code);
            Py_DECREF(frame);
            frame = back;
        }
        Py_XDECREF(frame);
        COLLECTOR_BACK(collected);
        return n;
    }
    """
    ctypedef struct CodePoint "arenapy_code_point":
        PyObject* code
        intptr_t instruction
    int walk_frames "arenapy_walk" (CodePoint* out, int max, PyObject* skip)
    int PyCode_Addr2Line(PyObject* code, int instruction) noexcept
    void PyErr_Fetch(PyObject** kind, PyObject** value, PyObject** trace) noexcept
    void PyErr_Restore(PyObject* kind, PyObject* value, PyObject* trace) noexcept


# ---- sites -------------------------------------------------------------------------------

cdef enum:
    SITE_FRAMES = 3          # of a site, at most
    OTHER_SITE = 2           # all sites once there are MAX_SITES

cdef char* site_texts[MAX_SITES]
cdef uint64_t n_sites = 3                # atomic
cdef dict site_numbers = {}              # by file, line and function of each frame
cdef str PACKAGE = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")

site_texts[NO_SITE] = <char*>b"an unknown place"
site_texts[SITE_IN_C] = <char*>b"C code"
site_texts[OTHER_SITE] = <char*>b"a place too many to tell"


cdef uint32_t call_site() noexcept nogil:
    cdef uint32_t site = SITE_IN_C
    if arenapy_finalizing() or not attached():
        return SITE_IN_C
    with gil:
        site = find_site()
    return site


cdef uint32_t find_site() noexcept:
    cdef PyObject* kind
    cdef PyObject* value
    cdef PyObject* trace
    cdef uint32_t site = SITE_IN_C
    PyErr_Fetch(&kind, &value, &trace)
    try:
        site = number_of_site()
    except MemoryError:
        pass
    PyErr_Restore(kind, value, trace)
    return site


cdef uint32_t number_of_site() except NO_SITE:
    cdef CodePoint[SITE_FRAMES] points
    cdef int i, n = walk_frames(points, SITE_FRAMES, <PyObject*>PACKAGE)
    cdef list found = []
    cdef object number
    for i in range(n):
        code = <object>points[i].code
        found.append((code.co_filename, line_of(&points[i]), code.co_name))
    if not found:
        return SITE_IN_C
    key = tuple(found)
    number = found_in(site_numbers, key)
    if number is None:
        if arenapy_load(&n_sites) >= MAX_SITES:
            return OTHER_SITE                # and `site_numbers` has no more, either
        number = site_numbers.setdefault(key, add_site(found))
    return number


cdef object add_site(list found):
    cdef uint64_t number
    # As a C int: the text of an int object may take a signal, whose exception would be lost here.
    lines = [f"{file}:{<int>line} in {function}" for file, line, function in found]
    text = ", called at ".join(lines).encode("utf-8", "backslashreplace")
    number = arenapy_add(&n_sites, 1)
    if number >= MAX_SITES:
        return OTHER_SITE
    site_texts[number] = strdup(text)
    return number


cdef const char* site_text(uint32_t site) noexcept nogil:
    cdef const char* text = site_texts[site] if site < MAX_SITES else NULL
    return text if text != NULL else site_texts[NO_SITE]


cdef str allocated_at(uint32_t site):
    if site == NO_SITE:
        return ""
    return f" (allocated at {(<bytes>site_text(site)).decode('utf-8', 'replace')})"


# ---- stacks ------------------------------------------------------------------------------

cdef enum:
    MAX_DEPTH = 64
    MAX_STACKS = 1 << 16     # later ones are number 0: their code would be kept for ever

#: Characters that a reader would take for the end of a name, and their replacements.
CONTROL = bytes(range(32)), b"?" * 32
TABLE = bytes.maketrans(*CONTROL)


@cython.final
@cython.no_gc
cdef class CallStacks:
    """CallStacks(depth)\n--\n
    Numbers for call stacks, up to a depth. Internal."""

    def __cinit__(self, depth):
        try:
            depth = operator.index(depth)
        except TypeError:
            raise TypeError(f"sites={depth!r}: need an int, a number of callers") from None
        if not 1 <= depth <= MAX_DEPTH:
            raise ValueError(f"sites={depth}: need a number of callers from 0 to {MAX_DEPTH}")
        self.depth = depth
        self.numbers = {}
        self.codes = []

    cdef bytes number_of_this(self, uint32_t* number):
        cdef CodePoint[MAX_DEPTH] stack
        cdef PyObject* kind = NULL
        cdef PyObject* value = NULL
        cdef PyObject* trace = NULL
        cdef bytes text = None
        cdef Py_ssize_t before
        cdef int n
        number[0] = 0
        PyErr_Fetch(&kind, &value, &trace)   # NumPy may be asking with one pending
        try:
            n = walk_frames(stack, self.depth, NULL)
            if n:
                key = (<char*>stack)[:n * sizeof(CodePoint)]
                found = found_in(self.numbers, key)
                if found is not None:
                    number[0] = <uint32_t>found
                elif len(self.numbers) < MAX_STACKS:
                    text = described(stack, n)
                    self.codes.append([<object>stack[i].code for i in range(n)])
                    # Up to 3.11 these objects may start the collector, whose finalizers may have
                    # been here before.
                    before = len(self.numbers)
                    number[0] = self.numbers.setdefault(key, before + 1)
                    if len(self.numbers) == before:
                        text = None
        except MemoryError:                  # then it is not known
            number[0], text = 0, None
        PyErr_Restore(kind, value, trace)
        return text


cdef bytes described(CodePoint* stack, int n):
    """File, line and function of each frame."""
    cdef list fields = []
    cdef int i
    for i in range(n):
        code = <object>stack[i].code
        line = f"{line_of(&stack[i])}".encode()  # as a C int, as in `add_site`
        fields += plain(code.co_filename), line, plain(code.co_qualname)
    return b"\t".join(fields) + b"\n"


cdef int line_of(CodePoint* point) noexcept:
    """0: an instruction without a line."""
    return max(PyCode_Addr2Line(point.code, <int>point.instruction), 0)


cdef bytes plain(str name):
    return name.encode("utf-8", "backslashreplace").translate(TABLE)
