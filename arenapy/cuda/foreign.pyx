"""Foreign: arrays of other libraries, as they describe them, and Buffers over them.

What lives here: reading the CUDA array interface, taking over what DLPack hands out, refusing what
no Buffer can be; `asbuffer` and `from_dlpack`. What does not: copies of it (copies), how others see
ours (buffer/dlpack, buffer/ndarray; ordering).

A capsule of DLPack is taken over once all is known to fit: it is renamed, and its deleter is then
this file's to call, once. Until then the capsule itself sees to that.
"""
cimport cython
from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_IsValid, PyCapsule_SetName
from libc.stdint cimport uint64_t, uintptr_t

from arenapy.base.atomic cimport arenapy_finalizing
from arenapy.buffer.block cimport StreamHooks
from arenapy.buffer.dlpack cimport (
    FLAG_READ_ONLY, KIND_CPU, KIND_CUDA, KIND_CUDA_HOST, KIND_CUDA_MANAGED, MAJOR,
    DLManagedTensor, DLManagedTensorVersioned, DLTensor, as_pair,
)

from arenapy.memory.region cimport Region

from arenapy.cuda.driver cimport SUCCESS, callable_, checked, driver, generation, need, primary
from arenapy.cuda.fence cimport follow, refuse_other_capture
from arenapy.cuda.ordering cimport Ordering
from arenapy.cuda.stream_ref cimport FREE_TO_USE, StreamRef, number_of, stream_of
from arenapy.base.sealed cimport seal

cdef enum:
    MEMORY_TYPE = 2          # CU_POINTER_ATTRIBUTE_*
    IS_MANAGED = 8
    DEVICE_ORDINAL = 9
    OF_HOST = 1              # CU_MEMORYTYPE_HOST
    LEGACY = 1               # the legacy default stream
    NOWHERE = 256            # the address of what has no bytes: aligned, and never looked at
    TRIES = 2                # to describe an array that other threads change
    NO_WAIT = -1             # to __dlpack__: the consumer sees to the order
    MAX_DIMS = 64            # NumPy's

# DLPack's numbers to the words of arenapy.
cdef dict KINDS = {
    KIND_CPU: "existing", KIND_CUDA: "device", KIND_CUDA_HOST: "pinned",
    KIND_CUDA_MANAGED: "managed",
}
cdef dict LETTERS = {0: "i", 1: "u", 2: "f", 5: "c", 6: "b"}


@cython.final
cdef class Foreign:
    """An array of another library. Internal."""


seal(Foreign, "a Foreign is internal; see asbuffer and from_dlpack")


cdef str named(object thing):
    return f"this {type(thing).__name__}"


cdef int fit(Foreign array, object thing, object strides, Py_ssize_t itemsize, unit) except -1:
    """Its size. `strides`, None for C order, are in bytes (`unit` 1) or in elements (itemsize)."""
    nbytes = itemsize
    for n in array.shape:
        if n < 0:
            raise BufferError(f"{named(thing)} says that its shape is {array.shape}")
        nbytes *= n
    if nbytes > <Py_ssize_t>(<size_t>-1 >> 1):
        raise BufferError(f"{named(thing)} says that it has {nbytes} bytes, which is impossible")
    array.nbytes = nbytes
    if strides is None or not nbytes:
        return 0
    dense = itemsize
    for n, stride in zip(reversed(array.shape), reversed(strides), strict=True):
        if n != 1 and stride * unit != dense:
            raise BufferError(
                f"{named(thing)} is not C-contiguous: shape {array.shape}, strides "
                f"{tuple(strides)}; give a contiguous copy of it, such as x.contiguous() of torch "
                "or cupy.ascontiguousarray(x)"
            )
        dense *= n
    return 0


# ---- the CUDA array interface ------------------------------------------------------------

cdef Foreign of_interface(object thing, object stream):
    cdef Foreign array
    cdef int _
    detach = getattr(thing, "detach", None)
    if callable(detach) and hasattr(type(thing), "__cuda_array_interface__"):
        # Of torch: another tensor of the same storage, which this one may exchange for another.
        thing = detach()
    for _ in range(TRIES):
        described = getattr(thing, "__cuda_array_interface__", None)
        if described is None:
            return None
        array = as_described(thing, described)
        if not array.nbytes or not hasattr(thing, "__dlpack__") or keep_storage(
                array, thing, stream):
            break
    return array


