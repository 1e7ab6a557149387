"""DLPack export: a Buffer as a capsule that another library consumes without a copy.

What lives here: the two capsule forms of the DLPack protocol (the struct without a version,
and since DLPack 1.0 the versioned one, which can say "read-only"), and their deleters.

A capsule counts as a live export of its Buffer from birth. The deleter, which the consumer may
call from any thread with or without the GIL, ends it. A capsule that nobody consumed is ended
by its own destructor.

Memory that streams use (arenapy.cuda) is lent to the consumer's stream, in the numbers of the array
API standard. If the consumer is the host, the export waits instead, and no stream gets the block.
"""
from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_IsValid, PyCapsule_New
from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.stdint cimport int64_t
from libc.stdlib cimport free, malloc

import numpy as np

from arenapy.base.atomic cimport arenapy_finalizing
from arenapy.buffer.block cimport (
    MemoryOwner, StreamHooks, acquire, check_open, is_readonly, name_of, unacquire,
)
from arenapy.buffer.buffer cimport Buffer, View

cdef extern from "Python.h":
    object PyNumber_Index(object o)

cdef tuple HOST = (KIND_CPU, 0)
cdef tuple PINNED = (KIND_CUDA_HOST, 0)
cdef tuple HIP_PINNED = (KIND_ROCM_HOST, 0)
# NumPy's kind letter to DLPack's type code.
cdef dict CODES = {"i": 0, "u": 1, "f": 2, "c": 5, "b": 6}
# Long doubles have 80 bits on x86. DLPack's floats are those of IEEE, and NumPy exports no others.
cdef tuple LONG = ("f12", "c24", "f16", "c32")
# Pinned memory says that it is the host's: few libraries know KIND_CUDA_HOST. It may be asked for.
cdef dict DEVICES = {"device": KIND_CUDA, "managed": KIND_CUDA_MANAGED, "hip": KIND_ROCM}


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
    return DEVICES.get(buffer.owner.kind, KIND_CPU), max(buffer.owner.device_id, 0)


cdef DLDataType _dtype(Buffer buffer) except *:
    cdef DLDataType t
    cdef str typestr = (<View>buffer).typestr if buffer.root is not None else "|u1"
    code = CODES.get(typestr[1])
    if code is None or typestr[0] == ">" or typestr[1:] in LONG:
        raise BufferError(
            f"DLPack has no type for {typestr!r}; view the Buffer as a native number or as 'u1'"
        )
    t.code = code
    t.bits = 8 * ((<View>buffer).itemsize if buffer.root is not None else 1)
    t.lanes = 1
    return t


cdef void _fill(
    DLTensor* tensor, Buffer buffer, tuple where, DLDataType dtype, int64_t* numbers
):
    cdef View v
    cdef int i
    # As it is specified; but NumPy takes NULL for a wish, and allocates.
    tensor.data = buffer.ptr if buffer.size or where[0] not in (KIND_CUDA, KIND_ROCM) else NULL
    tensor.device.device_type, tensor.device.device_id = where
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
    """The capsule that ``Buffer.__dlpack__`` returns.

    Raises
    ------
    BufferError
        If the request cannot be met: a read-only Buffer without ``max_version=(1, 0)``, a
        dtype that DLPack lacks, another device, or ``copy=False`` where only a copy works.
    ValueError
        If a stream is given for host memory, or one that DLPack does not allow, or the Buffer is
        closed.
    """
    cdef StreamHooks hooks
    cdef DLDataType dtype
    cdef bint versioned = _is_versioned(max_version)
    cdef bint fits, both
    check_open(buffer)
    hooks = buffer.owner.hooks
    here = device(buffer)
    where = here if dl_device is None else as_pair(dl_device, "dl_device")
    # A consumer that asks for pinned memory may use it on the host, or on the device too.
    both = dl_device is None and buffer.owner.kind == "pinned"
    if both and stream is not None:
        where = PINNED                       # whoever names a stream knows of it
    if copy is not None and not isinstance(copy, (bool, np.bool_)):
        raise ValueError(f"copy={copy!r} is not True, False or None")
    if hooks is None and stream is not None:
        check_ignored(buffer, where, stream)
    fits = _fits(buffer, here, where)
    if not fits and (hooks is None or where != HOST):
        raise BufferError(
            f"dl_device={where} is not where the Buffer is, {here}; copy it there first"
        )
    if not fits and copy is False:
        raise BufferError(
            f"dl_device={where}: the host cannot read {name_of(buffer)} in place, which copy=False "
            "asks for; pass copy=None or copy_to() a Buffer of the host"
        )
    dtype = _dtype(buffer)
    consumer = None
    if hooks is not None and not (where == HOST and stream is None):
        consumer = hooks.consumer(stream)
    if copy or not fits:
        if hooks is not None and (where != HOST or dl_device is None):
            return _copied_there(buffer, where, consumer, dtype, versioned)
        if where != HOST:
            raise BufferError(
                f"copy=True: {name_of(buffer)} cannot be copied for dl_device={where}; copy it to "
                "a Buffer, and pass that"
            )
        return _copied(buffer, consumer, versioned, max_version)
    if is_readonly(buffer) and not versioned:
        raise BufferError(
            "the Buffer is read-only, which DLPack can say only since 1.0: the consumer has to "
            "pass max_version=(1, 0) or later, or copy=True"
        )
    if hooks is not None and where == PINNED and stream is None:
        hooks.ready(buffer, None)           # whoever names no stream may be this processor
    return _shared(buffer, where, both, consumer, dtype, versioned)


