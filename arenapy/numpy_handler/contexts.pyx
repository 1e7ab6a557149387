# cython: language_level=3, freethreading_compatible=True
"""Which handler NumPy's arrays are made under, where: contexts, and threads started in them.

NumPy keeps the handler in a context variable. Those that are in force in a context are a stack in
one of ours, the newest last: whoever leaves takes itself out of it, wherever it is, since the
`with` of a generator may end after one that was entered later.

A signal's exception (Ctrl-C) may strike between any two bytecodes, and also at the first one of a
Python function: of an `__exit__`, say, before it has done anything. So what enters and leaves is
compiled, calls no function that is written in Python, and waits for no lock that a signal could
interrupt: it is done as a whole or not at all. What threads share is changed in turns
(base/turns.pxd).

What lives here: entering, leaving, and the wrapper of `threading.Thread.start`. What does not: the
handler itself (handler), decorators and arguments (numpy_memory), what libc keeps (libc_malloc).
"""
import functools
import sys
import threading
import weakref
from contextvars import ContextVar
from types import CellType, FunctionType

cimport cython
from cpython.mem cimport PyMem_Free, PyMem_Malloc
from cpython.object cimport PyObject
from libc.stdint cimport uint64_t

from arenapy.base.atomic cimport (
    ARENAPY_GIL, arenapy_cas_ptr, arenapy_finalizing, arenapy_load_ptr, arenapy_take_ptr,
)
from arenapy.base.dicts cimport found_in
from arenapy.base.sealed cimport seal
from arenapy.base.turns cimport begin_turn, end_turn
from arenapy.linux.libc_malloc cimport keep, keep_no_more

from arenapy.numpy_handler.thread_start import start_by

cdef extern from *:
    """
    /* Before 3.12 an allocation may collect garbage, also that of ContextVar.set, which holds no
       reference to what it changes. A finalizer that sets a variable too, as the end of a
       decorated generator does, would free it. */
    #if PY_VERSION_HEX < 0x030C0000
    #define arenapy_no_collection() PyGC_Disable()
    #define arenapy_collection_again() PyGC_Enable()
    #else
    #define arenapy_no_collection() 0
    #define arenapy_collection_again() 0
    #endif
    """
    bint no_collection "arenapy_no_collection" () noexcept
    int collection_again "arenapy_collection_again" () noexcept

cdef extern from "Python.h":
    ctypedef struct PyTypeObject:
        PyObject* tp_dict
        PyObject* tp_mro
    bint PyType_Check(object o)
    PyObject* PyFunction_GetCode(object function)

cdef extern from "numpy/arrayobject.h":
    object PyDataMem_SetHandler(object handler)
    object PyDataMem_GetHandler()

cimport numpy as cnp

cnp.import_array()


def get_handler():
    """The handler that is in force in this context."""
    return PyDataMem_GetHandler()


# Not in the module's dict, which the interpreter empties while generators still enter and leave;
# nor is `_stack`.
cdef object ref = weakref.ref
cdef object get_ident = threading.get_ident


# ---- who is under it ---------------------------------------------------------------------

@cython.final
cdef class Presence:
    """How often a handler is in force in one thread; it goes with the thread."""

    cdef object __weakref__
    cdef Py_ssize_t times


seal(Presence)


@cython.final
cdef class PoolHandler:
    """One for each pool and policy, and gone with the pool; arrays keep the capsule longer."""

    cdef readonly object capsule
    cdef readonly object counts
    cdef object local                # of each thread, its Presence
    cdef dict presences              # weak references to them, by the thread's ident
    cdef Py_ssize_t sweep_at         # when it has so many, those of ended threads go

    def __cinit__(self, capsule, counts):
        self.capsule, self.counts = capsule, counts
        self.local = threading.local()
        self.presences = {}

    cdef Presence here(self):
        """Of this thread."""
        cdef Presence mine = getattr(self.local, "presence", None)
        if mine is None:
            mine = Presence.__new__(Presence)
            self.local.presence = mine       # first: a finalizer may come here meanwhile
            try:
                self.list_presence(ref(mine))
            except BaseException:
                del self.local.presence
                raise
        return mine

    cdef int list_presence(self, object reference) except -1:
        cdef dict presences = self.presences
        if len(presences) >= self.sweep_at:
            # Of a copy: other code may run meanwhile, and a critical section lets others in.
            for ident, other in presences.copy().items():
                if other() is None:
                    gone = presences.pop(ident, None)
                    if gone is not None and gone is not other:    # a new thread has the ident
                        presences.setdefault(ident, gone)
            self.sweep_at = 2 * len(presences)
        presences[get_ident()] = reference
        return 0

    def reached(self):
        """Idents of the threads that have it."""
        cdef Presence one
        found = set()
        for ident, reference in self.presences.copy().items():
            one = reference()
            if one is not None and one.times > 0:
                found.add(ident)
        return found