cdef Foreign as_described(object thing, object described):
    cdef Foreign array = Foreign.__new__(Foreign)
    import numpy as np
    need()
    array.owner = thing
    try:
        array.address, array.readonly = described["data"]
        array.shape = tuple([int(n) for n in described["shape"]])
        array.dtype = np.dtype("" + described["typestr"])     # a str: None would be float64
        if array.dtype.kind == "V" and described.get("descr"):
            fields = np.dtype(described["descr"])
            if fields.itemsize == array.dtype.itemsize:
                array.dtype = fields
        if described.get("mask") is not None:
            raise BufferError(f"{named(thing)} is masked; pass its data and its mask separately")
        fit(array, thing, described.get("strides"), array.dtype.itemsize, 1)
    except (AttributeError, LookupError, OverflowError, TypeError, ValueError) as error:
        raise BufferError(
            f"{named(thing)} has an invalid __cuda_array_interface__: "
            f"{described!r} ({type(error).__name__}: {error})"
        ) from error
    array.kind = "device"
    if array.nbytes:
        place(array)
    producer = described.get("stream")       # since version 3
    if producer is not None:
        array.producer = stream_of(producer, max(array.device_id, 0))
    return array


# Without its capsule the other library would use the memory anew, while streams are waited for. So
# the collector does not see it. It sees nothing behind a capsule either way.
@cython.final
@cython.no_gc
cdef class Exported:
    """A capsule that is only kept. Internal."""

    cdef object capsule

    def __dealloc__(self):
        self.capsule = None                  # here, and not with an exception on its way


seal(Exported)


# Who looks for the weak references to windows wants to know of each Buffer. The collector would
# clear those of garbage before it runs finalizers, which may use the Buffer. So it sees no window.
@cython.final
@cython.no_gc
cdef class Window:
    """A part of a Buffer's memory as another library's array. Internal."""

    cdef object memory
    cdef object described
    cdef object __weakref__

    @property
    def __cuda_array_interface__(self):
        return self.described


seal(Window)


def window_of(memory, address, nbytes):
    """Internal: `nbytes` bytes from `address` in the Buffer `memory`, for `asbuffer`."""
    cdef Window window = Window.__new__(Window)
    window.memory = memory
    window.described = {
        "version": 3,
        "shape": (nbytes,),
        "typestr": "|u1",
        "data": (address, False),
        "strides": None,
    }
    return window


cdef bint keep_storage(Foreign array, object thing, object stream) except -1:
    """Its capsule keeps what the object may let go of, and tells its library who waits for it.

    That would be the interface's to say, but some have nothing there (torch). A library that
    refuses has said all it will. False: its memory is another one.
    """
    cdef DLTensor* tensor
    cdef Exported kept
    try:
        capsule = exported(thing, stream, array.producer is None)
        if PyCapsule_IsValid(capsule, "dltensor_versioned"):
            tensor = &(<DLManagedTensorVersioned*>PyCapsule_GetPointer(
                capsule, "dltensor_versioned")).tensor
        else:
            tensor = &(<DLManagedTensor*>PyCapsule_GetPointer(capsule, "dltensor")).tensor
    except Exception:
        return True
    if <uint64_t><uintptr_t>tensor.data + tensor.byte_offset != array.address:
        return False                         # exchanged since it was described, or it is a copy
    kept = Exported.__new__(Exported)
    kept.capsule = capsule
    array.owner = (thing, kept)
    return True


cdef int place(Foreign array) except -1:
    """Note the kind of the array's memory, and its device."""
    cdef int device = 0, managed = 0, kind = 0, result
    cdef uint64_t address = array.address
    with nogil:
        result = driver.cuPointerGetAttribute(&kind, MEMORY_TYPE, address)
        if result == SUCCESS:
            result = driver.cuPointerGetAttribute(&managed, IS_MANAGED, address)
        if result == SUCCESS:
            result = driver.cuPointerGetAttribute(&device, DEVICE_ORDINAL, address)
    checked(result, "cuPointerGetAttribute")
    array.device_id = device
    if managed:
        array.kind = "managed"
    elif kind == OF_HOST:
        array.kind, array.device_id = "pinned", -1
    return 0


# ---- DLPack ------------------------------------------------------------------------------

@cython.final
cdef class Taken:
    """A tensor that was taken over, which has to be given back. Internal."""

    cdef DLManagedTensor* old
    cdef DLManagedTensorVersioned* new
    cdef int generation
    cdef bint of_device

    def __dealloc__(self):
        # Once the interpreter ends, or in a forked child, its library is not what it was.
        if arenapy_finalizing() or (self.of_device and not callable_(self.generation)):
            return
        with nogil:                          # it may wait for a device
            if self.old != NULL and self.old.deleter != NULL:
                self.old.deleter(self.old)
            if self.new != NULL and self.new.deleter != NULL:
                self.new.deleter(self.new)


seal(Taken)