cdef int check_ignored(Buffer buffer, tuple where, object stream) except -1:
    """A stream for memory without hooks. It must be None, but consumers of HIP's memory name one.

    The exporter of that memory has synchronized its streams (interop/hip, never run on hardware).
    """
    if where[0] not in (KIND_ROCM, KIND_ROCM_HOST):
        raise ValueError(f"stream={stream!r}: {buffer.kind} memory takes stream=None")
    if not isinstance(stream, int) or stream < -1:
        raise ValueError(f"stream={stream!r} names no HIP stream; pass its handle, or None")
    return 0


cdef bint _fits(Buffer buffer, tuple here, tuple where) except -1:
    """Can it be used there as it is?"""
    cdef MemoryOwner owner = buffer.owner
    if where == here:
        return True
    if owner.hooks is None:
        return owner.kind == "hip pinned" and where == HIP_PINNED
    if where == HOST:
        return owner.host_accessible
    if where == PINNED:
        return owner.kind == "pinned"
    return here[0] == KIND_CUDA_MANAGED and where == (KIND_CUDA, here[1])


cdef object _shared(
    Buffer buffer, tuple where, bint both, object consumer, DLDataType dtype, bint versioned
):
    """A capsule of its own memory."""
    cdef DLManagedTensor* old
    cdef DLManagedTensorVersioned* new
    cdef StreamHooks hooks = buffer.owner.hooks
    cdef size_t numbers
    if hooks is not None and where == HOST:
        hooks.ready(buffer, consumer)
    if hooks is not None and (both or where != HOST):
        # Now, as what the consumer does by the time that it calls the deleter may not be done then.
        hooks.lend(buffer, consumer)
    numbers = 2 * ((<View>buffer).ndim if buffer.root is not None else 1) * sizeof(int64_t)
    if versioned:
        new = <DLManagedTensorVersioned*>malloc(sizeof(DLManagedTensorVersioned) + numbers)
        if new == NULL:
            raise MemoryError("no memory for a DLPack tensor")
        new.major, new.minor = MAJOR, MINOR
        new.context = <void*>buffer
        new.deleter = _delete_versioned
        new.flags = FLAG_READ_ONLY if is_readonly(buffer) else 0
        _fill(&new.tensor, buffer, where, dtype, <int64_t*>(new + 1))
        return _as_capsule(buffer, new, True)
    old = <DLManagedTensor*>malloc(sizeof(DLManagedTensor) + numbers)
    if old == NULL:
        raise MemoryError("no memory for a DLPack tensor")
    old.context = <void*>buffer
    old.deleter = _delete
    _fill(&old.tensor, buffer, where, dtype, <int64_t*>(old + 1))
    return _as_capsule(buffer, old, False)


cdef tuple as_pair(object value, str what):
    try:
        first, second = value
        return PyNumber_Index(first), PyNumber_Index(second)
    except (TypeError, ValueError):
        raise ValueError(f"{what}={value!r} is not a pair of whole numbers, like (1, 0)") from None


cdef bint _is_versioned(object max_version) except -1:
    return max_version is not None and <object>as_pair(max_version, "max_version")[0] >= MAJOR


cdef object _copied(Buffer buffer, object consumer, bint versioned, object max_version):
    """A capsule of a copy on the host, which NumPy owns."""
    cdef StreamHooks hooks = buffer.owner.hooks
    if buffer.root is not None:
        copy = np.empty((<View>buffer).shape, (<View>buffer).typestr)
    else:
        copy = np.empty(buffer.size, "u1")
    if hooks is not None:
        hooks.ready(buffer, consumer)
    capsule = buffer.copy_to(copy).__dlpack__(max_version=max_version)
    return _marked(capsule, versioned)


cdef object _copied_there(
    Buffer buffer, tuple where, object consumer, DLDataType dtype, bint versioned
):
    """A capsule of a copy in the same allocator, made by the consumer's stream."""
    cdef StreamHooks hooks = buffer.owner.hooks
    cdef Buffer other
    allocator = buffer.allocator
    if allocator is None:
        raise BufferError(
            f"copy=True: {name_of(buffer)} has no allocator to give memory for a copy; "
            "copy it to a Buffer of one, and pass that"
        )
    other = allocator.alloc(buffer.size)
    if hooks.host_accessible:               # where the consumer may be this processor
        hooks.ready(buffer, consumer)
        other.copy_from(buffer)
    elif consumer is None:
        other.copy_from(buffer, hooks.own)
    else:
        hooks.lend(buffer, consumer)
        other.copy_from(buffer, consumer)
    if buffer.root is not None:
        other = other.view((<View>buffer).shape, (<View>buffer).typestr)
    return _marked(_shared(
        other, where, buffer.owner.kind == "pinned", consumer, dtype, versioned), versioned)


cdef object _marked(object capsule, bint versioned):
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
