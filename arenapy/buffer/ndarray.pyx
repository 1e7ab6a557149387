"""NumPy arrays over Buffers: the only module that sees NumPy's headers.

What lives here: turning (shape, dtype, order) into a checked layout, making an ndarray over
a Buffer, and describing a dtype to the other protocols. An array made here has its Buffer as
base: while the array is alive, so is the Buffer, and with it the hold on the bytes.

Why it is fast: `as_dtype` asks NumPy's C interface, which takes np.dtype objects as they are, and
remembers by identity what strings and scalar types mean ("f4" in a loop is one object): NumPy's
parser would cost as much as the array.
"""
from cpython.object cimport PyObject
from cpython.ref cimport Py_DECREF, Py_INCREF, Py_XDECREF
from cpython.tuple cimport PyTuple_GET_ITEM, PyTuple_GET_SIZE
from libc.stdint cimport uintptr_t

import numpy as np
cimport numpy as cnp

from arenapy.base.atomic cimport ARENAPY_GIL
from arenapy.base.dicts cimport found_in
from arenapy.buffer.block cimport StreamHooks, acquire, check_open, is_readonly
from arenapy.buffer.buffer cimport Buffer, View, new_view

cdef extern from "Python.h":
    bint PyLong_CheckExact(object o)
    long PyLong_AsLongAndOverflow(object o, int* overflow) except? -1
    object PyNumber_Index(object o)
    bint PyIndex_Check(object o)

cdef extern from *:
    """
    static inline int arenapy_product(Py_ssize_t *product, Py_ssize_t factor) {
        return __builtin_mul_overflow(*product, factor, product);
    }
    """
    # Multiplies in place; true if that overflowed. (A division would cost as much as the array.)
    bint arenapy_product(Py_ssize_t* product, Py_ssize_t factor) noexcept nogil

cdef extern from "numpy/arrayobject.h":
    object PyArray_NewFromDescr(
        type subtype, cnp.dtype descr, int nd, const cnp.npy_intp* dims,
        const cnp.npy_intp* strides,
        void* data, int flags, object obj,
    )
    ctypedef struct Descr "PyArray_Descr":
        pass
    int PyArray_DescrConverter(object argument, Descr** dtype) except 0
    int NPY_HALF                         # the last of NumPy's own types
    int NPY_ITEM_HASOBJECT
    ctypedef struct PyArrayObject_fields:
        PyObject* base

cdef extern from *:
    """
    static int arenapy_is_inside(PyObject *dtype, Py_ssize_t room) {
        PyArray_Descr *d = (PyArray_Descr *)dtype;
        Py_ssize_t size = PyDataType_ELSIZE(d), at = 0;
        PyObject *name, *field, *fields;
        PyArray_ArrayDescr *items;
        if (size < 0 || size > room) return 0;
        if (d->type_num != NPY_VOID) return 1;
        items = PyDataType_SUBARRAY(d);
        if (items != NULL) {
            Py_ssize_t all = PyDataType_ELSIZE(items->base);
            for (at = 0; at < PyTuple_GET_SIZE(items->shape); at++) {
                Py_ssize_t n = PyLong_AsSsize_t(PyTuple_GET_ITEM(items->shape, at));
                if (n == 0) return 1;
                if (n < 0 || __builtin_mul_overflow(all, n, &all)) return 0;
            }
            return all <= size && arenapy_is_inside((PyObject *)items->base, size);
        }
        fields = PyDataType_FIELDS(d);
        while (fields != NULL && PyDict_Check(fields) && PyDict_Next(fields, &at, &name, &field)) {
            Py_ssize_t offset = PyLong_AsSsize_t(PyTuple_GET_ITEM(field, 1));
            if (offset < 0 || !arenapy_is_inside(PyTuple_GET_ITEM(field, 0), size - offset))
                return 0;
        }
        return 1;
    }
    """
    # Whether a dtype and its fields lie in so many bytes. NumPy adds sizes up in a C int.
    bint is_inside "arenapy_is_inside"(PyObject* dtype, Py_ssize_t room) noexcept

cnp.import_array()

cdef type ndarray_type = np.ndarray
cdef enum:
    MEANINGS = 64

