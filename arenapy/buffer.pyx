"""Buffer: a block of an allocator or a range of a region, as the user holds it.

What lives here: the object, its one-word state (closed, held, live exports), the buffer
protocol, slices and views, copies. What does not: where bytes come from (region), who hands
them out (allocators), NumPy (ndarray), DLPack (dlpack).

The invariant kept here is the second of the design: a byte that somebody can still see is
never handed out again. Every way to see bytes goes through `acquire`, which marks the root
HELD under the keeper's lock, after asking the keeper whether the block is still valid; from
then on only the death of the Buffer object (`_root_dealloc`) ends the hold.

Why it is fast: a root Buffer is born from a freelist with its method table in place, is not
tracked by the cycle collector (what it keeps alive cannot reach a user's object, except over
foreign regions, where it is tracked), and its death is one function.
"""
cimport cython
from cpython.buffer cimport (
    PyBUF_ANY_CONTIGUOUS, PyBUF_C_CONTIGUOUS, PyBUF_F_CONTIGUOUS, PyBUF_FORMAT, PyBUF_ND,
    PyBUF_STRIDES, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer,
    PyBuffer_ToContiguous,
)
from cpython.mem cimport PyMem_Free, PyMem_Malloc
from cpython.object cimport PyObject
from cpython.ref cimport Py_INCREF
from cpython.slice cimport PySlice_AdjustIndices, PySlice_Unpack
from libc.stdlib cimport free
from libc.string cimport memcpy, memmove, memset

from arenapy.atomic cimport (
    ARENAPY_GIL, arenapy_add, arenapy_cas, arenapy_load, arenapy_lock_acquire,
    arenapy_lock_release, arenapy_store, arenapy_sub,
)

cdef extern from "Python.h":
    void PyObject_GC_Track(PyObject* o)
    void PyObject_GC_UnTrack(PyObject* o)
    void PyObject_GC_Del(void* o)
    bint PyLong_CheckExact(object o)
    Py_ssize_t PyLong_AsSsize_t(object o) except? -1

cdef extern from *:
    """
    /* tp_dealloc has no Cython spelling. */
    #define arenapy_set_dealloc(t, f) (((PyTypeObject *)(t))->tp_dealloc = (f))
    /* A dead object of a static type, its type and method table in place: alive again. */
    static inline PyObject *arenapy_revive(PyObject *o) {
        _Py_NewReference(o);
        return o;
    }
    """
    ctypedef void (*destructor)(PyObject*) noexcept
    void arenapy_set_dealloc(object type, destructor f)
    object arenapy_revive(PyObject* o)

cdef enum:
    CLOSED = 1
    HELD = 2
    ONE_EXPORT = 4
    MAX_ALIGN = 2 << 20
    MAX_NDIM = 64
    KEPT_OBJECTS = 256        # dead roots kept for reuse, about 30 KB
    NOGIL_BYTES = 1 << 18     # a copy of this size and more runs without the GIL

cdef PyObject* kept[KEPT_OBJECTS]
cdef int n_kept = 0
cdef object _ndarray = None   # arenapy.ndarray, imported when first needed
cdef object _dlpack = None


# ---- arguments ---------------------------------------------------------------------------

cdef Py_ssize_t as_size(object value, str what) except -1:
    """A count of bytes: an integer from 0 to the largest Py_ssize_t."""
    cdef object index
    cdef Py_ssize_t n
    try:
        index = value.__index__()
    except AttributeError:
        raise TypeError(
            f"{what}={value!r} is of type {type(value).__name__}; give a whole number of bytes"
        ) from None
    try:
        n = PyLong_AsSsize_t(index)
    except OverflowError:
        n = -1
        if index > 0:
            raise ValueError(
                f"{what}={index} is more than any address space holds; "
                f"the largest possible is {<Py_ssize_t>((<size_t>-1) >> 1)}"
            ) from None
    if n < 0:
        raise ValueError(f"{what}={index} is negative; give 0 or more bytes")
    return n


cdef Py_ssize_t as_align(object value) except -1:
    cdef Py_ssize_t n = as_size(value, "align")
    if n <= 0 or n & (n - 1) or n > MAX_ALIGN:
        raise ValueError(f"align={value} is not a power of two from 1 to {MAX_ALIGN}")
    return n


