# Dicts that several threads change.

cdef extern from *:
    """
    static inline PyObject *arenapy_found_in(PyObject *dict, PyObject *key) {
        PyObject *found;
    #if PY_VERSION_HEX >= 0x030D0000
        if (PyDict_GetItemRef(dict, key, &found) < 0)
            return NULL;
    #else
        found = PyDict_GetItemWithError(dict, key);
        if (found == NULL && PyErr_Occurred())
            return NULL;
        Py_XINCREF(found);
    #endif
        return found == NULL ? Py_NewRef(Py_None) : found;
    }
    """
    # `dict.get(key)`. Cython's own, of a typed dict, borrows the value, which another thread may
    # free before it is kept, if there is no GIL.
    object found_in "arenapy_found_in" (dict d, object key)
