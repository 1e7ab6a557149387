"""StreamHooks: what kind of memory it is, where streams of a device work on it.

What lives here: what the core of arenapy asks of such memory. What does not: any answer; those are
in arenapy.cuda, so that nothing else knows what a stream is.
"""
from cpython.object cimport PyObject

from arenapy.base.sealed cimport seal


cdef class StreamHooks:
    """Memory that streams use. Internal."""

    cdef StreamHooks bound(self, object stream):
        raise NotImplementedError

    cdef StreamHooks of_allocator(self, object stream):
        return self.bound(stream)

    cdef object named(self, object stream):
        raise NotImplementedError

    cdef object stream_cache(self, object stream):
        return None

    cdef bint always(self, object stream, object named):
        raise NotImplementedError

    cdef object stream_cache_source(self, object pool, object stream):
        raise NotImplementedError

    cdef int may_begin(self, object stream) except -1:
        raise NotImplementedError

    cdef int begin(self, object block, object stream) except -1:
        raise NotImplementedError

    cdef int use(self, object block, object stream) except -1:
        raise NotImplementedError

    cdef void defer_hold(self, PyObject* owner, void* hold) noexcept:
        pass

    cdef Py_ssize_t collect(self, PyObject* owner, bint wait) noexcept:
        return 0

    cdef int fence(self, object stream) except -1:
        raise NotImplementedError

    cdef object consumer(self, object stream):
        raise NotImplementedError

    cdef int lend(self, object block, object stream) except -1:
        raise NotImplementedError

    cdef int ready(self, object block, object stream) except -1:
        raise NotImplementedError

    cdef object offer(self, object block):
        raise NotImplementedError

    cdef void finish(self, PyObject* owner, object memory) noexcept:
        pass

    cdef void leave(self, tuple regions) noexcept:
        pass

    cdef int move(self, object to, object source) except -1:
        raise NotImplementedError

    cdef int copy(self, object to, object source, object stream) except -1:
        raise NotImplementedError

    cdef int fill(self, object block, int byte, object stream) except -1:
        raise NotImplementedError


seal(StreamHooks, "a StreamHooks is internal; use a source of arenapy.cuda")
