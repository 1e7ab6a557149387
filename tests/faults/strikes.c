/* Lets a signal arrive at a chosen bytecode of a package's Python code.

   The interpreter handles signals at some bytecodes only: after calls, at the start of functions, at
   jumps backwards. So a signal is not handled here but made pending, as a real one would be, and the
   interpreter handles it where it handles real ones. A C trace function counts the bytecodes, and
   the returns from C functions, since what these call may be Python code that would handle a signal
   of the call's own bytecode. The functions of sys.settrace and sys.setprofile would be Python code
   themselves.

   Of Python's headers nothing is needed; see strikes.py, which loads this with the GIL held. */
#include <stdint.h>
#include <string.h>

typedef struct object PyObject;
typedef struct frame PyFrameObject;
typedef int (*Tracer)(PyObject *, PyFrameObject *, int, PyObject *);
enum { CALL = 0, C_RETURN = 6, OPCODE = 7 };     /* PyTrace_ */

extern void PyEval_SetTrace(Tracer, PyObject *);
extern void PyEval_SetProfile(Tracer, PyObject *);
extern PyObject *PyFrame_GetCode(PyFrameObject *);
extern int PyFrame_GetLasti(PyFrameObject *);
extern PyObject *PyObject_GetAttrString(PyObject *, const char *);
extern int PyObject_SetAttrString(PyObject *, const char *, PyObject *);
extern const char *PyUnicode_AsUTF8(PyObject *);
extern PyObject *PyBool_FromLong(long);
extern void Py_DecRef(PyObject *);
extern int PyErr_SetInterruptEx(int);

typedef struct {
    uintptr_t code;
    int32_t instruction;
    int32_t returned;                            /* it was a call of a C function, which is over */
} Place;

enum { MOST = 1 << 20 };
static Place places[MOST];
static const char *package, *beside;             /* what the names of files begin with */
static int64_t n, first, second;                 /* places so far; where signals arrive */
static int number;                               /* of the signal */

static int is_ours(PyObject *code) {
    PyObject *name = PyObject_GetAttrString(code, "co_filename");
    const char *text = name ? PyUnicode_AsUTF8(name) : NULL;
    int ours = text && (!strncmp(text, package, strlen(package))
                        || !strncmp(text, beside, strlen(beside)));
    if (name) Py_DecRef(name);
    return ours;
}

static void pass(PyFrameObject *frame, PyObject *code, int returned) {
    int64_t at = n++;
    if (at < MOST) places[at] = (Place){(uintptr_t)code, PyFrame_GetLasti(frame), returned};
    if (at == first || at == second) PyErr_SetInterruptEx(number);
}

static int trace(PyObject *self, PyFrameObject *frame, int what, PyObject *argument) {
    PyObject *code = PyFrame_GetCode(frame), *yes = PyBool_FromLong(1);
    int failed = 0;
    (void)self;
    (void)argument;
    if (what == OPCODE)
        pass(frame, code, 0);
    else if (what == CALL && is_ours(code))      /* 3.13 asks for both */
        failed = PyObject_SetAttrString((PyObject *)frame, "f_trace", yes)
            || PyObject_SetAttrString((PyObject *)frame, "f_trace_opcodes", yes);
    Py_DecRef(code);
    Py_DecRef(yes);
    return failed ? -1 : 0;
}

static int profile(PyObject *self, PyFrameObject *frame, int what, PyObject *argument) {
    PyObject *code = PyFrame_GetCode(frame);
    (void)self;
    (void)argument;
    if (what == C_RETURN && is_ours(code)) pass(frame, code, 1);
    Py_DecRef(code);
    return 0;
}

/* A signal arrives at the places of these numbers, from 0; -1: none. */
void strikes_begin(const char *directory, const char *file, int signal, int64_t one, int64_t other) {
    package = directory;
    beside = file;
    number = signal;
    n = 0;
    first = one;
    second = other;
    PyEval_SetTrace(trace, NULL);
    PyEval_SetProfile(profile, NULL);
}

/* The signal arrives (again) at the next place. */
void strikes_later(void) { first = n; }

/* How many places were passed. */
int64_t strikes_end(void) {
    PyEval_SetProfile(NULL, NULL);
    PyEval_SetTrace(NULL, NULL);
    return n;
}

const Place *strikes_places(void) { return places; }