# Known dtype arguments, found by address. Each is one of NumPy's or Python's own scalar types,
# one of NumPy's own dtypes, or a string whose dtype has no fields: those always mean the same, and
# nothing in their dtype changes, as names of fields can, and by __setstate__, which is left to
# pickle, all of a dtype that is not NumPy's own. An entry counts both, so that no other argument
# gets its address, until another one takes its place.
cdef struct Meaning:
    PyObject* argument
    PyObject* dtype

cdef Meaning[MEANINGS] meanings
cdef frozenset scalar_types = frozenset(
    [bool, int, float, complex, *[np.dtype(code).type for code in np.typecodes["All"]]]
)
cdef dict described = {}          # dtype -> (itemsize, typestr, format)


cdef inline Meaning* meaning_of(object argument) noexcept:
    """Where it would be. Strings and types are 64 bytes apart, or nearly."""
    return &meanings[(<uintptr_t><PyObject*>argument >> 6) % MEANINGS]


cdef object as_dtype(object argument):
    """The dtype, refused if its items cannot live in an arena."""
    cdef Meaning* meaning = meaning_of(argument)
    cdef Descr* found
    if ARENAPY_GIL and meaning.argument == <PyObject*>argument:
        return <object>meaning.dtype
    PyArray_DescrConverter(argument, &found)
    dtype = <object><PyObject*>found
    Py_DECREF(dtype)                     # `dtype` counts it, too
    if (<cnp.dtype>dtype).flags & NPY_ITEM_HASOBJECT:
        raise TypeError(
            f"dtype={dtype} holds references to Python objects, which an arena could not "
            "release at a reset; use numpy.empty for it"
        )
    if (<cnp.dtype>dtype).itemsize == 0 and dtype.kind in "SUV" and dtype.names is None:
        raise ValueError(f"dtype={argument!r} has no size; pass one with a size, like 'S8'")
    if not lies_in_itself(dtype):
        raise ValueError(
            f"dtype={dtype} is too large: NumPy adds the sizes of its fields up to "
            f"{dtype.itemsize}, and some lie outside of it"
        )
    # A set is asked of a type only, whose hash and equality are its identity.
    if ARENAPY_GIL and (
        is_own(dtype) if argument is dtype
        else dtype.names is None if type(argument) is str
        else type(argument) is type and argument in scalar_types
    ):
        remember(meaning_of(argument), argument, dtype)
    return dtype


cpdef bint lies_in_itself(cnp.dtype dtype):
    """Whether all fields of a dtype lie in its bytes."""
    return is_inside(<PyObject*>dtype, dtype.itemsize)


cdef bint is_own(object dtype) except -1:
    """Is it NumPy's own object for that type?"""
    cdef int number = (<cnp.dtype>dtype).type_num
    return 0 <= number <= NPY_HALF and cnp.PyArray_DescrFromType(number) is dtype


cdef int remember(Meaning* meaning, object argument, object dtype) except -1:
    cdef Meaning before = meaning[0]
    Py_INCREF(argument)
    Py_INCREF(dtype)
    meaning.argument, meaning.dtype = <PyObject*>argument, <PyObject*>dtype
    Py_XDECREF(before.argument)          # this may run code, and find the new entry whole
    Py_XDECREF(before.dtype)
    return 0


cdef inline Py_ssize_t _length(object value, object shape) except -1:
    cdef long n
    cdef int overflow
    if PyLong_CheckExact(value):
        n = PyLong_AsLongAndOverflow(value, &overflow)
        if n >= 0:
            return n
    return _odd_length(value, shape)


cdef Py_ssize_t _odd_length(object value, object shape) except -1:
    cdef long n
    cdef int overflow
    try:
        index = PyNumber_Index(value)
    except TypeError:
        raise TypeError(f"shape={shape!r}: {value!r} is not a whole number") from None
    n = PyLong_AsLongAndOverflow(index, &overflow)
    if overflow:
        raise ValueError(f"shape={shape!r} is beyond any address space")
    if n < 0:
        raise ValueError(f"shape={shape!r}: {n} is negative")
    return n


cdef tuple _as_tuple(object shape):
    """Any sequence of lengths, or one length."""
    if PyIndex_Check(shape):
        try:
            return (PyNumber_Index(shape),)
        except TypeError:
            pass                     # an array of several lengths
    try:
        return tuple(shape)
    except TypeError:
        raise TypeError(f"shape={shape!r} is neither a length nor a sequence of lengths") from None


