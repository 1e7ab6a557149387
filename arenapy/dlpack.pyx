"""DLPack export: a Buffer as a capsule that another library consumes without a copy.

What lives here: the two capsule forms of the DLPack protocol (the struct without a version,
and since DLPack 1.0 the versioned one, which can say "read-only"), and their deleters.

A capsule counts as a live export of its Buffer from birth. The deleter, which the consumer may
call from any thread with or without the GIL, ends it. A capsule that nobody consumed is ended
by its own destructor.

Source of the layouts: the DLPack specification, dlpack.h version 1.0.
"""
from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_IsValid, PyCapsule_New
from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc

import numpy as np

from arenapy.atomic cimport arenapy_finalizing
from arenapy.block cimport acquire, check_open, is_readonly, unacquire
from arenapy.buffer cimport Buffer, View

cdef enum:
    KIND_CPU = 1
    KIND_CUDA = 2
    KIND_CUDA_HOST = 3
    KIND_CUDA_MANAGED = 13
    FLAG_READ_ONLY = 1
    FLAG_IS_COPIED = 2
    MAJOR = 1
    MINOR = 0

cdef struct DLDevice:
    int32_t device_type
    int32_t device_id

cdef struct DLDataType:
    uint8_t code
    uint8_t bits
    uint16_t lanes

cdef struct DLTensor:
    void* data
    DLDevice device
    int32_t ndim
    DLDataType dtype
    int64_t* shape
    int64_t* strides          # in elements
    uint64_t byte_offset

cdef struct DLManagedTensor:
    DLTensor tensor
    void* context
    void (*deleter)(DLManagedTensor*) noexcept nogil

cdef struct DLManagedTensorVersioned:
    uint32_t major
    uint32_t minor
    void* context
    void (*deleter)(DLManagedTensorVersioned*) noexcept nogil
    uint64_t flags
    DLTensor tensor

# NumPy's kind letter to DLPack's type code.
cdef dict CODES = {"i": 0, "u": 1, "f": 2, "c": 5, "b": 6}
cdef dict DEVICES = {
    "device": KIND_CUDA, "pinned": KIND_CUDA_HOST, "managed": KIND_CUDA_MANAGED,
}


cdef void _end(void* context) noexcept with gil:
    """Drop the export that `context` (an owned reference to a Buffer) stands for."""
    cdef Buffer buffer = <Buffer>context
    unacquire(buffer)
    Py_DECREF(buffer)


cdef void _delete(DLManagedTensor* managed) noexcept nogil:
    if managed == NULL or arenapy_finalizing():
        return                # no interpreter to take the GIL from: leak
    _end(managed.context)
    free(managed)


cdef void _delete_versioned(DLManagedTensorVersioned* managed) noexcept nogil:
    if managed == NULL or arenapy_finalizing():
        return
    _end(managed.context)
    free(managed)


# A consumer renames the capsule when it takes the tensor over.

cdef void _drop_capsule(object capsule) noexcept:
    if PyCapsule_IsValid(capsule, "dltensor"):
        _delete(<DLManagedTensor*>PyCapsule_GetPointer(capsule, "dltensor"))


cdef void _drop_versioned(object capsule) noexcept:
    if PyCapsule_IsValid(capsule, "dltensor_versioned"):
        _delete_versioned(
            <DLManagedTensorVersioned*>PyCapsule_GetPointer(capsule, "dltensor_versioned")
        )


def device(Buffer buffer not None):
    """The ``(device_type, device_id)`` of a Buffer's memory."""
    return DEVICES.get(buffer.keeper.kind, KIND_CPU), max(buffer.keeper.device_id, 0)


cdef DLDataType _dtype(Buffer buffer) except *:
    cdef DLDataType t
    cdef str typestr = (<View>buffer).typestr if buffer.root is not None else "|u1"
    code = CODES.get(typestr[1])
    if code is None or typestr[0] == ">":
        raise BufferError(
            f"DLPack has no type for {typestr!r}; view the Buffer as a native number or as 'u1'"
        )
    t.code = code
    t.bits = 8 * ((<View>buffer).itemsize if buffer.root is not None else 1)
    t.lanes = 1
    return t


