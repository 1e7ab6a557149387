"""Buffer: a block of an allocator or a range of a region, as the user holds it.

What lives here: the object's life, the buffer protocol, slices and views, and moving bytes into it
and out of it while nobody can take it away. What does not: the state behind it (block), NumPy
(ndarray), DLPack (dlpack), copies by a stream (arenapy.cuda).

Why it is fast: a root Buffer is born from its owner's freelist, with owner and method table
in place. It is not tracked by the cycle collector: what it keeps alive cannot reach a user's
object, except over foreign regions, where it is tracked. Its death is one function.
"""
cimport cython
from cpython.buffer cimport (
    PyBUF_ANY_CONTIGUOUS, PyBUF_F_CONTIGUOUS, PyBUF_FORMAT, PyBUF_ND, PyBUF_STRIDES, PyBUF_WRITABLE,
    PyBuffer_Release, PyObject_GetBuffer,
)
from cpython.mem cimport PyMem_Free, PyMem_Malloc
from cpython.object cimport PyObject
from cpython.slice cimport PySlice_AdjustIndices, PySlice_Unpack
from libc.stdint cimport uint64_t, uintptr_t
from libc.string cimport memmove, memset, strchr

import re

from arenapy.base.assertion cimport arenapy_assert
from arenapy.base.atomic cimport (
    ARENAPY_GIL, arenapy_cas, arenapy_load, arenapy_lock_acquire, arenapy_lock_release,
    arenapy_store,
)
from arenapy.buffer.block cimport (
    CLOSED, HELD, KEPT_OBJECTS, ONE_EXPORT, Block, Freelist, MemoryOwner, StreamHooks, acquire,
    check_open, end_hold, freelist_of, host_only, is_open, is_open_locked, is_readonly, name_of,
    named_stream, pin, place_of, root_of, take_shard, unacquire, unpin, why_closed, writable,
)
from arenapy.base.sealed cimport seal

from arenapy.base.text import format_bytes

cdef enum:
    NOGIL_BYTES = 1 << 18     # a copy of this size and more runs without the GIL

cdef extern from "Python.h":
    void PyObject_GC_UnTrack(PyObject* o)
    void PyObject_GC_Del(void* o)
    void count_down "Py_DECREF" (PyObject* o) noexcept

cdef extern from *:
    """
    /* tp_dealloc has no Cython spelling. */
    #define arenapy_set_dealloc(t, f) (((PyTypeObject *)(t))->tp_dealloc = (f))
    """
    ctypedef void (*destructor)(PyObject*) noexcept
    void arenapy_set_dealloc(object type, destructor f)

cdef object _ndarray = None, _dlpack = None       # modules: see _numpy and _dl


cdef Buffer fresh_block(MemoryOwner owner):
    cdef Buffer b = Buffer.__new__(Buffer)
    b.owner = owner
    if not owner.foreign:                   # looked at once: another thread may make it so
        PyObject_GC_UnTrack(<PyObject*>b)
        take_shard(b)
    return b


cdef Buffer new_range(MemoryOwner owner, char* ptr, Py_ssize_t size):
    cdef Buffer b = new_block(owner, size)
    b.ptr = ptr
    b.tag = 0
    b.pad = 0
    return b