cdef object parse(object shape, object dtype, object order, Spec* spec):
    cdef Py_ssize_t n, nbytes
    cdef Py_ssize_t empty = 0
    cdef int i
    descr = as_dtype(dtype)
    if not isinstance(order, str):
        raise TypeError(f"order={order!r} is of type {type(order).__name__}; give 'C' or 'F'")
    if order == "C":
        spec.fortran = False
    elif order == "F":
        spec.fortran = True
    else:
        raise ValueError(f"order={order!r} is neither 'C' nor 'F'")
    if type(shape) is not tuple:
        shape = _as_tuple(shape)
    n = PyTuple_GET_SIZE(shape)
    if n > MAX_DIMS:
        raise ValueError(f"a shape of {n} dimensions; NumPy has at most {MAX_DIMS}")
    spec.ndim = <int>n
    nbytes = (<cnp.dtype>descr).itemsize
    for i in range(spec.ndim):
        n = _length(<object>PyTuple_GET_ITEM(shape, i), shape)
        spec.dims[i] = n
        if n == 0:
            empty = 1
        elif arenapy_product(&nbytes, n):
            raise ValueError(f"shape={shape!r} of {descr} overflows: no address space holds it")
    spec.nbytes = 0 if empty else nbytes
    return descr


cdef object wrap(Buffer buffer, char* ptr, object dtype, Spec* spec):
    cdef int flags = cnp.NPY_ARRAY_ALIGNED
    if not is_readonly(buffer):
        flags |= cnp.NPY_ARRAY_WRITEABLE
    flags |= cnp.NPY_ARRAY_F_CONTIGUOUS if spec.fortran else cnp.NPY_ARRAY_C_CONTIGUOUS
    Py_INCREF(dtype)                      # NewFromDescr takes a reference
    array = PyArray_NewFromDescr(
        ndarray_type, <cnp.dtype>dtype, spec.ndim, <cnp.npy_intp*>spec.dims, NULL, ptr, flags,
        None,
    )
    # PyArray_SetBaseObject, without looking for an array whose base could be taken instead.
    Py_INCREF(buffer)
    (<PyArrayObject_fields*>array).base = <PyObject*>buffer
    return array


cdef object as_array(object array_like, Spec* spec):
    cdef int i
    source = array_like if type(array_like) is ndarray_type else np.asarray(array_like)
    cdef cnp.ndarray array = source
    as_dtype(array.descr)
    spec.ndim = cnp.PyArray_NDIM(array)
    for i in range(spec.ndim):
        spec.dims[i] = cnp.PyArray_DIM(array, i)
    spec.nbytes = cnp.PyArray_NBYTES(array)      # no array has more than fit into it
    spec.fortran = cnp.PyArray_ISFORTRAN(array)  # and is not in C order, too
    return source


cdef int assign(object target, object source) except -1:
    return cnp.PyArray_CopyInto(<cnp.ndarray>target, <cnp.ndarray>source)


cdef str code_of(descr):
    """The type in the buffer protocol's letters; raises ValueError if it has none.

    NumPy's own but for structs: of those NumPy says no padding at the end, and then reads what it
    said as another size, or another type.
    """
    cdef Py_ssize_t end = 0
    cdef str code
    cdef list parts = []
    if descr.names is None:
        if descr.itemsize == 0:              # of an empty string, which NumPy's arrays do not have
            raise ValueError(f"a buffer format cannot express {descr}")
        return memoryview(np.empty((), descr)).format
    for name in descr.names:
        field, start = descr.fields[name][:2]
        item, shape = field.subdtype or (field, ())
        if start < end or ":" in name or "\0" in name:
            raise ValueError(f"a buffer format cannot express {descr}")
        code = code_of(item)
        if code[0] not in "<>T":
            code = f"^{code}"                # of native size, wherever it lies
        if shape:
            code = f"({','.join([str(n) for n in shape])}){code}"
        parts.append(f"{padding(start - end)}{code}:{name}:")
        end = start + field.itemsize
    return f"T{{{''.join(parts)}{padding(descr.itemsize - end)}}}"


cdef str padding(Py_ssize_t n):
    """A count, since NumPy reads letters in quadratic time."""
    return "" if n == 0 else "x" if n == 1 else f"{n}x"


