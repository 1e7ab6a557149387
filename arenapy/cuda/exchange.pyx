"""Exchange: Buffers over memory of other libraries.

What lives here: `asbuffer` and `from_dlpack`, and the region under each Buffer that they make. What
does not: what other libraries say of their memory (foreign), and how they see ours (dlpack,
ndarray; ordering).

The region keeps the other library's object until no Buffer needs it. That library may then use the
memory anew at once, and knows nothing of the streams that arenapy was told of: so the end of the
region waits for them, its own stream included.
"""
from arenapy.buffer.stream_hooks cimport StreamHooks
from arenapy.memory.region cimport Region

from arenapy.cuda.foreign cimport Foreign, of_dlpack, of_interface
from arenapy.cuda.ordering cimport Ordering
from arenapy.cuda.fence cimport follow

from arenapy.cuda.backing import device_memory, managed_memory, pinned_memory

cdef enum:
    NOWHERE = 256            # the address of what has no bytes: aligned, and never looked at
    LEGACY = 1               # the legacy default stream


def asbuffer(obj, stream=None):
    """A Buffer of another library's array, in its memory.

    Parameters
    ----------
    obj : object
        An array in C order with ``__cuda_array_interface__``, such as one of CuPy, torch or numba;
        or, with no such thing, one for :func:`from_dlpack`.
    stream : stream, optional
        On which it is to be used; by default the legacy default stream. It waits for the one that
        the array's library works on, as far as the interface says which.

    Returns
    -------
    Buffer
        A view with the array's shape and type, read-only if that is. It has no allocator, and
        keeps the array's memory, as far as its library lets it: `obj`, and by DLPack its storage.

    Raises
    ------
    TypeError
        It has no such interface.
    BufferError
        It is not contiguous, or masked; the message says what to do.
    ValueError, Unavailable, CudaError
        `stream` is none; there is no driver; the driver does not know the memory.

    Notes
    -----
    When the last Buffer of it is gone, this thread waits until the streams that it was used on are
    done with it: those given here, to copies and to ``record_stream``, and those of its consumers.
    This processor may look at managed and pinned memory at any time: synchronize before.
    Thread-safety: may be called from any thread.
    """
    array = of_interface(obj, stream)
    if array is not None:
        return borrow(array, stream)
    if hasattr(obj, "__dlpack__"):
        return from_dlpack(obj, stream)
    raise TypeError(
        f"this {type(obj).__name__} has neither __cuda_array_interface__ nor __dlpack__; "
        "arenapy.Existing takes what has a buffer"
    )


def from_dlpack(obj, stream=None):
    """A Buffer of another library's array, in its memory, by DLPack.

    Parameters
    ----------
    obj : object
        An array in C order with ``__dlpack__`` and ``__dlpack_device__``, on a device of CUDA or
        on the host.
    stream : stream, optional
        As for :func:`asbuffer`; for an array on the host None.

    Returns
    -------
    Buffer
        As of :func:`asbuffer`. It keeps what the producer's deleter ends, which is called once,
        when the last Buffer is gone and the streams that it was used on are done with it.

    Raises
    ------
    TypeError
        It has no such methods.
    BufferError
        It is not contiguous, of a type that NumPy has not, or on another device; or its DLPack is
        too new.
    ValueError, Unavailable, CudaError
        As of :func:`asbuffer`.

    Notes
    -----
    As of :func:`asbuffer`.
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
            follow(hooks.own_stream(), array.producer, False)
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
