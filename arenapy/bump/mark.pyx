"""Mark: a position in a Bump, as Python sees it.

Marks with nothing allocated between them share a frame of the core, and are told apart by
their order in a list of the live ones, newest first: a reset ends those that are newer.
"""
cimport cython
from cpython.object cimport PyObject

from arenapy.base.atomic cimport arenapy_lock_acquire, arenapy_lock_release
from arenapy.base.sealed cimport seal


@cython.final
@cython.freelist(64)
@cython.no_gc_clear          # the core is needed to the last
cdef class Mark:
    """A position in a Bump, made by :meth:`Bump.mark` and given to :meth:`Bump.reset`."""

    def __dealloc__(self):
        if self.core is not None:
            arenapy_lock_acquire(&self.core.lock)
            end_mark(self)
            arenapy_lock_release(&self.core.lock)

    def __repr__(self):
        return f"<Mark {self.id}{'' if self.valid else ', ended'}>"


seal(Mark, "a Mark is made by Bump.mark(), not by calling the class")


cdef void begin_mark(Mark mark, BumpCore core, Frame* frame) noexcept:
    mark.id = frame.id
    mark.valid = True
    mark.older = core.last_mark
    if mark.older != NULL:
        (<Mark>mark.older).newer = <PyObject*>mark
    core.last_mark = <PyObject*>mark
    core.live_mark = mark.id


cdef void end_mark(Mark mark) noexcept:
    if not mark.valid:
        return
    mark.valid = False
    if mark.older != NULL:
        (<Mark>mark.older).newer = mark.newer
    if mark.newer != NULL:
        (<Mark>mark.newer).older = mark.older
    else:
        mark.core.last_mark = mark.older
        mark.core.live_mark = (<Mark>mark.older).id if mark.older != NULL else 0
    mark.older = mark.newer = NULL