cdef tuple describe(object descr):
    """``(itemsize, typestr, format)``; `format` is None where PEP 3118 has no code."""
    cdef object entry = found_in(described, descr)
    if entry is None:
        if descr.subdtype is not None:
            raise ValueError(f"dtype={descr} has its own shape; pass that shape as `shape`")
        try:
            format = code_of(descr).encode()
        except ValueError:
            format = None
        entry = (descr.itemsize, descr.str, format)
        if len(described) < 1024:
            described[descr] = entry
    return <tuple>entry


cdef bint _is_unknown(object length) except -1:
    if PyLong_CheckExact(length):
        return length == -1
    try:
        return PyNumber_Index(length) == -1
    except TypeError:
        return False                 # `_length` says what is wrong with it


cdef tuple fit(object shape, Py_ssize_t itemsize, Py_ssize_t nbytes, object dtype):
    """The shape as a tuple without -1, checked to take in no more than `nbytes`."""
    cdef Py_ssize_t known = itemsize
    cdef Py_ssize_t n, unknown = -1
    cdef Py_ssize_t i
    if shape is None:
        shape = (-1,)
    lengths = list(_as_tuple(shape))
    if len(lengths) > MAX_DIMS:
        raise ValueError(f"a shape of {len(lengths)} dimensions; at most {MAX_DIMS}")
    for i in range(len(lengths)):
        if unknown < 0 and _is_unknown(lengths[i]):
            unknown = i
            continue
        n = _length(lengths[i], shape)
        lengths[i] = n
        if arenapy_product(&known, n):
            raise ValueError(f"shape={shape!r} of {dtype} overflows: no address space holds it")
    if unknown >= 0:
        if known == 0 or nbytes % known:
            raise ValueError(
                f"shape={shape!r} of {dtype} does not divide a Buffer of {nbytes} bytes"
            )
        lengths[unknown] = nbytes // known
        known = nbytes
    if known > nbytes:
        raise ValueError(
            f"shape={shape!r} of {dtype} takes {known} bytes and the Buffer has {nbytes}; "
            "give a smaller shape"
        )
    return tuple(lengths)


def view(Buffer buffer not None, shape, dtype):
    """The typed view that Buffer.view returns."""
    # Not a dict's key: equal dtypes may differ in the names of their fields.
    descr = as_dtype("u1" if dtype is None else dtype)
    itemsize, typestr, format = describe(descr)
    return new_view(
        buffer, buffer.ptr, fit(shape, itemsize, buffer.size, descr), itemsize, descr, typestr,
        format, is_readonly(buffer),
    )


cpdef object dtype_of(View view):
    """The value of View.dtype."""
    return np.dtype(view.typestr) if view.descr is None else view.descr


def view_as_array(View view not None):
    """The ndarray over a typed view; its base is the view, which keeps the block held."""
    cdef Spec spec
    cdef int i
    check_open(view)
    spec.ndim = view.ndim
    spec.fortran = False
    spec.nbytes = view.size
    for i in range(view.ndim):
        spec.dims[i] = view.dims[i]
    acquire(view, False)
    return wrap(view, view.ptr, dtype_of(view), &spec)


def interface(Buffer buffer not None):
    """The dict of NumPy's array interface, version 3; the caller acquires the buffer."""
    cdef bint typed = buffer.root is not None
    cdef dict fields = {}
    if typed and (<View>buffer).descr is not None and (<View>buffer).descr.names is not None:
        try:
            fields["descr"] = (<View>buffer).descr.descr
        except ValueError:
            raise ValueError(
                f"the array interface cannot express {(<View>buffer).descr}, whose fields "
                "overlap or are out of order; use array()"
            ) from None
    return fields | {
        "version": 3,
        "shape": (<View>buffer).shape if typed else (buffer.size,),
        "typestr": (<View>buffer).typestr if typed else "|u1",
        "data": (<uintptr_t>buffer.ptr, bool(is_readonly(buffer))),
        "strides": None,
    }


def cuda_interface(Buffer buffer not None):
    """The dict of the CUDA array interface, version 3, with the stream that readers wait for."""
    cdef StreamHooks hooks = buffer.owner.hooks
    fields = interface(buffer)
    acquire(buffer, False)
    if hooks is not None:
        stream = hooks.offer(buffer)
    else:                                    # 1 names no stream of HIP (never run on hardware)
        stream = None if buffer.owner.kind in ("hip", "hip pinned") else 1
    if buffer.size == 0:
        fields["data"] = (0, fields["data"][1])      # as it is specified
    return fields | {"stream": stream}