cdef int no_stream(Keeper keeper, object stream) except -1:
    """Host memory is not ordered by streams: say so instead of ignoring the argument."""
    if stream is not None:
        raise ValueError(
            f"stream={stream!r}: {keeper.kind} memory is not ordered by a stream; pass None, "
            "or use a source of arenapy.cuda"
        )
    return 0


# ---- keeper ------------------------------------------------------------------------------

cdef class Keeper:
    """What a Buffer's bytes belong to. Internal: a Region or an allocator's core."""

    def __cinit__(self, *args, **kwargs):
        self.kind = "host"
        self.device_id = -1
        self.host_accessible = True

    def __dealloc__(self):
        cdef Hold* hold
        while self.spare != NULL:
            hold = self.spare
            self.spare = hold.next
            free(hold)

    cdef bint alive(self, Buffer root) noexcept nogil:
        return True

    cdef void enlist(self, Hold* hold) noexcept nogil:
        pass

    cdef void give_back(self, Buffer root) noexcept nogil:
        pass

    cdef void ended(self, Hold* hold) noexcept nogil:
        free(hold)

    cdef bint has_holds(self) noexcept nogil:
        return False

    cdef void disable(self, int why) noexcept nogil:
        self.gone = why

    cdef void forked(self, bint unmapped) noexcept nogil:
        if unmapped:
            self.gone = GONE_FORKED

    cdef int lease_live(self, PyObject* region, int fd) noexcept nogil:
        return 0

    cdef int check(self) except -1:
        return 0

    cdef object owner_of(self):
        return None


# ---- state -------------------------------------------------------------------------------

cdef Buffer new_root(Keeper keeper, char* ptr, Py_ssize_t size, uint64_t tag, uint32_t pad):
    cdef Buffer b
    global n_kept
    if ARENAPY_GIL and n_kept > 0:
        n_kept -= 1
        b = <Buffer>arenapy_revive(kept[n_kept])
    else:
        b = Buffer.__new__(Buffer)
        PyObject_GC_UnTrack(<PyObject*>b)
    b.ptr = ptr
    b.size = size
    b.word = 0
    b.tag = tag
    b.pad = pad
    b.keeper = keeper
    if keeper.foreign:
        PyObject_GC_Track(<PyObject*>b)
    return b


cdef void _root_dealloc(PyObject* o) noexcept:
    """Ends the hold, if any, on whatever thread this is; then keeps the object for reuse.

    `o` has no references: nothing here may make one, so fields are read through casts.
    """
    global n_kept
    cdef PyObject* keeper = <PyObject*>(<Buffer>o).keeper
    if (<Keeper>keeper).foreign:
        PyObject_GC_UnTrack(o)
    if (<Buffer>o).hold != NULL:
        (<Keeper>keeper).ended((<Buffer>o).hold)
        (<Buffer>o).hold = NULL
    (<Buffer>o).keeper = None     # may end the keeper, and its region
    if ARENAPY_GIL and n_kept < KEPT_OBJECTS:
        kept[n_kept] = o
        n_kept += 1
    else:
        PyObject_GC_Del(o)


cdef Buffer root_of(Buffer buffer) noexcept:
    return (<View>buffer).root if buffer.is_view else buffer


cdef bint _root_open(Buffer root) noexcept:
    cdef uint64_t word = arenapy_load(&root.word)
    cdef bint valid
    if word & CLOSED or root.keeper.gone:
        return False
    if word & HELD:
        return True
    arenapy_lock_acquire(&root.keeper.lock)
    valid = root.keeper.alive(root) or arenapy_load(&root.word) & HELD != 0
    arenapy_lock_release(&root.keeper.lock)
    return valid


cdef bint is_open(Buffer buffer) noexcept:
    if buffer.is_view and arenapy_load(&buffer.word) & CLOSED:
        return False
    return _root_open(root_of(buffer))


cdef int check_open(Buffer buffer) except -1:
    if not is_open(buffer):
        raise ValueError(_why_closed(buffer))
    return 0


