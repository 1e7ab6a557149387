"""NumPy arrays over Buffers: the only module that sees NumPy's headers.

What lives here: turning (shape, dtype, order) into a checked layout, making an ndarray over
a Buffer, and describing a dtype to the other protocols. An array made here has its Buffer as
base: while the array is alive, so is the Buffer, and with it the hold on the bytes.

Why it is fast: `parse` remembers the last dtype argument by identity ("f4" in a loop is one
object), so that most calls skip NumPy's dtype parser, which costs as much as the array.
"""
from cpython.ref cimport Py_INCREF
from cpython.tuple cimport PyTuple_GET_ITEM, PyTuple_GET_SIZE
from libc.stdint cimport uintptr_t

import numpy as np
cimport numpy as cnp

from arenapy.base.atomic cimport ARENAPY_GIL
from arenapy.buffer.block cimport StreamHooks, acquire, check_open, is_readonly
from arenapy.buffer.buffer cimport Buffer, View

cdef extern from "Python.h":
    bint PyLong_CheckExact(object o)
    Py_ssize_t PyLong_AsSsize_t(object o) except? -1
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

cnp.import_array()

cdef type ndarray_type = np.ndarray
cdef object last_argument = object()     # equal to no argument
cdef object last_dtype = None
cdef dict described = {}          # dtype -> (itemsize, typestr, format)


cdef object _as_dtype(object argument):
    """The dtype, refused if its items cannot live in an arena."""
    global last_argument, last_dtype
    if ARENAPY_GIL and argument is last_argument:
        return last_dtype
    dtype = np.dtype(argument)
    if dtype.hasobject:
        raise TypeError(
            f"dtype={dtype} holds references to Python objects, which an arena could not "
            "release at a reset; use numpy.empty for it"
        )
    if dtype.itemsize == 0 and dtype.kind in "SUV" and dtype.names is None:
        raise ValueError(f"dtype={argument!r} does not say its size; give one, like 'S8'")
    # By identity: no other string is this object, and field names alone can change in a dtype.
    if ARENAPY_GIL and type(argument) is str and dtype.names is None:
        last_argument, last_dtype = argument, dtype
    return dtype


cdef Py_ssize_t _length(object value, object shape) except -1:
    cdef Py_ssize_t n
    if PyLong_CheckExact(value):
        index = value
    else:
        try:
            index = PyNumber_Index(value)
        except TypeError:
            raise TypeError(f"shape={shape!r}: {value!r} is not a whole number") from None
    try:
        n = PyLong_AsSsize_t(index)
    except OverflowError:
        raise ValueError(f"shape={shape!r} is beyond any address space") from None
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
    descr = _as_dtype(dtype)
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


cdef object wrap(Buffer buffer, object dtype, Spec* spec):
    cdef int flags = cnp.NPY_ARRAY_ALIGNED
    cdef cnp.ndarray array
    if not is_readonly(buffer):
        flags |= cnp.NPY_ARRAY_WRITEABLE
    flags |= cnp.NPY_ARRAY_F_CONTIGUOUS if spec.fortran else cnp.NPY_ARRAY_C_CONTIGUOUS
    Py_INCREF(dtype)                      # NewFromDescr takes a reference
    array = PyArray_NewFromDescr(
        ndarray_type, <cnp.dtype>dtype, spec.ndim, <cnp.npy_intp*>spec.dims, NULL, buffer.ptr,
        flags, None,
    )
    cnp.set_array_base(array, buffer)
    return array


cdef str code_of(descr):
    """The type in the buffer protocol's letters; raises ValueError if it has none.

    NumPy's own but for structs: of those NumPy says no padding at the end, and then reads what it
    said as another size, or another type.
    """
    cdef Py_ssize_t end = 0
    cdef str code
    cdef list parts = []
    if descr.names is None:
        return memoryview(np.empty((), descr)).format
    for name in descr.names:
        field, start = descr.fields[name][:2]
        item, shape = field.subdtype or (field, ())
        if start < end or ":" in name or "\0" in name:
            raise ValueError(f"a format has no words for {descr}")
        code = code_of(item)
        if code[0] not in "<>T":
            code = f"^{code}"                # of native size, wherever it lies
        if shape:
            code = f"({','.join([str(n) for n in shape])}){code}"
        parts.append(f"{'x' * (start - end)}{code}:{name}:")
        end = start + field.itemsize
    return f"T{{{''.join(parts)}{'x' * (descr.itemsize - end)}}}"


def describe(dtype):
    """``(dtype, itemsize, typestr, format)``; `format` is None where PEP 3118 has no code."""
    cdef object entry
    descr = _as_dtype(dtype)
    entry = described.get(descr)
    if entry is None:
        if descr.subdtype is not None:
            raise ValueError(f"dtype={descr} has a shape of its own; give that to `shape`")
        try:
            format = code_of(descr).encode()
        except ValueError:
            format = None
        entry = (descr.itemsize, descr.str, format)
        if len(described) < 1024:
            described[descr] = entry
    return (descr, *entry)               # not the key: equal dtypes may differ in their names


cdef bint _is_unknown(object length) except -1:
    try:
        return PyNumber_Index(length) == -1
    except TypeError:
        return False                 # `_length` says what is wrong with it


def fit(shape, Py_ssize_t itemsize, Py_ssize_t nbytes, dtype):
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
    return wrap(view, np.dtype(view.typestr) if view.descr is None else view.descr, &spec)


def interface(Buffer buffer not None):
    """The dict of NumPy's array interface, version 3; the caller acquires the buffer."""
    cdef bint typed = buffer.root is not None
    cdef dict fields = {}
    if typed and (<View>buffer).descr is not None and (<View>buffer).descr.names is not None:
        try:
            fields["descr"] = (<View>buffer).descr.descr
        except ValueError:
            raise ValueError(
                f"the array interface has no words for {(<View>buffer).descr}, whose fields "
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
    stream = 1 if hooks is None else hooks.offer(buffer)
    if buffer.size == 0:
        fields["data"] = (0, fields["data"][1])      # as it is specified
    return fields | {"stream": stream}