cdef void _root_dealloc(PyObject* o) noexcept:
    """Ends the hold, if any, on whatever thread this is; then keeps the object for reuse.

    `o` has no references: nothing here may make one, so fields are read through casts. One that
    is kept still points to its owner, uncounted: the owner frees it before it goes.
    """
    cdef PyObject* owner = <PyObject*>(<Buffer>o).owner
    cdef PyObject* counted = (<Buffer>o).shard if not ARENAPY_GIL else NULL
    cdef Freelist* freelist
    # Tracked: over foreign memory, and a View for which there was no memory.
    cdef bint tracked = owner == <PyObject*>None or (<MemoryOwner>owner).foreign
    arenapy_assert((<Buffer>o).word < ONE_EXPORT, b"a Buffer ends after its exports")
    if tracked:
        PyObject_GC_UnTrack(o)
    if (<Buffer>o).hold != NULL:
        end_hold(o)
    elif owner != <PyObject*>None and (<MemoryOwner>owner).recycles:
        (<MemoryOwner>owner).drop_block(o)
    freelist = NULL if tracked else freelist_of(owner)
    if (freelist != NULL and freelist.n_kept < KEPT_OBJECTS
            and (ARENAPY_GIL or freelist.shard != NULL)):
        (<Buffer>o).ptr = <char*>freelist.kept
        freelist.kept = o
        freelist.n_kept += 1
    else:
        PyObject_GC_Del(o)
    count_down(owner if counted == NULL else counted)     # may end the owner, and its region


cdef View new_view(Buffer buffer, char* ptr, tuple shape, Py_ssize_t itemsize, object descr,
                   str typestr, bytes format, bint sealed):
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
    v.root = root_of(buffer)
    v.owner = v.root.owner
    v.shape = shape
    v.itemsize = itemsize
    v.descr = descr
    v.typestr = typestr
    v.format = format
    v.sealed = sealed
    v.word = 0
    return v