cdef object exported(object thing, object stream, bint wait):
    """Its capsule. `wait`: shall the stream wait for what its library has queued?"""
    cdef StreamRef s = None
    cdef StreamRef there = None
    kind, device = as_pair(thing.__dlpack_device__(), f"{named(thing)}.__dlpack_device__()")
    arguments = {}
    if kind == KIND_CUDA or kind == KIND_CUDA_MANAGED:
        need()
        s = stream_of(LEGACY if stream is None else stream, device)
        # The number would name another stream on the device of the tensor.
        there = s if s.context == primary(device) else stream_of(LEGACY, device)
        # One that is captured cannot, and to try would make the capture invalid.
        wait = wait and s.state() == FREE_TO_USE and there.state() == FREE_TO_USE
        arguments["stream"] = number_of(there) if wait else NO_WAIT
    elif kind == KIND_CPU and stream is not None:
        raise ValueError(
            f"stream={stream!r}: {named(thing)} is on the host, where streams order nothing; "
            "pass None"
        )
    if kind not in KINDS:
        raise BufferError(
            f"{named(thing)} is on device {(kind, device)} of DLPack, which is neither the host "
            "nor CUDA's; copy it to one of them"
        )
    try:
        capsule = thing.__dlpack__(max_version=(1, 0), **arguments)
    except TypeError:                        # from before there were versions
        capsule = thing.__dlpack__(**arguments)
    if wait and there is not s:
        follow(s, there, True)
    return capsule


cdef Foreign of_dlpack(object thing, object stream):
    capsule = exported(thing, stream, True)
    try:
        return taken_over(capsule, thing)
    except BaseException:
        capsule = None                       # its destructor may not like an exception on its way
        raise


cdef Foreign taken_over(object capsule, object thing):
    cdef DLManagedTensor* old = NULL
    cdef DLManagedTensorVersioned* new = NULL
    cdef Taken taken = Taken.__new__(Taken)
    cdef Foreign array
    if PyCapsule_IsValid(capsule, "dltensor_versioned"):
        new = <DLManagedTensorVersioned*>PyCapsule_GetPointer(capsule, "dltensor_versioned")
        if new.major > MAJOR:                # only the deleter is known to be where it was
            raise BufferError(
                f"{named(thing)} speaks DLPack {new.major}.{new.minor}, and arenapy {MAJOR}"
            )
        array = of_tensor(&new.tensor, thing)
        array.readonly = new.flags & FLAG_READ_ONLY != 0
        PyCapsule_SetName(capsule, "used_dltensor_versioned")
    elif PyCapsule_IsValid(capsule, "dltensor"):
        old = <DLManagedTensor*>PyCapsule_GetPointer(capsule, "dltensor")
        array = of_tensor(&old.tensor, thing)
        PyCapsule_SetName(capsule, "used_dltensor")
    else:
        raise BufferError(
            f"{named(thing)}.__dlpack__() returned {capsule!r}, which is not an unused DLPack "
            "capsule"
        )
    taken.old, taken.new, taken.generation = old, new, generation
    taken.of_device = array.kind != "existing"
    array.owner = taken
    return array


cdef Foreign of_tensor(DLTensor* tensor, object thing):
    """The array that a tensor describes. The tensor still belongs to the capsule."""
    cdef Foreign array = Foreign.__new__(Foreign)
    cdef int i
    cdef int ndim = tensor.ndim
    import numpy as np
    if not 0 <= ndim <= MAX_DIMS:
        raise BufferError(f"{named(thing)} has {ndim} dimensions; a Buffer has at most {MAX_DIMS}")
    array.kind = KINDS.get(tensor.device.device_type)
    if array.kind is None:
        raise BufferError(
            f"{named(thing)} came as a tensor of device {tensor.device.device_type} of DLPack"
        )
    array.device_id = tensor.device.device_id if array.kind in ("device", "managed") else -1
    letter = LETTERS.get(tensor.dtype.code)
    try:
        if letter is None or tensor.dtype.lanes != 1 or tensor.dtype.bits % 8:
            raise TypeError
        array.dtype = np.dtype(f"{letter}{tensor.dtype.bits // 8}")
    except TypeError:
        raise BufferError(
            f"{named(thing)} has items of DLPack's type {tensor.dtype.code} with "
            f"{tensor.dtype.bits} bits and {tensor.dtype.lanes} lanes, which NumPy does not have; "
            "give a view of it as integers"
        ) from None
    array.shape = tuple([tensor.shape[i] for i in range(ndim)])
    strides = None if tensor.strides == NULL else [tensor.strides[i] for i in range(ndim)]
    fit(array, thing, strides, array.dtype.itemsize, array.dtype.itemsize)
    array.address = <uint64_t><uintptr_t>tensor.data + tensor.byte_offset if array.nbytes else 0
    return array

# ---- Buffers over it --------------------------------------------------------------------------

