# Lists that the garbage collector does not see.
from cpython.object cimport PyObject

cdef extern from "Python.h":
    void PyObject_GC_UnTrack(PyObject* o)


cdef inline list unseen_list():
    """An empty list, for what the end of its owner needs.

    The collector takes garbage apart in any order, and so might empty an ordinary list before. A
    cycle through this one is never collected.
    """
    cdef list made = []
    PyObject_GC_UnTrack(<PyObject*>made)
    return made