@cython.no_gc_clear               # as for Block
cdef class Buffer(Block):
    """A block of memory, handed out by an allocator or viewed in a region.

    Buffers are made by ``allocator.alloc``, ``Region.buffer``, slicing and :meth:`view`,
    not by calling the class. Host-accessible Buffers export the buffer protocol, so that
    ``memoryview``, ``numpy.frombuffer``, ``socket.recv_into``, ``file.readinto`` and
    ``struct.pack_into`` work on them in place.

    A Buffer is *held* while it has a live export. If it was ever exported, it is also held as
    long as the Buffer object lives. Held memory is never reused and never unmapped. An address
    that is kept after the Buffer is gone does not hold the memory.

    Thread-safety: every method is thread-safe. Coordinating access to the bytes is up to the
    caller.

    Examples
    --------
    >>> import arenapy
    >>> pool = arenapy.Pool()
    >>> with pool.alloc(4096) as block:
    ...     block.fill(7)
    ...     x = block.array((64, 16), "f4")
    ...     memoryview(block)[0], x.shape
    (7, (64, 16))
    >>> del x                                # the memory returns to the pool
    """

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
        return self.owner.kind

    @property
    def device_id(self) -> int:
        """Ordinal of the device that the memory is on; -1 for the host."""
        return self.owner.device_id

    @property
    def readonly(self) -> bool:
        """True if exports are read-only."""
        return is_readonly(self)

    @property
    def allocator(self):
        """The allocator. None if there is none, or if it is gone (the memory lives on)."""
        return self.owner.allocator_of()

    @property
    def closed(self) -> bool:
        """True after a release, or after a reset closed it. Any use then raises ValueError."""
        return not is_open(self)

    @property
    def held(self) -> bool:
        """True if the Buffer is exported now, or ever was, so that other code may see the bytes."""
        return arenapy_load(&root_of(self).word) & HELD != 0

    def __len__(self):
        if self.root is not None:
            if (<View>self).ndim == 0:
                raise TypeError(f"{name_of(self)} has no dimension, so no len(); see nbytes")
            return (<View>self).dims[0]
        return self.size

    def __repr__(self):
        cdef Buffer root = root_of(self)
        cdef uint64_t word = arenapy_load(&root.word)
        if not is_open(self):
            state = "closed"
        elif word & HELD:
            state = f"held, {word // ONE_EXPORT} live exports"
        else:
            state = "not held"
        allocator = self.allocator
        of = f" of {type(allocator).__name__}" if allocator is not None else ""
        layout = ""
        if self.root is not None and not ((<View>self).ndim == 1 and (<View>self).typestr == "|u1"):
            layout = f" {(<View>self).shape} {(<View>self).typestr!r}"
        return (
            f"<Buffer {self.kind} {format_bytes(self.size)}{layout} at "
            f"{<uintptr_t>self.ptr:#x}{of}, "
            f"{state}{place_of(self)}>"
        )

    # -- release

    def release(self, stream=None):
        """Free the block. A second release does nothing.

        The Buffer and its slices close at once. The bytes are free at once if they were never
        exported, otherwise when the Buffer object is gone. For a slice or view, only this slice or
        view is closed.

        Parameters
        ----------
        stream : stream, optional
            A stream that still uses the block, as for :meth:`record_stream`.

        Raises
        ------
        BufferError
            If exports of it (or of a slice or view of the block) are alive. Nothing has changed
            then.

        Examples
        --------
        >>> slab = arenapy.Slab(4096, count=1)
        >>> slab.alloc().release()               # the item is free again
        >>> slab.count
        0
        """
        cdef uint64_t word
        cdef bint done = False, mine = False
        word = arenapy_load(&self.word)
        if stream is not None and is_open(self) and word < ONE_EXPORT:
            self.record_stream(stream)
            word = arenapy_load(&self.word)
        while not word & CLOSED and not done:
            if word >= ONE_EXPORT and not arenapy_load(&root_of(self).word) & HELD:
                raise BufferError(
                    f"{name_of(self)} is in use by a call that has not returned; release it then"
                )
            if word >= ONE_EXPORT:
                raise BufferError(
                    f"{name_of(self)} has {word // ONE_EXPORT} live exports; drop or release the "
                    "memoryviews and DLPack tensors made from it first"
                )
            if word & HELD or self.root is not None:
                done = arenapy_cas(&self.word, &word, word | CLOSED)
                continue
            if self.owner.debug and not self.owner.recycles and is_open(self):
                self.owner.leaving(self.ptr)     # before somebody may have the bytes
            arenapy_lock_acquire(&self.owner.lock)
            word = arenapy_load(&self.word)
            if word == 0:
                mine = not self.owner.gone and self.owner.alive(self)
                if mine and not self.owner.recycles:
                    self.owner.release_block(self)
                arenapy_store(&self.word, CLOSED)
                done = True
            arenapy_lock_release(&self.owner.lock)
            # A closed root is this call's alone. Not under the lock: this may write a recording,
            # and ask whether another process sees the block.
            if mine and self.owner.recycles:
                if self.owner.debug:
                    self.owner.leaving(self.ptr)
                self.owner.release_block(self)
            if done and self.hold != NULL:   # streams use it
                end_hold(<PyObject*>self)
            if self.owner.debug:
                self.owner.verify()

    def grow(self, nbytes):
        """Grow the block to `nbytes` and keep its contents, as the allocator's ``grow`` does.

        Parameters
        ----------
        nbytes : int
            The new size in bytes, at least the present size.

        Returns
        -------
        Buffer
            The same Buffer if the block grows in place, else a new one. The old one is released
            then.

        Raises
        ------
        ValueError
            If this is no block of a Bump or Pool, or the allocator is gone, or the block is larger
            than `nbytes`.
        BufferError, CudaError, OutOfMemory
            As :meth:`Pool.grow` and :meth:`Bump.grow`. Nothing has changed then.

        Examples
        --------
        >>> pool = arenapy.Pool(max_bytes=256 << 20, source=arenapy.Host(grow=True))
        >>> block = pool.alloc(1 << 20)
        >>> block.grow(100 << 20) is block       # in place, because nothing lies behind it
        True
        """
        check_open(self)
        grow = getattr(self.allocator, "grow", None)
        if grow is None:
            raise ValueError(
                f"{self!r} is not a block of a Bump or Pool that still exists, so it cannot grow")
        return grow(self, nbytes)

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
        """Tell the allocator that `stream` uses the block.

        After the release, the block is not reused until `stream` has done all work that it had
        received when the block was released.

        Parameters
        ----------
        stream : stream
            A stream of any library that uses the block.

        Raises
        ------
        ValueError, TypeError
            If streams do not order this memory, or `stream` is not a stream.

        Examples
        --------
        >>> from arenapy import cuda
        >>> block = arenapy.Pool(source=cuda.Device()).alloc(4096)
        >>> with cuda.Stream() as other:
        ...     block.record_stream(other)       # a kernel on `other` uses the block
        ...     block.release()                  # its bytes wait for `other`
        """
        check_open(self)
        if stream is None:
            raise ValueError("stream=None names no stream")
        used_by = named_stream(self.owner, stream)
        self.owner.hooks.use(self, used_by)

    # -- slices and views

    def __getitem__(self, key):
        """A zero-copy slice along the first dimension. It keeps the whole block alive."""
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
        if self.root is None:
            return new_view(self, self.ptr + start, (n,), 1, None, "|u1", b"B", False)
        v = <View>self
        row = v.dims[v.ndim]
        return new_view(
            self, v.ptr + start * row, (n,) + v.shape[1:], v.itemsize, v.descr, v.typestr,
            v.format, v.sealed,
        )

    def __setitem__(self, key, value):
        """``buffer[start:stop] = value`` copies bytes, as ``buffer[start:stop].copy_from(value)``.

        `value` is a buffer of the same size. A typed view refuses this, because it would not be
        clear whether values are converted or bytes are copied.
        """
        cdef Buffer part
        if self.root is not None and (<View>self).descr is not None:
            raise TypeError(
                f"{name_of(self)} is typed {(<View>self).typestr!r}: write array()[...] = values, "
                "or view[start:stop].copy_from(data) to copy bytes"
            )
        if not isinstance(key, slice):
            raise TypeError(
                f"a Buffer is sliced, not indexed: got {key!r}; memoryview(buffer)[i] = value "
                "writes a byte"
            )
        if isinstance(value, int):
            raise TypeError(
                f"value={value!r} has no bytes: buffer[start:stop].fill({value!r}) sets each byte"
            )
        part = self[key]
        copy_in(part, value, None)

    def view(self, shape=None, dtype=None):
        """This memory with a shape and a type, as DLPack and the array interfaces report it.

        Parameters
        ----------
        shape : int or tuple of int, optional
            Lengths in C order, of the whole Buffer or of its first bytes. One length may be -1,
            which means all that is left. The default is one dimension over the whole Buffer.
        dtype : dtype-like, default "u1"
            Any NumPy dtype without Python objects.

        Raises
        ------
        ValueError
            If the shape needs more bytes than the Buffer has, or -1 leaves a remainder.
        TypeError
            If the dtype holds Python objects.

        Examples
        --------
        >>> block = arenapy.Pool().alloc(4096)
        >>> image = block.view((32, 32), "f4")
        >>> image.shape, image.dtype.name, image.nbytes
        ((32, 32), 'float32', 4096)
        """
        check_open(self)
        return _numpy().view(self, shape, dtype)

    def array(self, shape=None, dtype=None):
        """This memory as an ndarray, without copying (host-accessible memory only).

        Parameters
        ----------
        shape : int or tuple of int, optional
            As for :meth:`view`.
        dtype : dtype-like, default "u1"
            As for :meth:`view`.

        Returns
        -------
        numpy.ndarray
            It keeps the memory: the block is freed when the last array over it is gone.

        Raises
        ------
        ValueError, TypeError
            As :meth:`view`.
        BufferError
            If the memory is on a device.

        Examples
        --------
        >>> block = arenapy.Pool().alloc(4096)
        >>> x = block.array((-1, 4), "f4")
        >>> x.shape, x.ctypes.data == block.address
        ((256, 4), True)
        """
        host_only(self)
        if shape is None and dtype is None and self.root is not None:
            return _numpy().view_as_array(self)
        return _numpy().view_as_array(_numpy().view(self, shape, dtype))

    # -- contents

    def fill(self, value, stream=None):
        """Set every byte to `value`.

        Large fills run without the GIL.

        Parameters
        ----------
        value : int
            From 0 to 255.
        stream : stream, optional
            For memory of arenapy.cuda: the stream that fills it. By default, the fill is done on
            return.

        Examples
        --------
        >>> block = arenapy.Pool().alloc(4)
        >>> block.fill(255)
        >>> bytes(block)
        b'\\xff\\xff\\xff\\xff'
        """
        fill_bytes(self, value, stream)

    def copy_from(self, source, stream=None):
        """Copy the bytes of `source` (any contiguous buffer of the same size) into this Buffer.

        The bytes stay in the order in which they lie in memory, whatever the shapes: an array in
        Fortran's order arrives transposed.

        Parameters
        ----------
        source : buffer
            For memory of arenapy.cuda, also an object with __cuda_array_interface__ or DLPack.
        stream : stream, optional
            If this Buffer or `source` is memory of arenapy.cuda: the stream that copies. Both are
            held until it has finished. By default, the copy is done on return.

        Raises
        ------
        ValueError
            If the sizes differ. Nothing is copied then.
        BufferError
            If this Buffer is read-only.

        Examples
        --------
        >>> block = arenapy.Pool().alloc(5)
        >>> bytes(block.copy_from(b"hello"))
        b'hello'
        """
        copy_in(self, source, stream)
        return self

    def copy_to(self, target, stream=None):
        """Copy the bytes into `target`, a writable buffer.

        Parameters
        ----------
        target : buffer
            Writable, contiguous and of the same size; otherwise as `source` of :meth:`copy_from`.
        stream : stream, optional
            As for :meth:`copy_from`.

        Returns
        -------
        buffer
            `target`.

        Raises
        ------
        ValueError, BufferError
            As :meth:`copy_from`.

        Examples
        --------
        >>> block = arenapy.Pool().alloc(5).copy_from(b"hello")
        >>> block.copy_to(bytearray(5))
        bytearray(b'hello')
        """
        copy_out(self, target, stream)
        return target

    # -- exports

    def __getbuffer__(self, Py_buffer* view, int flags):
        cdef View v
        view.obj = None
        host_only(self)
        if flags & PyBUF_WRITABLE and is_readonly(self):
            raise BufferError(f"{name_of(self)} is read-only; ask for a read-only view, or copy it")
        if self.root is not None:
            v = <View>self
            if flags & PyBUF_FORMAT and not flags & PyBUF_ND and v.descr is not None:
                raise BufferError(
                    f"{name_of(self)} is typed {v.typestr!r}: ask for its shape (ND) too, or "
                    "for plain bytes without a format"
                )
            if flags & PyBUF_FORMAT and v.format is None:
                raise BufferError(
                    f"dtype {v.typestr!r} has no code in the buffer protocol; use array()"
                )
            if flags & PyBUF_F_CONTIGUOUS == PyBUF_F_CONTIGUOUS and not _f_contiguous(v):
                raise BufferError(
                    f"{name_of(self)} of shape {v.shape} is in C order, and Fortran order was asked"
                )
        acquire(self, True)
        view.buf = self.ptr
        view.len = self.size
        view.readonly = is_readonly(self)
        view.suboffsets = NULL
        view.internal = NULL
        if self.root is None:
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
        if not self.owner.host_accessible:
            raise AttributeError(f"{name_of(self)} is not on the host; copy_to() brings it there")
        fields = _numpy().interface(self)
        acquire(self, False)
        return fields

    @property
    def __cuda_array_interface__(self):
        """The CUDA array interface, version 3. Reading it marks the Buffer held; see `offer`."""
        if not self.owner.device_accessible:
            raise AttributeError(f"{name_of(self)} is not accessible to a CUDA device")
        return _numpy().cuda_interface(self)

    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None):
        """A DLPack capsule of this memory (see :mod:`arenapy.buffer.dlpack`)."""
        return _dl().capsule(self, stream, max_version, dl_device, copy)

    def __dlpack_device__(self):
        """``(device_type, device_id)`` in DLPack's numbers; ``(1, 0)`` is the host."""
        check_open(self)
        return _dl().device(self)

    def __reduce_ex__(self, protocol):
        """Plain pickle copies the bytes. Protocol 5 can pass them out of band."""
        check_open(self)
        from arenapy.buffer.pickling import reduce_buffer
        return reduce_buffer(self, protocol)