# ---- contexts ----------------------------------------------------------------------------

@cython.final
cdef class Entry:
    """The handler in force in a context. The first entry of a stack is the handler from before."""

    cdef object capsule
    cdef Context memory              # None for the first
    cdef bint installed
    cdef Turn turn                   # that entered; None: the memory itself did
    # What was in force when it entered, if that is nobody's in the stack: another library's.
    cdef object foreign


seal(Entry)


cdef Entry new_entry(object capsule, Context memory, bint installed, Turn turn):
    cdef Entry entry = Entry.__new__(Entry)
    entry.capsule, entry.memory, entry.installed, entry.turn = capsule, memory, installed, turn
    return entry


cdef object _stack = ContextVar("arenapy_numpy_memory", default=())


cdef int set_handler(object handler) except -1:
    """Without memory for the token, setting a context variable raises an error, and it is set."""
    try:
        PyDataMem_SetHandler(handler)
    except BaseException:
        if PyDataMem_GetHandler() is not handler:
            raise
    return 0


cdef int put_in_force(object handler, tuple stack) except -1:
    """What arrays are made under from now on; if it fails, nothing changes.

    The caller keeps the stack that was in force, so nothing ends in here.
    """
    cdef bint collects = no_collection()
    cdef tuple kept = stack if len(stack) > 1 else ()
    try:
        before = PyDataMem_GetHandler()
        set_handler(handler)
        try:
            _stack.set(kept)
        except BaseException:
            if _stack.get() is not kept:     # else as in set_handler
                set_handler(before)
                raise
    finally:
        if collects:
            collection_again()
    return 0


# To leave takes some hundred bytes. If there is no memory, they come from this reserve, which is
# freed then. No other code runs between. CPython's allocator asks malloc when it has no pages left:
# malloc does not map so few bytes, and keeps them when they are free. A free-threaded CPython keeps
# the memory of an object for a while, so this is no object. There, 128 KiB or less share a page,
# which is not free as long as others in it are not.
cdef enum:
    RESERVED = 64 << 10      # bytes
    RESERVED_FREE_THREADED = 256 << 10

cdef void* reserve = NULL


cdef int fill_reserve() except -1:
    cdef void* made
    cdef void* none = NULL
    if arenapy_load_ptr(&reserve) == NULL:
        made = PyMem_Malloc(RESERVED if ARENAPY_GIL else RESERVED_FREE_THREADED)
        if made == NULL:
            raise MemoryError("no memory for what leaving this context takes")
        if not arenapy_cas_ptr(&reserve, &none, made):
            PyMem_Free(made)                 # another thread was first
    return 0