cdef str _why_closed(Buffer buffer):
    cdef Keeper keeper = root_of(buffer).keeper
    cdef str why = "it was released, or its frame was reset"
    if keeper is not None and keeper.gone == GONE_CLOSED:
        why = "its region was closed"
    elif keeper is not None and keeper.gone == GONE_FORKED:
        why = "its memory stayed with the parent process when this one was forked"
    return f"{_name(buffer)} is closed: {why}; allocate a new Buffer"


cdef bint is_readonly(Buffer buffer) noexcept:
    return buffer.keeper.readonly or (buffer.is_view and (<View>buffer).sealed)


cdef int acquire(Buffer buffer, bint count) except -1:
    cdef Buffer root = root_of(buffer)
    cdef uint64_t step = ONE_EXPORT if count else 0
    cdef uint64_t word
    cdef Hold* hold
    cdef bint held = False, no_memory = False
    check_open(buffer)
    if root.keeper.checked:
        root.keeper.check()
    word = arenapy_load(&root.word)
    while not held and word & (HELD | CLOSED) == HELD:
        held = arenapy_cas(&root.word, &word, word + step)
    if not held:
        arenapy_lock_acquire(&root.keeper.lock)
        word = arenapy_load(&root.word)
        if word == 0 and root.keeper.alive(root) and not root.keeper.gone:
            hold = new_hold(root.keeper)
            if hold != NULL:
                born_held(root, hold)
                arenapy_add(&root.word, step)
                held = True
            else:
                no_memory = True
        elif word & (HELD | CLOSED) == HELD:     # another thread was first
            arenapy_add(&root.word, step)
            held = True
        arenapy_lock_release(&root.keeper.lock)
    if no_memory:
        raise MemoryError("no memory for the record of an export")
    if not held:
        raise ValueError(_why_closed(buffer))
    if root is not buffer and count:
        arenapy_add(&buffer.word, ONE_EXPORT)
    return 0


cdef void born_held(Buffer root, Hold* hold) noexcept nogil:
    hold.start = <uintptr_t>root.ptr
    hold.end = hold.start + <size_t>root.size + (root.size == 0)   # a 0-byte block occupies one
    hold.tag = root.tag
    hold.pad = root.pad
    hold.flags = HOLD_EMPTY if root.size == 0 else 0
    root.hold = hold
    root.keeper.enlist(hold)
    arenapy_store(&root.word, HELD)


cdef void unacquire(Buffer buffer) noexcept:
    if buffer.is_view:
        arenapy_sub(&buffer.word, ONE_EXPORT)
    arenapy_sub(&root_of(buffer).word, ONE_EXPORT)


cdef str _name(Buffer buffer):
    """How messages call it: enough to find the block."""
    cdef Keeper keeper = root_of(buffer).keeper
    if keeper is None:
        return "<Buffer without memory>"
    owner = keeper.owner_of()
    return (
        f"the {keeper.kind} Buffer of {buffer.size} bytes at {<uintptr_t>buffer.ptr:#x}"
        + (f" of {type(owner).__name__}" if owner is not None else "")
    )


cdef tuple _lengths(View view):
    return tuple([view.dims[i] for i in range(view.ndim)])


cdef View _new_view(Buffer buffer, char* ptr, tuple shape, Py_ssize_t itemsize, object descr,
                    str typestr, bytes format, bint sealed):
    """A View of the root of `buffer`; the caller has checked that it fits."""
    cdef View v = View.__new__(View)
    cdef Py_ssize_t stride = itemsize
    cdef int i
    v.ndim = <int>len(shape)
    v.dims = <Py_ssize_t*>PyMem_Malloc(2 * max(v.ndim, 1) * sizeof(Py_ssize_t))
    if v.dims == NULL:
        raise MemoryError("no memory for the shape of a view")
    for i in range(v.ndim - 1, -1, -1):
        v.dims[i] = shape[i]
        v.dims[v.ndim + i] = stride
        stride *= v.dims[i]
    v.size = stride
    v.ptr = ptr
    v.is_view = True
    v.root = root_of(buffer)
    v.keeper = v.root.keeper
    v.shape = shape
    v.itemsize = itemsize
    v.descr = descr
    v.typestr = typestr
    v.format = format
    v.sealed = sealed
    v.word = 0
    return v