seal(
    Buffer,
    "a Buffer is made by an allocator's alloc(), a region's buffer() or a slice, not by "
    "calling the class",
)


arenapy_set_dealloc(Buffer, _root_dealloc)


@cython.no_gc_clear
cdef class View(Buffer):
    """A slice or a typed view of a Buffer, with its own layout. See :class:`Buffer`."""

    def __dealloc__(self):
        PyMem_Free(self.dims)

    @property
    def dtype(self):
        """The NumPy dtype of an item."""
        return _numpy().dtype_of(self)

    @property
    def strides(self) -> tuple:
        """Bytes from one element to the next, along each dimension."""
        return tuple([self.dims[self.ndim + i] for i in range(self.ndim)])


seal(View, "a View is made by slicing a Buffer, or by its view(), not by calling the class")


# Imported when first needed: both import this module.

cdef object _numpy():
    global _ndarray
    if _ndarray is None:
        from arenapy.buffer import ndarray as _ndarray
    return _ndarray


cdef object _dl():
    global _dlpack
    if _dlpack is None:
        from arenapy.buffer import dlpack as _dlpack
    return _dlpack


cdef bint _f_contiguous(View v) noexcept:
    """C order is Fortran order too if at most one length is not 1, or there is no element."""
    cdef int i, long_dims = 0
    for i in range(v.ndim):
        if v.dims[i] == 0:
            return True
        long_dims += v.dims[i] > 1
    return long_dims <= 1