cdef class Context:
    """The base of `numpy_memory`: its place in the stacks of contexts. Internal."""

    cdef readonly PoolHandler _handler
    cdef readonly bint threads       # those that start in it are to have it
    cdef readonly bint _keeps        # libc is to keep what it has
    cdef Py_ssize_t covers           # how often it asked for either

    def __init__(self, PoolHandler handler not None, bint threads, bint keeps):
        if self._handler is not None:        # it may be in force, as what it was made for
            raise TypeError(f"{self!r} is initialized already; call the class for another one")
        self._handler, self.threads, self._keeps = handler, threads, keeps

    def __enter__(self):
        self.enter(False, True, None)
        return self

    def __exit__(self, kind, error, traceback):
        self.leave(False, True, None)

    def _turn(self):
        """For a `with` that may be suspended."""
        cdef Turn turn = Turn.__new__(Turn)
        turn.memory = self
        return turn

    def _install(self):
        """False: it is installed in this context already."""
        cdef Entry entry
        for entry in _stack.get():
            if entry.installed and entry.memory is self:
                return False
        self.enter(True, True, None)
        return True

    def _uninstall(self):
        """False: it is not installed in this context."""
        return self.leave(True, True, None)

    # `asked`: by the user, and not for a thread that was started under it. Changes to the
    # whole process are made for the user alone.

    cdef int enter(self, bint installed, bint asked, Turn turn) except -1:
        cdef bint cover = asked and (self.threads or self._keeps)
        cdef Presence mine
        in_force = PyDataMem_GetHandler()
        cdef tuple old = _stack.get() or (new_entry(in_force, None, False, None),)
        cdef tuple stack
        cdef Py_ssize_t at = len(old)
        cdef Entry top = <Entry>old[at - 1]
        cdef Entry entry
        if self._handler is None:
            raise TypeError(f"this {type(self).__name__} was never initialized; call the class")
        fill_reserve()
        mine = self._handler.here()
        while installed and at > 1 and not (<Entry>old[at - 1]).installed:
            at -= 1
        entry = new_entry(self._handler.capsule, self, installed, turn)
        if at == len(old):
            entry.foreign = None if top.capsule is in_force else in_force
            in_force = entry.capsule
        stack = old[:at] + (entry,) + old[at:]    # "(*old, ...)" is a list first, which others find
        if cover:
            starts.cover(self, installed)
        try:
            put_in_force(in_force, stack)
        except BaseException:
            if cover:
                starts.uncover(self, installed)
            raise
        mine.times += 1
        if asked and self._keeps:    # last: glibc never quite forgets it
            keep()
        return 0

    cdef bint leave(self, bint installed, bint asked, Turn turn) except -1:
        cdef void* freed
        try:
            return self.leave_with(installed, asked, turn)
        except MemoryError:
            freed = arenapy_take_ptr(&reserve)
            if freed == NULL:
                raise
        PyMem_Free(freed)
        return self.leave_with(installed, asked, turn)

    cdef bint leave_with(self, bint installed, bint asked, Turn turn) except -1:
        """The same with the memory that there is. If it raises, it can be called again."""
        cdef tuple stack = _stack.get()
        cdef Py_ssize_t at = len(stack) - 1
        cdef Entry entry
        while at > 0:
            entry = <Entry>stack[at]
            if entry.memory is self and entry.installed == installed and entry.turn is turn:
                break
            at -= 1
        if at > 0:                   # else this is another context than the one that was entered
            mine = self._handler.here()
            in_force = PyDataMem_GetHandler()
            # Another one is not ours to change: one of those above, or of another library, since.
            if at == len(stack) - 1 and in_force is entry.capsule:
                in_force = entry.foreign or (<Entry>stack[at - 1]).capsule
            put_in_force(in_force, stack[:at] + stack[at + 1:])
            (<Presence>mine).times -= 1
        elif installed:
            return False
        if (asked and (self.threads or self._keeps) and starts.uncover(self, installed)
                and self._keeps):
            keep_no_more()
        return True


@cython.final
cdef class Turn:
    """One `with` of a memory, which ends this one and no other of the same memory.

    What is suspended in it may be dropped. The collector then ends it in any context, where the
    memory may be in force for somebody else.
    """

    cdef Context memory

    def __enter__(self):
        self.memory.enter(False, True, self)

    def __exit__(self, kind, error, traceback):
        self.memory.leave(False, True, self)


seal(Turn)


def close_alone(ended, finalizer, generator):
    """What is done with an async generator that nobody has any more, as without a wrapper."""
    if not ended or generator.ag_running:
        return                               # its wrapper closes it; or nobody can, amid an await
    if finalizer is not None:
        finalizer(generator)                 # the event loop's
        return
    closing = generator.aclose()
    try:
        closing.send(None)
    except (StopIteration, StopAsyncIteration, GeneratorExit):
        return
    closing.close()
    raise RuntimeError("async generator ignored GeneratorExit")


def begin_unseen(ended, generator):
    """The first step of an async generator, of which no event loop is told.

    A loop that ends closes all that it was told of at once. This one is closed by its wrapper, even
    if the collector finds both and finalizes this one first. `ended` is not empty once the wrapper
    has ended.
    """
    told = sys.get_asyncgen_hooks()
    sys.set_asyncgen_hooks(None, functools.partial(close_alone, ended, told[1]))
    try:
        return generator.asend(None)
    finally:
        sys.set_asyncgen_hooks(told[0], told[1])


# ---- threads -----------------------------------------------------------------------------