# ---- the object --------------------------------------------------------------------------

# no_gc_clear: the dealloc needs the keeper to the last. A cycle through a Buffer goes through
# a user's object too, which the collector can clear.
@cython.no_gc_clear
cdef class Buffer:
    """A block of memory, handed out by an allocator or viewed in a region.

    Buffers are made by ``allocator.alloc``, ``Region.buffer``, slicing and :meth:`view`,
    not by calling the class. Host-accessible Buffers export the buffer protocol, so that
    ``memoryview``, ``numpy.frombuffer``, ``socket.recv_into``, ``file.readinto`` and
    ``struct.pack_into`` work on them in place.

    A Buffer is *held* while it has a live export, and as long as the Buffer object lives
    once it was ever exported. What is held is never handed out again nor unmapped. The one
    boundary: an address kept after the Buffer is gone.

    Thread-safety: every method may be called from any thread; what the bytes hold is the
    caller's to order.
    """

    def __cinit__(self):
        self.word = CLOSED        # until its maker opens it

    def __init__(self):
        raise TypeError(
            "a Buffer is made by an allocator's alloc(), a region's buffer() or a slice, "
            "not by calling the class"
        )

    # -- facts

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.size

    @property
    def address(self) -> int:
        """Address of the first byte. Valid only while this Buffer is alive and open."""
        check_open(self)
        return <uintptr_t>self.ptr

    @property
    def kind(self) -> str:
        """Kind of memory: "host", "shared", "file", "existing", "pinned", "device", ..."""
        return root_of(self).keeper.kind if self.keeper is not None else "none"

    @property
    def device_id(self) -> int:
        """Ordinal of the device that the memory is on; -1 for the host."""
        return self.keeper.device_id if self.keeper is not None else -1

    @property
    def readonly(self) -> bool:
        """Whether exports are read-only."""
        return self.keeper is None or is_readonly(self)

    @property
    def allocator(self):
        """The allocator, or None once that is gone (the memory lives on) or if there is none."""
        return self.keeper.owner_of() if self.keeper is not None else None

    @property
    def closed(self) -> bool:
        """Whether it was released, or closed by a reset; any use then raises ValueError."""
        return not is_open(self)

    @property
    def held(self) -> bool:
        """Whether somebody may still see the bytes: was ever exported, or is exported now."""
        return arenapy_load(&root_of(self).word) & HELD != 0

    def __len__(self):
        if self.is_view:
            if (<View>self).ndim == 0:
                raise TypeError(f"{_name(self)} has no dimension, so no len(); nbytes is its size")
            return (<View>self).dims[0]
        return self.size

    def __bool__(self):
        return True

    def __repr__(self):
        cdef Buffer root = root_of(self)
        cdef uint64_t word = arenapy_load(&root.word)
        if not is_open(self):
            state = "closed"
        elif word & HELD:
            state = f"held, {word // ONE_EXPORT} live exports"
        else:
            state = "not held"
        owner = self.allocator
        of = f" of {type(owner).__name__}" if owner is not None else ""
        layout = ""
        if self.is_view and not ((<View>self).ndim == 1 and (<View>self).typestr == "|u1"):
            layout = f" {(<View>self).shape} {(<View>self).typestr!r}"
        return (
            f"<Buffer {self.kind} {self.size} bytes{layout} at {<uintptr_t>self.ptr:#x}{of}, "
            f"{state}>"
        )

    # -- release

    def release(self, stream=None):
        """Give the block back. A second release does nothing.

        The handle and its slices close at once. The bytes go back at once if they were never
        exported, else when the Buffer object is gone. On a slice or view: closes that one
        only.

        Raises
        ------
        BufferError
            If exports of it (or of anything below the root) are alive. Nothing changes.
        """
        cdef uint64_t word = arenapy_load(&self.word)
        cdef bint done = False
        if self.keeper is not None:
            no_stream(self.keeper, stream)
        while not word & CLOSED and not done:
            if word >= ONE_EXPORT:
                raise BufferError(
                    f"{_name(self)} has {word // ONE_EXPORT} live exports; drop or release the "
                    "memoryviews and DLPack tensors made from it first"
                )
            if word & HELD or self.is_view:
                done = arenapy_cas(&self.word, &word, word | CLOSED)
                continue
            arenapy_lock_acquire(&self.keeper.lock)
            word = arenapy_load(&self.word)
            if word == 0:
                if not self.keeper.gone and self.keeper.alive(self):
                    self.keeper.give_back(self)
                arenapy_store(&self.word, CLOSED)
                done = True
            arenapy_lock_release(&self.keeper.lock)

    def __enter__(self):
        check_open(self)
        return self

    def __exit__(self, kind, value, traceback):
        try:
            self.release()
        except BufferError:
            if kind is None:       # never mask the exception that is already on its way
                raise

    def record_stream(self, stream):
        """Hold the block until `stream` has done what is queued on it now.

        Raises
        ------
        ValueError
            On memory that no stream orders (every kind of this host-only family).
        """
        check_open(self)
        if stream is None:
            raise ValueError("stream=None names no stream")
        no_stream(self.keeper, stream)

    # -- slices and views

    def __getitem__(self, key):
        """A zero-copy slice along the first dimension; it keeps, and counts for, its root."""
        cdef Py_ssize_t start, stop, step, n, row
        cdef View v
        check_open(self)
        if not isinstance(key, slice):
            raise TypeError(
                f"a Buffer is sliced, not indexed: got {key!r}; memoryview(buffer)[i] reads a byte"
            )
        PySlice_Unpack(key, &start, &stop, &step)
        n = PySlice_AdjustIndices(len(self), &start, &stop, step)
        if step != 1:
            raise ValueError(
                f"step={step}: a slice of a Buffer is contiguous; "
                "slice memoryview(buffer) or buffer.array() with a step"
            )
        if not self.is_view:
            return _new_view(self, self.ptr + start, (n,), 1, None, "|u1", b"B", False)
        v = <View>self
        row = v.dims[v.ndim]
        return _new_view(
            self, v.ptr + start * row, (n,) + v.shape[1:], v.itemsize, v.descr, v.typestr,
            v.format, v.sealed,
        )

    def view(self, shape=None, dtype=None):
        """This memory with a shape and a type, as DLPack and the array interfaces report it.

        Parameters
        ----------
        shape : int or tuple of int, optional
            Lengths, in C order; one of them may be -1. By default one dimension that takes
            in all of the Buffer.
        dtype : dtype-like, default "u1"
            Any NumPy dtype without Python objects.

        Raises
        ------
        ValueError
            If the shape does not take in exactly the Buffer's bytes.
        TypeError
            If the dtype holds Python objects.
        """
        check_open(self)
        dtype, itemsize, typestr, format = _numpy().describe("u1" if dtype is None else dtype)
        shape = _numpy().fit(shape, itemsize, self.size, dtype)
        return _new_view(
            self, self.ptr, shape, itemsize, dtype, typestr, format, is_readonly(self)
        )

    def array(self, shape=None, dtype=None):
        """This memory as an ndarray, without copying (host-accessible memory only).

        Parameters and errors as for :meth:`view`; BufferError on device memory.
        """
        _host_only(self)
        if shape is None and dtype is None and self.is_view:
            return _numpy().view_as_array(self)
        return _numpy().view_as_array(self.view(shape, dtype))

    # -- contents

    def fill(self, value, stream=None):
        """Set every byte to `value`, a whole number from 0 to 255.

        Large fills run without the GIL.
        """
        cdef Py_ssize_t byte
        try:
            byte = value
        except OverflowError:
            byte = -1
        if not 0 <= byte <= 255:
            raise ValueError(f"value={value!r} is not a byte: give a number from 0 to 255")
        no_stream(self.keeper, stream)
        _writable(self)
        _move(self, self.ptr, NULL, self.size, <int>byte)

    def copy_from(self, source, stream=None):
        """Copy the bytes of `source` (any contiguous buffer of the same size) into this Buffer.

        Raises
        ------
        ValueError
            If the sizes differ; nothing is copied.
        BufferError
            If this Buffer is read-only.
        """
        no_stream(self.keeper, stream)
        _writable(self)
        _copy(self, source, True)
        return self

    def copy_to(self, target, stream=None):
        """Copy this Buffer's bytes into `target`, a writable contiguous buffer of the same size.

        Errors as for :meth:`copy_from`.
        """
        no_stream(self.keeper, stream)
        _host_only(self)
        _copy(self, target, False)
        return target

    # -- exports

    def __getbuffer__(self, Py_buffer* view, int flags):
        cdef View v
        view.obj = None
        _host_only(self)
        if flags & PyBUF_WRITABLE and is_readonly(self):
            raise BufferError(f"{_name(self)} is read-only; ask for a read-only view, or copy it")
        v = <View>self if self.is_view else None
        if v is not None:
            if flags & PyBUF_FORMAT and not flags & PyBUF_ND and v.descr is not None:
                raise BufferError(
                    f"{_name(self)} is typed {v.typestr!r}: ask for its shape (ND) too, or "
                    "for plain bytes without a format"
                )
            if flags & PyBUF_FORMAT and v.format is None:
                raise BufferError(
                    f"dtype {v.typestr!r} has no code in the buffer protocol; use array()"
                )
            if flags & PyBUF_F_CONTIGUOUS == PyBUF_F_CONTIGUOUS and not _f_contiguous(v):
                raise BufferError(
                    f"{_name(self)} of shape {v.shape} is in C order, and Fortran order was asked"
                )
        acquire(self, True)
        view.buf = self.ptr
        view.len = self.size
        view.readonly = is_readonly(self)
        view.suboffsets = NULL
        view.internal = NULL
        if v is None:
            view.itemsize = 1
            view.ndim = 1
            view.format = <char*>b"B" if flags & PyBUF_FORMAT else NULL
            view.shape = &view.len if flags & PyBUF_ND else NULL     # grow() may change size
            view.strides = (
                &view.itemsize if flags & PyBUF_STRIDES == PyBUF_STRIDES else NULL
            )
        else:
            view.itemsize = v.itemsize
            view.format = <char*>v.format if flags & PyBUF_FORMAT else NULL
            # Without ND the consumer takes the memory as one line of bytes.
            view.ndim = v.ndim if flags & PyBUF_ND else 1
            view.shape = v.dims if flags & PyBUF_ND and v.ndim else NULL
            view.strides = (
                v.dims + v.ndim if flags & PyBUF_STRIDES == PyBUF_STRIDES and v.ndim else NULL
            )
        view.obj = self

    def __releasebuffer__(self, Py_buffer* view):
        unacquire(self)

    @property
    def __array_interface__(self):
        """NumPy's array interface, version 3. Reading it marks the Buffer held."""
        if self.keeper is None or not self.keeper.host_accessible:
            raise AttributeError(f"{_name(self)} is not on the host; copy_to() brings it there")
        acquire(self, False)
        return _interface(self)

    @property
    def __cuda_array_interface__(self):
        """The CUDA array interface, version 3. Reading it marks the Buffer held."""
        if self.keeper is None or not self.keeper.device_accessible:
            raise AttributeError(f"{_name(self)} is not accessible to a CUDA device")
        acquire(self, False)
        return dict(_interface(self), stream=1)

    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None):
        """A DLPack capsule of this memory (see :mod:`arenapy.dlpack`)."""
        return _dl().capsule(self, stream, max_version, dl_device, copy)

    def __dlpack_device__(self):
        """``(device_type, device_id)`` in DLPack's numbers; ``(1, 0)`` is the host."""
        check_open(self)
        return _dl().device(self)

    def __reduce_ex__(self, protocol):
        """Plain pickle copies the bytes; protocol 5 passes them out of band when asked to."""
        check_open(self)
        from arenapy.pickling import reduce_buffer
        return reduce_buffer(self, protocol)