# The region under such a Buffer keeps the other library's object until no Buffer needs it. That
# library may then use the memory anew at once, and does not know the streams that arenapy knows. So
# the end of the region waits for these streams, its own included.


def asbuffer(obj, stream=None):
    """A Buffer over the memory of another library's array.

    Parameters
    ----------
    obj : object
        An array in C order with ``__cuda_array_interface__``, such as one of CuPy, torch or numba.
        Without this interface, an array for :func:`from_dlpack`.
    stream : stream, optional
        The stream that will use it, by default the legacy default stream. It waits for the stream
        of the array's library, if the interface names that stream.

    Returns
    -------
    Buffer
        A view with the array's shape and type, read-only if the array is. It has no allocator. It
        keeps the array's memory, as far as its library allows: `obj`, and with DLPack its storage.

    Raises
    ------
    TypeError
        If it has no such interface.
    BufferError
        If it is not contiguous, or masked. The message says what to do.
    ValueError, Unavailable, CudaError
        If `stream` is not a stream, there is no driver, or the driver does not know the memory.

    Notes
    -----
    When the last Buffer over the memory is dropped, the dropping thread waits until all its streams
    are done: those given here, to copies and to ``record_stream``, and those of its consumers. If
    you access managed or pinned memory from the host, synchronize before.
    Thread-safety: may be called from any thread.

    Examples
    --------
    >>> import arenapy
    >>> from arenapy import cuda
    >>> array = arenapy.Pool(source=cuda.Device()).empty((8, 8), "f4")   # or of CuPy, torch, ...
    >>> block = cuda.asbuffer(array)
    >>> block.address == array.address, block.shape
    (True, (8, 8))
    """
    array = of_interface(obj, stream)
    if array is not None:
        return borrow(array, stream)
    if hasattr(obj, "__dlpack__"):
        return from_dlpack(obj, stream)
    raise TypeError(
        f"this {type(obj).__name__} has neither __cuda_array_interface__ nor __dlpack__; "
        "for an object with a buffer, use arenapy.Existing"
    )


def from_dlpack(obj, stream=None):
    """A Buffer over the memory of another library's array, by DLPack.

    Parameters
    ----------
    obj : object
        An array in C order with ``__dlpack__`` and ``__dlpack_device__``, on a device of CUDA or
        on the host.
    stream : stream, optional
        As for :func:`asbuffer`. None for an array on the host.

    Returns
    -------
    Buffer
        As from :func:`asbuffer`. It keeps the producer's memory. The producer's deleter is called
        once, when the last Buffer is gone and its streams are done.

    Raises
    ------
    TypeError
        If it has no such methods.
    BufferError
        If it is not contiguous, has a type that NumPy does not have, or is on another device; or if
        its DLPack version is too new.
    ValueError, Unavailable, CudaError
        As for :func:`asbuffer`.

    Notes
    -----
    As for :func:`asbuffer`.

    Examples
    --------
    >>> import arenapy
    >>> from arenapy import cuda
    >>> array = arenapy.Pool(source=cuda.Device()).empty(100, "f4")      # or of torch, ...
    >>> cuda.from_dlpack(array).nbytes
    400
    """
    if not hasattr(obj, "__dlpack__") or not hasattr(obj, "__dlpack_device__"):
        raise TypeError(
            f"this {type(obj).__name__} has no __dlpack__ and __dlpack_device__; give the array "
            "itself, not a capsule of it"
        )
    return borrow(of_dlpack(obj, stream), stream)


cdef object borrow(Foreign array, object stream):
    cdef Ordering hooks = None
    cdef Region region
    cdef StreamHooks memory = None
    # Here, since copies, which backing needs, ask this module.
    from arenapy.cuda.backing import device_memory, managed_memory, pinned_memory

    if array.kind == "device":
        memory = device_memory(array.device_id)
    elif array.kind == "managed":
        memory = managed_memory(array.device_id)
    elif array.kind == "pinned":
        memory = pinned_memory(True)
    if memory is not None:
        hooks = <Ordering>memory.bound(LEGACY if stream is None else stream)
        hooks.borrowed = True
        if array.producer is not None:
            refuse_other_capture(hooks.own_stream(), array.producer)
            follow(hooks.own_stream(), array.producer, True)
    region = Region.from_address(
        array.address or NOWHERE, max(array.nbytes, 1), kind=array.kind, owner=array.owner,
        readonly=array.readonly, device_id=array.device_id,
        host_accessible=memory is None or memory.host_accessible,
        device_accessible=memory is not None, fork="inherit" if memory is None else "skip",
    )
    region.hooks = hooks
    buffer = region.buffer(0, array.nbytes)
    if stream is not None and hooks is not None:
        hooks.use(buffer, hooks.own)       # what its user does there is not told
    return buffer.view(array.shape, array.dtype)