@cython.final
cdef class Starts:
    """`threading.Thread.start`, wrapped while somebody wants threads covered."""

    cdef uint64_t busy               # see begin_turn; of what follows, and of Context.covers
    cdef Py_ssize_t users
    cdef list defaults               # those that are installed for all threads

    def __cinit__(self):
        self.defaults = []

    # In a turn no code of others runs: it may wait for a thread that waits for its turn. So nothing
    # is made there, since this may collect garbage, and nothing is compared but identities.

    cdef int cover(self, Context memory, bint installed) except -1:
        cdef bint begun, missing
        wrapped = ours = None
        while True:
            if memory.threads and self.users == 0:    # asked again in the turn
                wrapped = start_of_threads()
                if wrapped is not None:
                    ours = wrapper(wrapped)
            start = None                     # it may end here, and not in the turn
            begun = begin_turn(&self.busy)
            try:
                start = start_of_threads()
                # Ours may still be there: another wrapper of it was taken away late.
                missing = (memory.threads and self.users == 0 and start is not None
                           and not is_ours(start))
                if not missing or start is wrapped:
                    if memory.threads and installed:
                        self.defaults.append(memory)
                    if missing:
                        threading.Thread.start = ours
                    self.users += memory.threads
                    memory.covers += 1
                    return 0
            finally:
                end_turn(&self.busy, begun)

    cdef bint uncover(self, Context memory, bint installed) except -1:
        """False: it had not asked for anything."""
        cdef bint begun = begin_turn(&self.busy)
        try:
            if memory.covers == 0:
                return False
            if memory.threads:
                if installed:
                    self.forget_default(memory)
                # Somebody else may have wrapped ours meanwhile: then it stays, and does nothing.
                start = start_of_threads()
                if self.users == 1 and start is not None and is_ours(start):
                    threading.Thread.start = start.__wrapped__
                self.users -= 1
            memory.covers -= 1
            return True
        finally:
            end_turn(&self.busy, begun)

    cdef object newest_default(self):
        cdef bint begun = begin_turn(&self.busy)
        try:
            return self.defaults[len(self.defaults) - 1] if self.defaults else None
        finally:
            end_turn(&self.busy, begun)

    cdef int forget_default(self, Context memory) except -1:
        cdef Py_ssize_t i
        for i in range(len(self.defaults)):
            if self.defaults[i] is memory:
                del self.defaults[i]
                break
        return 0


seal(Starts)

cdef Starts starts = Starts.__new__(Starts)


cdef object start_of_threads():
    """What `Thread.start` is found as, which may be a descriptor. None: there is none.

    No code of the user is called for it, and no memory is needed. At the interpreter's end no
    thread starts, and the names of this module are None.
    """
    cdef PyObject* names
    if arenapy_finalizing() or not PyType_Check(threading.Thread):
        return None
    for kind in <tuple>(<PyTypeObject*>threading.Thread).tp_mro:
        names = (<PyTypeObject*>kind).tp_dict
        start = None if names == NULL else found_in(<dict>names, "start")
        if start is not None:
            return start
    return None


cdef bint is_ours(object start):
    return type(start) is FunctionType and PyFunction_GetCode(start) == <PyObject*>start_code


cdef object wrapper(object original):
    """The `Thread.start` that gives a thread the handler of the context it is started in.

    As `start_by(start_thread, original)`, which is a call of Python code.
    """
    cells = CellType(start_thread), CellType(original)
    start = FunctionType(START.__code__, START.__globals__, "start", None, cells)
    for name in functools.WRAPPER_ASSIGNMENTS:   # as functools.wraps does, which is Python code
        if hasattr(original, name):
            setattr(start, name, getattr(original, name))
    start.__wrapped__ = original
    return start


def start_thread(original, thread):
    """What the wrapper of `Thread.start` does."""
    memory = of_new_thread()
    own = ours = None
    if memory is not None:
        try:
            fresh = thread.ident is None     # else it may begin to run just now
        except AssertionError:               # it is not initialized, as `start` says
            fresh = False
        try:                                 # no code of Python, in which a handler could run
            if fresh:
                own = vars(thread).get("run")
                ours = run_under(memory, thread, own)
                thread.run = ours
        except Exception:
            ours = None              # a class whose `run` cannot be set: the thread goes without
    try:
        # As `thread.start()`, which calls what a descriptor makes of it, if it is one.
        bind = getattr(type(original), "__get__", None)
        (original if bind is None else bind(original, thread, type(thread)))()
    except BaseException:
        restore_run(thread, ours, own)
        raise


START = start_by(start_thread, None)
cdef object start_code = START.__code__


cdef Context of_new_thread():
    """The innermost of this context that wants threads, or else what is installed for all."""
    cdef Entry entry
    for entry in reversed(_stack.get()):
        if entry.memory is not None and entry.memory.threads:
            return entry.memory
    return starts.newest_default()


cdef object run_under(Context memory, object thread, object own):
    """A `run` for a thread. Who wraps `start` too may call it with the thread, as a method is."""
    run = thread.run
    reference = ref(thread)  # `thread.run` is this closure: no cycle

    def wrapped(*_):
        restore_run(reference(), me(), own)    # first: the program may copy the thread's fields
        memory.enter(False, False, None)
        try:
            run()
        finally:
            memory.leave(False, False, None)

    me = ref(wrapped)        # no cycle either
    return wrapped


cdef int restore_run(object thread, object ours, object own) except -1:
    """Put back a thread's own `run`, None: it had none, if it is this one now."""
    if thread is not None and ours is not None and vars(thread).get("run") is ours:
        if own is None:
            del vars(thread)["run"]
        else:
            vars(thread)["run"] = own
    return 0