# ---- moving bytes: copies by this processor, or the choice of a stream ------------------------


# A name of a field stands between colons, and ctypes lets it have some itself. What is left without
# the names has then something that no format has; or what was taken for a name has something that
# reads like a reference.
cdef object NAME = re.compile(":([^:]*):")
cdef object ITEMS = re.compile(r"[\s\d(),@=<>!^|&{}TXZ?cbBhHiIlLqQnNefdgFDspPxwuUt]*")
cdef object OBJECT = re.compile(r"[@=<>!^|&)\d]O")


def refuse_objects(str format not None, other):
    """Raise TypeError if a buffer of this format holds references: bytes over them would crash."""
    if "O" not in format:
        return
    if not ITEMS.fullmatch(NAME.sub("", format)) or any(map(OBJECT.search, NAME.findall(format))):
        raise TypeError(
            f"this {type(other).__name__} holds Python objects, or its field names look like them "
            f"(format {format!r}). Objects cannot be copied as bytes; pass an array of numbers, "
            "like array.astype(float)"
        )


def as_bytes(thing):
    """`thing`, or the bytes of an array for whose type NumPy has no buffer, such as dates."""
    cdef bint refused = False
    try:
        memoryview(thing)
    except ValueError:
        refused = True
    except (TypeError, BufferError):
        pass
    if refused and hasattr(getattr(thing, "flags", None), "forc"):
        import numpy
        array = numpy.asarray(thing)         # of no class that has methods of its own
        return array.view(f"V{array.itemsize}")
    return thing