arenapy_set_dealloc(Buffer, _root_dealloc)


@cython.no_gc_clear
cdef class View(Buffer):
    """A slice or a typed view of a Buffer: same block, own layout. See :class:`Buffer`."""

    def __dealloc__(self):
        PyMem_Free(self.dims)

    @property
    def dtype(self):
        """The NumPy dtype of an item."""
        return _numpy().describe(self.typestr)[0] if self.descr is None else self.descr

    @property
    def strides(self) -> tuple:
        """Bytes from one element to the next, along each dimension."""
        return tuple([self.dims[self.ndim + i] for i in range(self.ndim)])


# ---- helpers -----------------------------------------------------------------------------

cdef object _numpy():
    global _ndarray
    if _ndarray is None:
        from arenapy import ndarray
        _ndarray = ndarray
    return _ndarray


cdef object _dl():
    global _dlpack
    if _dlpack is None:
        from arenapy import dlpack
        _dlpack = dlpack
    return _dlpack


cdef int _host_only(Buffer buffer) except -1:
    check_open(buffer)
    if not buffer.keeper.host_accessible:
        raise BufferError(
            f"{_name(buffer)} cannot be read by the host; copy it with copy_to(host_buffer)"
        )
    return 0


cdef int _writable(Buffer buffer) except -1:
    _host_only(buffer)
    if is_readonly(buffer):
        raise BufferError(f"{_name(buffer)} is read-only; copy it to a writable Buffer")
    return 0


