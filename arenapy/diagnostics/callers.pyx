"""Callers: which Python code asked for memory, as numbers, and each number's meaning as text.

What lives here: looking at the call stack of this moment. What does not: when to look, and where
numbers and texts are written (recorder.pyx), reading them again (trace/format.py).

Why it is cheap: a stack is an array of (code object, instruction), and the bytes of that array are
a key of a dict. Lines, functions and files are looked up once for every stack that is new.

No Python code runs here, and the thread keeps the GIL: the caller may hold locks of its own. Up to
3.11 a new frame object may start the collector, which is therefore off meanwhile; later ones only
ask for it.
"""
import operator

cimport cython
from cpython.object cimport PyObject
from libc.stdint cimport intptr_t, uint32_t

cdef extern from *:
    """
    typedef struct { PyCodeObject *code; intptr_t instruction; } arenapy_caller;

    #if PY_VERSION_HEX < 0x030C0000
    #define COLLECTOR_OFF() PyGC_Disable()
    #define COLLECTOR_BACK(was) do { if (was) PyGC_Enable(); } while (0)
    #else
    #define COLLECTOR_OFF() 0
    #define COLLECTOR_BACK(was) (void)(was)
    #endif

    /* The innermost frames of this thread; the frames keep their code objects. */
    static int arenapy_stack(arenapy_caller *out, int most) {
        int n = 0, collected = COLLECTOR_OFF();
        PyFrameObject *frame = PyThreadState_GetFrame(PyThreadState_Get());
        while (frame != NULL && n < most) {
            PyFrameObject *back = PyFrame_GetBack(frame);
            out[n].code = PyFrame_GetCode(frame);
            out[n].instruction = PyFrame_GetLasti(frame);
            Py_DECREF(out[n].code);
            n++;
            Py_DECREF(frame);
            frame = back;
        }
        Py_XDECREF(frame);
        COLLECTOR_BACK(collected);
        return n;
    }
    """
    ctypedef struct Caller "arenapy_caller":
        PyObject* code
        intptr_t instruction
    int stack_of_callers "arenapy_stack" (Caller* out, int most)
    int PyCode_Addr2Line(PyObject* code, int instruction) noexcept
    void PyErr_Fetch(PyObject** kind, PyObject** value, PyObject** trace) noexcept
    void PyErr_Restore(PyObject* kind, PyObject* value, PyObject* trace) noexcept

cdef enum:
    MOST_CALLERS = 64
    MOST_STACKS = 1 << 16    # later ones are number 0: their code would be kept for ever

#: What would be mistaken for the end of a name.
CONTROL = bytes(range(32)), b"?" * 32
TABLE = bytes.maketrans(*CONTROL)

#: The outermost frames of ``python -m`` are not the program's, and what imports is shown in no
#: traceback either.
RUNNER = "<frozen runpy>"
IMPORTS = "<frozen importlib"


@cython.final
@cython.no_gc
cdef class Callers:
    """Callers(depth)\n--\n
    Numbers for call stacks, up to a depth. Internal."""

    def __cinit__(self, depth):
        try:
            depth = operator.index(depth)
        except TypeError:
            raise TypeError(f"sites={depth!r}: need an int, how many callers to note") from None
        if not 1 <= depth <= MOST_CALLERS:
            raise ValueError(f"sites={depth}: how many callers to note, 0 to {MOST_CALLERS}")
        self.depth = depth
        self.numbers = {}
        self.codes = []

    cdef bytes look(self, uint32_t* number):
        cdef Caller[MOST_CALLERS] stack
        cdef PyObject* kind = NULL
        cdef PyObject* value = NULL
        cdef PyObject* trace = NULL
        cdef bytes text = None
        cdef int n
        number[0] = 0
        PyErr_Fetch(&kind, &value, &trace)   # NumPy may be asking with one pending
        try:
            n = stack_of_callers(stack, self.depth)
            if n:
                key = (<char*>stack)[:n * sizeof(Caller)]
                found = self.numbers.get(key)
                if found is not None:
                    number[0] = <uint32_t>found
                elif len(self.numbers) < MOST_STACKS:
                    text = described(stack, n)
                    self.codes.append([<object>stack[i].code for i in range(n)])
                    number[0] = len(self.numbers) + 1
                    self.numbers[key] = number[0]
        except MemoryError:                  # then it is not known
            number[0], text = 0, None
        PyErr_Restore(kind, value, trace)
        return text


cdef bytes described(Caller* stack, int n):
    """File, line and function of each frame that is the program's."""
    cdef list fields = []
    cdef int i
    for i in range(n):
        code = <object>stack[i].code
        if code.co_filename.endswith(RUNNER):
            break
        if not code.co_filename.startswith(IMPORTS):
            line = PyCode_Addr2Line(stack[i].code, <int>stack[i].instruction)
            fields += plain(code.co_filename), b"%d" % max(line, 0), plain(code.co_qualname)
    return b"\t".join(fields) + b"\n"


cdef bytes plain(str name):
    return name.encode("utf-8", "backslashreplace").translate(TABLE)