cdef int copy_in(Block block, object source, object stream) except -1:
    cdef StreamHooks hooks = either_hooks(block, source)
    if hooks is not None:
        return hooks.copy(block, source, stream)
    writable(block)
    named_stream(block.owner, stream)
    return copy_bytes(block, source, True)


cdef int copy_out(Block block, object target, object stream) except -1:
    cdef StreamHooks hooks = either_hooks(block, target)
    if hooks is not None:
        return hooks.copy(target, block, stream)
    host_only(block)
    named_stream(block.owner, stream)
    return copy_bytes(block, target, False)


cdef int fill_bytes(Block block, object value, object stream) except -1:
    cdef Py_ssize_t byte
    try:
        byte = value
    except (OverflowError, TypeError):
        byte = -1
    if not 0 <= byte <= 255:
        raise ValueError(f"value={value!r} is not a byte: give a number from 0 to 255")
    if block.owner.hooks is not None:
        return block.owner.hooks.fill(block, <int>byte, stream)
    writable(block)
    named_stream(block.owner, stream)
    return move_bytes(block, block.ptr, NULL, block.size, <int>byte)


cdef StreamHooks either_hooks(Block block, object other):
    """The stream hooks of the first of both that has some; None if neither has."""
    cdef StreamHooks hooks = block.owner.hooks
    if hooks is None and isinstance(other, Block):
        hooks = (<Block>other).owner.hooks
    return hooks


