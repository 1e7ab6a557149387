"""Sealed classes: Python code gets their objects, and does not make them.

Every class of an extension module keeps one rule, so that no method ever meets an object that is
half made (tests/base/test_classes.py checks all of them):

- A class that users call, like Bump, makes the whole object in ``__cinit__``, or raises. It has no
  ``__init__``, which could be left out, called twice, or called by other code halfway.
- All other classes are sealed: neither a call nor ``__new__`` makes an object. The module that
  defines the class makes them in C, as ``X.__new__(X)`` in Cython.
- No class can be derived from in Python: it is final, or sealed.
- No class has generated methods for pickling, which set fields from outside (``auto_pickle`` in
  _build.py). Where pickling makes sense, a ``__reduce__`` says how.
- The cycle collector, which shows objects to anyone who asks it, sees an allocator only when it is
  whole (``complete`` in allocator.pyx).
"""
cimport cython
from cpython.object cimport PyObject

cdef extern from *:
    """
    /* After PyType_Ready, for which there is no other spelling. C code still calls tp_new. */
    static int arenapy_seal(
        PyObject *cls, PyObject *refuse_new, int (*refuse_init)(PyObject *, PyObject *, PyObject *)
    ) {
        PyTypeObject *type = (PyTypeObject *)cls;
        type->tp_flags &= ~Py_TPFLAGS_BASETYPE;
        type->tp_vectorcall = NULL;
        type->tp_init = refuse_init;
        if (PyDict_SetItemString(type->tp_dict, "__new__", refuse_new) < 0) return -1;
        PyType_Modified(type);
        return 0;
    }
    """
    int arenapy_seal(
        object cls, object refuse_new, int (*refuse_init)(object, PyObject*, PyObject*) except -1
    ) except -1

cdef dict hows = {}          # class: how to get one


cdef int seal(type cls, str how=None) except -1:
    hows[cls] = how or f"{cls.__name__} is internal to arenapy, which makes its objects itself"
    return arenapy_seal(cls, refuse_new, refuse_init)


@cython.embedsignature(False)    # it is no class's
def refuse_new(cls, *args, **kwargs):
    """The ``__new__`` of sealed classes."""
    raise TypeError(hows.get(cls, f"{cls!r} is not this class"))


cdef int refuse_init(object self, PyObject* args, PyObject* kwargs) except -1:
    """The ``__init__`` of sealed classes. Subclasses that users may call inherit it, and pass."""
    how = hows.get(type(self))
    if how is not None:
        raise TypeError(how)
    return 0