cdef bint _f_contiguous(View v) noexcept:
    """C order is Fortran order too if at most one length is not 1, or there is no element."""
    cdef int i, long_dims = 0
    for i in range(v.ndim):
        if v.dims[i] == 0:
            return True
        long_dims += v.dims[i] > 1
    return long_dims <= 1


cdef dict _interface(Buffer buffer):
    cdef bint typed = buffer.is_view
    cdef dict fields = {}
    if typed and (<View>buffer).descr is not None and (<View>buffer).descr.names is not None:
        fields["descr"] = (<View>buffer).descr.descr
    return fields | {
        "version": 3,
        "shape": (<View>buffer).shape if typed else (buffer.size,),
        "typestr": (<View>buffer).typestr if typed else "|u1",
        "data": (<uintptr_t>buffer.ptr, bool(is_readonly(buffer))),
        "strides": None,
    }


cdef int _copy(Buffer buffer, object other, bint inward) except -1:
    """Copy between `buffer` and `other`, another object with a buffer, either way."""
    cdef Py_buffer o
    PyObject_GetBuffer(other, &o, PyBUF_ANY_CONTIGUOUS | (0 if inward else PyBUF_WRITABLE))
    try:
        if o.len != buffer.size:
            raise ValueError(
                f"{_name(buffer)} has {buffer.size} bytes and the other side has {o.len}; "
                "slice the larger one"
            )
        if inward:
            _move(buffer, buffer.ptr, <char*>o.buf, o.len, 0)
        else:
            _move(buffer, <char*>o.buf, buffer.ptr, o.len, 0)
    finally:
        PyBuffer_Release(&o)
    return 0