cdef void _fill(DLTensor* tensor, Buffer buffer, DLDataType dtype, int64_t* numbers):
    cdef View v
    cdef int i
    tensor.data = buffer.ptr
    tensor.device.device_type, tensor.device.device_id = device(buffer)
    tensor.dtype = dtype
    tensor.byte_offset = 0
    tensor.shape = numbers
    if buffer.root is not None:
        v = <View>buffer
        tensor.ndim = v.ndim
        for i in range(v.ndim):
            numbers[i] = v.dims[i]
            # An empty array's strides mean nothing; a 0-byte item cannot occur (no such code).
            numbers[v.ndim + i] = v.dims[v.ndim + i] // v.itemsize
    else:
        tensor.ndim = 1
        numbers[0] = buffer.size
        numbers[1] = 1
    tensor.strides = numbers + tensor.ndim


def capsule(Buffer buffer not None, stream, max_version, dl_device, copy):
    """What ``Buffer.__dlpack__`` returns.

    Raises
    ------
    BufferError
        If the request cannot be met: a read-only Buffer without ``max_version=(1, 0)``, a
        dtype that DLPack lacks, another device, or ``copy=False`` where only a copy works.
    ValueError
        If a stream is given for host memory, or the Buffer is closed.
    """
    cdef DLManagedTensor* old
    cdef DLManagedTensorVersioned* new
    cdef DLDataType dtype
    cdef bint versioned = _is_versioned(max_version)
    cdef size_t numbers
    check_open(buffer)
    here = device(buffer)
    if copy not in (None, True, False):
        raise ValueError(f"copy={copy!r} is not True, False or None")
    if stream is not None:
        raise ValueError(f"stream={stream!r}: {buffer.kind} memory takes stream=None")
    if dl_device is not None and tuple(dl_device) != here:
        raise BufferError(
            f"dl_device={tuple(dl_device)} is not where the Buffer is, {here}; copy it there first"
        )
    dtype = _dtype(buffer)
    if copy:
        return _copied(buffer, versioned, max_version)
    if is_readonly(buffer) and not versioned:
        raise BufferError(
            "the Buffer is read-only, which DLPack can say only since 1.0: the consumer has to "
            "pass max_version=(1, 0) or later, or copy=True"
        )
    numbers = 2 * ((<View>buffer).ndim if buffer.root is not None else 1) * sizeof(int64_t)
    if versioned:
        new = <DLManagedTensorVersioned*>malloc(sizeof(DLManagedTensorVersioned) + numbers)
        if new == NULL:
            raise MemoryError("no memory for a DLPack tensor")
        new.major, new.minor = MAJOR, MINOR
        new.context = <void*>buffer
        new.deleter = _delete_versioned
        new.flags = FLAG_READ_ONLY if is_readonly(buffer) else 0
        _fill(&new.tensor, buffer, dtype, <int64_t*>(new + 1))
        return _as_capsule(buffer, new, True)
    old = <DLManagedTensor*>malloc(sizeof(DLManagedTensor) + numbers)
    if old == NULL:
        raise MemoryError("no memory for a DLPack tensor")
    old.context = <void*>buffer
    old.deleter = _delete
    _fill(&old.tensor, buffer, dtype, <int64_t*>(old + 1))
    return _as_capsule(buffer, old, False)


cdef bint _is_versioned(object max_version) except -1:
    if max_version is None:
        return False
    try:
        major, minor = max_version
        return major >= MAJOR and minor >= 0
    except (TypeError, ValueError):
        raise ValueError(
            f"max_version={max_version!r} is not a pair of numbers, like (1, 0)"
        ) from None


cdef object _copied(Buffer buffer, bint versioned, object max_version):
    """A capsule of a copy, which NumPy owns."""
    if buffer.root is not None:
        copy = np.empty((<View>buffer).shape, (<View>buffer).typestr)
    else:
        copy = np.empty(buffer.size, "u1")
    capsule = buffer.copy_to(copy).__dlpack__(max_version=max_version)
    if versioned:
        (<DLManagedTensorVersioned*>PyCapsule_GetPointer(capsule, "dltensor_versioned")
         ).flags |= FLAG_IS_COPIED
    return capsule


cdef object _as_capsule(Buffer buffer, void* managed, bint versioned):
    """Acquire, then wrap; whatever fails, nothing stays acquired or allocated."""
    try:
        acquire(buffer, True)
    except BaseException:
        free(managed)
        raise
    Py_INCREF(buffer)
    try:
        if versioned:
            return PyCapsule_New(managed, "dltensor_versioned", _drop_versioned)
        return PyCapsule_New(managed, "dltensor", _drop_capsule)
    except BaseException:
        unacquire(buffer)
        Py_DECREF(buffer)
        free(managed)
        raise