cdef int copy_bytes(Block block, object other, bint inward) except -1:
    """Copy between `block` and `other`, another object with a block, either way."""
    cdef Py_buffer o
    if isinstance(other, Block):
        return copy_block(block, <Block>other, inward)
    if not inward and isinstance(other, bytes):
        raise BufferError("target is bytes, which cannot be written; give a bytearray")
    cdef int flags = PyBUF_ANY_CONTIGUOUS | PyBUF_FORMAT | (0 if inward else PyBUF_WRITABLE)
    try:
        PyObject_GetBuffer(other, &o, flags)
    except ValueError:
        memory = as_bytes(other)
        if memory is other:
            raise
        PyObject_GetBuffer(memory, &o, flags)
    try:
        if o.format != NULL and strchr(o.format, c"O") != NULL:
            refuse_objects((<bytes>o.format).decode("utf-8", "replace"), other)
        same_size(block, o.len)
        if inward:
            move_bytes(block, block.ptr, <char*>o.buf, o.len, 0)
        else:
            move_bytes(block, <char*>o.buf, block.ptr, o.len, 0)
    finally:
        PyBuffer_Release(&o)
    return 0


cdef int copy_block(Block block, Block other, bint inward) except -1:
    """The same with another Buffer, which is not exported for it."""
    if inward:
        host_only(other)
    else:
        writable(other)
    pin(other)                               # from here on its size stays
    try:
        same_size(block, other.size)
        if inward:
            move_bytes(block, block.ptr, other.ptr, other.size, 0)
        else:
            move_bytes(block, other.ptr, block.ptr, other.size, 0)
    finally:
        unpin(other)
    return 0


cdef int same_size(Block block, Py_ssize_t nbytes) except -1:
    if nbytes != block.size:
        raise ValueError(
            f"{name_of(block)} has {block.size} bytes and the other side has {nbytes}; slice the "
            "larger one"
        )
    return 0


cdef int move_bytes(Block block, char* to, const char* source, Py_ssize_t n, int byte) except -1:
    """Move n bytes (or set them, without a source), none of which `block` loses meanwhile.

    Small moves happen under the owner's lock; large ones without the GIL, for which the Buffer is
    pinned.
    """
    cdef MemoryOwner owner = root_of(block).owner
    cdef bint valid
    if owner.checked:
        owner.check()
    if n < NOGIL_BYTES:
        arenapy_lock_acquire(&owner.lock)
        valid = is_open_locked(block)
        if valid:
            _move_or_set(to, source, n, byte)
        arenapy_lock_release(&owner.lock)
        if not valid:
            raise ValueError(why_closed(block))
        return 0
    pin(block)
    with nogil:
        _move_or_set(to, source, n, byte)
    unpin(block)
    return 0


cdef inline void _move_or_set(
    char* to, const char* source, Py_ssize_t n, int byte
) noexcept nogil:
    if source == NULL:
        memset(to, byte, n)
    else:
        memmove(to, source, n)