cdef int _move(Buffer buffer, char* to, const char* source, Py_ssize_t n, int byte) except -1:
    """Move n bytes (or set them, without a source), none of which `buffer` loses meanwhile.

    Small moves happen under the keeper's lock; large ones without the GIL, for which the
    Buffer has to be held, and stays so as after an export.
    """
    cdef Keeper keeper = root_of(buffer).keeper
    cdef bint valid
    if keeper.checked:
        keeper.check()
    if n < NOGIL_BYTES:
        valid = is_open(buffer)
        arenapy_lock_acquire(&keeper.lock)
        valid = valid and (buffer_is_held(buffer) or keeper.alive(root_of(buffer)))
        if valid:
            move_or_set(to, source, n, byte)
        arenapy_lock_release(&keeper.lock)
        if not valid:
            raise ValueError(_why_closed(buffer))
        return 0
    acquire(buffer, True)
    with nogil:
        move_or_set(to, source, n, byte)
    unacquire(buffer)
    return 0


cdef inline bint buffer_is_held(Buffer buffer) noexcept:
    return arenapy_load(&root_of(buffer).word) & HELD != 0


cdef inline void move_or_set(
    char* to, const char* source, Py_ssize_t n, int byte
) noexcept nogil:
    if source == NULL:
        memset(to, byte, n)
    else:
        memmove(to, source, n)
