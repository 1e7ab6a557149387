"""Allocator: what Bump, Slab and Pool have in common.

What lives here: everything that can be said with `block`, the one thing that differs. Arrays
are such a thing: an array is a block, held from birth, with an ndarray over it.
"""
from cpython.exc cimport PyErr_SetObject, PyErr_WriteUnraisable
from cpython.object cimport PyObject
from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.stdint cimport uintptr_t
from libc.string cimport memcpy, memset
from posix.unistd cimport getpid

import weakref
from collections.abc import Mapping

import numpy as np

from arenapy.base.identity cimport id_of
from arenapy.base.sizes cimport HOST_ALIGN
from arenapy.base.atomic cimport (
    arenapy_finalizing, arenapy_lock_acquire, arenapy_lock_release,
)
from arenapy.buffer.block cimport (
    ONE_EXPORT, MemoryOwner, check_open, host_only, is_open_locked, named_stream,
)
from arenapy.buffer.buffer cimport Buffer
from arenapy.buffer.ndarray cimport Spec, as_array, assign, parse, wrap
from arenapy.memory.region cimport Region, ask_source
from arenapy.allocator.allocator_core cimport AllocatorCore, check_alike
from arenapy.base.sealed cimport seal

cdef extern from "Python.h":
    void PyObject_GC_Track(PyObject* o)
    void PyObject_GC_UnTrack(PyObject* o)
    void PyErr_Fetch(PyObject** kind, PyObject** value, PyObject** trace) noexcept
    void PyErr_Restore(PyObject* kind, PyObject* value, PyObject* trace) noexcept
    int Py_AddPendingCall(int (*function)(void*) except -1, void* argument) noexcept
    unsigned long PyThread_get_thread_native_id() noexcept

cdef enum:
    NOGIL_BYTES = 1 << 18    # clearing this much and more runs without the GIL
    PAGE = 4096

from arenapy.diagnostics.leaks import remember
from arenapy.memory.sources import Existing, File, Host, Shared


# Not in the module's dict, which the interpreter empties while allocators still end.
cdef dict alive = {}         # weak references to all that live, by id
cdef list at_end = []        # to be called with each that is about to end
cdef list at_reset = []      # to be called with each whose peak is about to be restarted


def live_allocators():
    """All allocators of this process that are alive now, in no order."""
    found = [reference() for reference in alive.copy().values()]
    return [one for one in found if one is not None]


def call_at_end(note):
    """Call `note(allocator)` whenever an allocator, whole as yet, is about to end.

    It must be compiled: a signal's exception at a bytecode of it would be printed, and lost.
    """
    at_end.append(note)


def call_at_reset(note):
    """Call `note(allocator)` whenever the peak of an allocator is about to be restarted."""
    at_reset.append(note)


def note_reset(Allocator allocator):
    """Before `reset_peak()`."""
    for note in at_reset:
        note(allocator)


cdef int complete(Allocator one) except -1:
    """The end of a constructor: only now other code can get hold of it."""
    cdef AllocatorCore c = one.base
    reference = weakref.ref(one)
    if c.debug:
        c.ledger.allocator = reference
        remember(c.ledger)
    alive[id_of(one)] = c.allocator = reference
    PyObject_GC_Track(<PyObject*>one)
    return 0


cdef int hide(Allocator one) except -1:
    alive.pop(id_of(one), None)
    return 0


cdef class Allocator:
    """The base class of :class:`Bump`, :class:`Slab` and :class:`Pool`, for ``isinstance``.

    You cannot make one by calling the class.

    Examples
    --------
    >>> import arenapy
    >>> isinstance(arenapy.Pool(), arenapy.Allocator)
    True
    """

    def __cinit__(self, *args, **kwargs):
        PyObject_GC_UnTrack(<PyObject*>self)     # until it is whole: see `complete`

    def __del__(self):
        if arenapy_finalizing():             # what is to be called may be gone
            return
        if self.base is None or self.base.allocator is None:
            return                           # it was never whole
        if self.base.debug:
            # Memory is left alone now: the collector may take what is left apart in any order.
            self.base.ledger.over = True
        for note in at_end:
            note(self)
        alive.pop(id_of(self), None)

    cdef Buffer buffer_for(self, Py_ssize_t n, Py_ssize_t align, object stream):
        cdef AllocatorCore c = self.base
        used_by = named_stream(c, stream)
        if used_by is None:
            return self.block(n, align, False)
        if c.hooks.may_begin(used_by):
            return self.captured_block(n, align, used_by)
        return begun(c, self.block(n, align, False), used_by)

    cdef Buffer captured_block(self, Py_ssize_t n, Py_ssize_t align, object stream):
        return begun(self.base, self.block(n, align, False), stream)

    cdef Buffer block(self, Py_ssize_t n, Py_ssize_t align, bint held):
        raise NotImplementedError(type(self).__name__)

    cdef Buffer block_of(self, MemoryOwner owner, Py_ssize_t n, Py_ssize_t align):
        return self.block(n, align, False)

    cdef void* slow_c(self, size_t nbytes, size_t align) except? NULL:
        raise NotImplementedError(type(self).__name__)

    # Private to arenapy.measure and arenapy.trace; every allocator has its own.

    def _tally(self):
        """Allocations ever, their bytes, and the bytes that are live now."""
        raise NotImplementedError(type(self).__name__)

    def _exchange_peak(self, peak):
        """The peak of live bytes; it is `peak` now, but at least (None: just) the live bytes."""
        raise NotImplementedError(type(self).__name__)

    def _record(self, recorder, ended=None):
        """Record every operation from now on; None: no longer by `ended`, or by any."""
        raise NotImplementedError(type(self).__name__)

    def _ledger(self):
        """The ledger of debug mode, or None. Private to arenapy.debug."""
        return self.base.ledger if self.base is not None else None

    def _reserved(self):
        """(address, bytes) of all that came from the source and is here still."""
        return [(region.address, region.nbytes) for region in self.regions]

    def empty(self, shape, dtype="f8", order="C"):
        """An uninitialized ndarray in this allocator's memory, aligned to 64 bytes.

        Its bytes are held while the array, or a view of it, is alive. Over ``cuda.Device`` and
        ``cuda.Managed`` the result is a Buffer with this shape and type, which ``cupy.asarray`` and
        ``torch.from_dlpack`` accept.

        Parameters
        ----------
        shape : int or tuple of int
            Lengths.
        dtype : dtype-like
            Any NumPy dtype without Python objects.
        order : {"C", "F"}
            Memory order.

        Returns
        -------
        numpy.ndarray or Buffer

        Raises
        ------
        ValueError
            If the shape is negative or too large, or the order is unknown. On a device, if the
            order is not "C".
        TypeError
            If the dtype contains Python objects.
        OutOfMemory
            If the allocator cannot serve it. Nothing has changed then.

        Examples
        --------
        >>> pool = arenapy.Pool()
        >>> x = pool.empty((1000, 3), "f4")
        >>> x.shape, x.dtype.name, x.ctypes.data % 64
        ((1000, 3), 'float32', 0)
        """
        cdef Spec spec
        descr = parse(shape, dtype, order, &spec)
        if not is_array(self.base):
            return self.device_array(shape, descr, order, &spec)
        return host_array(self, descr, &spec)

    cdef Buffer device_array(self, object shape, object descr, object order, Spec* spec):
        if order != "C":
            raise ValueError(f"order={order!r}: arrays on a device are in C order; pass 'C'")
        return self.block(spec.nbytes, self.base.block_align, False).view(shape, descr)

    def zeros(self, shape, dtype="f8", order="C"):
        """An array of zeros in this allocator's memory, aligned to 64 bytes.

        The bytes are zero even if the memory was used before. Results and errors are those of
        :meth:`empty`.

        Parameters
        ----------
        shape : int or tuple of int
            Lengths.
        dtype : dtype-like
            Any NumPy dtype without Python objects.
        order : {"C", "F"}
            Memory order.

        Examples
        --------
        >>> arena = arenapy.Bump(1 << 20)
        >>> arena.zeros((2, 3), "i4")
        array([[0, 0, 0],
               [0, 0, 0]], dtype=int32)
        """
        cdef Spec spec
        cdef Buffer b
        cdef char* ptr
        cdef AllocatorCore c = self.base
        descr = parse(shape, dtype, order, &spec)
        if not is_array(c):
            if c.hooks.own is not None:     # else it is only a graph that would zero it
                c.hooks.not_captured(c.hooks.own)
            b = self.device_array(shape, descr, order, &spec)
            c.hooks.fill(b, 0, c.hooks.own)
            return b
        b = self.block(spec.nbytes, HOST_ALIGN, True)
        host_only(b)
        ptr = b.ptr
        if spec.nbytes >= NOGIL_BYTES:
            with nogil:
                memset(ptr, 0, spec.nbytes)
        else:
            memset(ptr, 0, spec.nbytes)
        return wrap(b, b.ptr, descr, &spec)

    def copy(self, array_like):
        """A copy of an array (or anything ``numpy.asarray`` takes) in this allocator's memory.

        Fortran order is kept. Any other order becomes C order.

        Parameters
        ----------
        array_like : array-like
            The values. A list is converted to an array first.

        Returns
        -------
        numpy.ndarray or Buffer
            As from :meth:`empty`, which also lists the errors.

        Examples
        --------
        >>> arena = arenapy.Bump(1 << 20)
        >>> arena.copy([1.5, 2.5])
        array([1.5, 2.5])
        """
        cdef Spec spec
        source = as_array(array_like, &spec)
        if not is_array(self.base):
            source = np.ascontiguousarray(source)
            return self.empty(source.shape, source.dtype).copy_from(source)
        target = host_array(self, source.dtype, &spec)
        assign(target, source)
        return target

    def struct_of_arrays(self, fields, n):
        """One array for each field, in one block. Loops over single fields are fast in this layout.

        Each array starts on its own cache line.

        Parameters
        ----------
        fields : mapping of str to dtype-like
            Names and types.
        n : int
            Length of every array.

        Returns
        -------
        dict of str to numpy.ndarray
            In the order of `fields`. The block is held while any of them is alive.

        Examples
        --------
        >>> arena = arenapy.Bump(1 << 20)
        >>> particles = arena.struct_of_arrays({"mass": "f4", "id": "i8"}, 1000)
        >>> particles["mass"].shape, particles["id"].dtype.name
        ((1000,), 'int64')
        """
        cdef Spec spec
        cdef size_t total = 0
        cdef Buffer b
        layout = []
        PyObject_GC_UnTrack(<PyObject*>layout)   # so that nobody changes it meanwhile
        if type(fields) is not dict and not isinstance(fields, Mapping):
            raise TypeError(f"fields={fields!r} is not a mapping of names to dtypes")
        if not fields:
            raise ValueError("fields is empty: name at least one, like {'x': 'f4'}")
        for name, dtype in fields.items():
            descr = parse(n, dtype, "C", &spec)
            if type(n) is not int:           # it may say something else the next time
                n = tuple([spec.dims[i] for i in range(spec.ndim)])
            layout.append((name, descr, total, spec.nbytes))
            total += (<size_t>spec.nbytes + HOST_ALIGN - 1) & ~<size_t>(HOST_ALIGN - 1)
            if total > (<size_t>-1) >> 1:
                raise ValueError(f"n={n} records overflow: no address space holds them")
        if not is_array(self.base):
            b = self.block(<Py_ssize_t>total, self.base.block_align, False)
            return {
                name: b[start:start + nbytes].view(n, descr)
                for name, descr, start, nbytes in layout
            }
        b = self.block(<Py_ssize_t>total, HOST_ALIGN, True)
        host_only(b)
        arrays = {}
        for name, descr, start, _ in layout:
            arrays[name] = wrap(b, b.ptr + <Py_ssize_t>start, descr, &spec)
        return arrays


seal(Allocator, "Allocator is the base of allocators; make a Bump, Slab or Pool")


cdef Buffer begun(MemoryOwner owner, Buffer b, object stream):
    """A new block, of which the hooks take note that a stream has it."""
    try:
        owner.hooks.begin(b, stream)
    except BaseException:
        b.release()
        raise
    return b


cdef object host_array(Allocator one, object descr, Spec* spec):
    cdef Buffer b = one.block(spec.nbytes, HOST_ALIGN, True)
    host_only(b)
    return wrap(b, b.ptr, descr, spec)


cdef bint is_array(AllocatorCore c) noexcept:
    """Is what empty() gives an ndarray? On managed memory not: a device is to touch it first."""
    return c.hooks is None or c.hooks.kind == "pinned"


cdef int check_source(object source) except -1:
    if not callable(getattr(source, "region", None)) or isinstance(source, type):
        raise TypeError(
            f"source={source!r} has no region(nbytes) method; give a source, like arenapy.Host()"
        )
    return 0


cdef Region aligned_region(AllocatorCore c, object source, size_t nbytes, size_t align):
    cdef Region region = None
    # Those whose memory begins on a page, or who know where it begins, are asked for as much as
    # it should be, then for room to skip to an alignment. Others the other way round: a second
    # region may cost as much as the first.
    cdef bint known = c.hooks is not None or isinstance(source, (Host, Shared, File, Existing))
    cdef bint again, misfit
    cdef uintptr_t start
    for again in range(2):
        misfit = region is not None
        region = None                        # an Existing or a File has one at a time
        try:
            region = make_region(c, source, nbytes + (align - 1 if again == known else 0))
        except MemoryError:
            if not misfit and (known or again):
                raise
        if region is None:
            if misfit:
                return None
            continue
        check_unseen(c, region)
        start = (<uintptr_t>region.ptr + (align - 1)) & ~<uintptr_t>(align - 1)
        if start + nbytes <= <uintptr_t>region.ptr + region.size:
            return region
    return None


cdef int check_unseen(AllocatorCore c, Region region) except -1:
    if region.seen_elsewhere():
        raise ValueError(
            f"{region!r} was sent to another process or is in a forked child, which may use its "
            f"bytes; give the {c.what} another region"
        )
    return 0


cdef Region make_region(AllocatorCore c, object source, Py_ssize_t n):
    check_source(source)
    region = ask_source(source, n)
    if not isinstance(region, Region):
        raise TypeError(
            f"{source!r}.region({n}) returned {region!r}, which is not an arenapy.Region; "
            "sources make one with Region.from_address"
        )
    if (<Region>region).size < <size_t>n:
        raise ValueError(f"{source!r}.region({n}) gave only {region.nbytes} bytes")
    check_alike(c, c.listed(), <Region>region)
    return <Region>region


cdef int check_growth(Buffer old, Py_ssize_t n) except -1:
    check_open(old)
    if n < old.size:
        raise ValueError(
            f"nbytes={n} is less than the {old.size} bytes it has; slice it instead"
        )
    return 0


cdef Buffer moved(Allocator one, MemoryOwner owner, Buffer old, Py_ssize_t n):
    cdef AllocatorCore c = one.base
    cdef Py_ssize_t size = old.size
    cdef Buffer new
    cdef bint done
    if old.word >= ONE_EXPORT:
        raise BufferError(
            f"{old!r} has to move to grow, and has live exports or is in use by a call; drop them, "
            "or let the call return, first"
        )
    if c.hooks is None and not c.host_accessible:
        raise BufferError(
            f"{old!r} has to move to grow, and the host cannot copy it; allocate a larger "
            "block, and copy it as its source says"
        )
    if c.hooks is not None:
        old.owner.hooks.movable(old)
    new = one.block_of(owner, n, max(old.align, c.block_align))
    # Making it may have run code, which may have grown the old one, exported it or reset all.
    if c.hooks is not None:
        try:
            check_open(old)
            if old.size != size:
                raise ValueError(f"{old!r} did not grow: another thread changed it")
            new.owner.hooks.move(new, old)
        except BaseException:
            new.release()
            raise
        old.release()
        return new
    arenapy_lock_acquire(&c.lock)
    done = is_open_locked(old) and is_open_locked(new) and old.size == size
    done = done and old.word < ONE_EXPORT
    if done:
        memcpy(new.ptr, old.ptr, size)
    arenapy_lock_release(&c.lock)
    if not done:
        new.release()
        check_open(old)
        raise ValueError(f"{old!r} did not grow: another thread changed it or the allocator")
    old.release()
    return new


cdef object make_reservation(object source, size_t nbytes):
    cdef Region region
    cdef size_t page
    reservation = source.reserve(nbytes)
    if reservation is None:
        return None
    found = getattr(reservation, "region", None)
    if not isinstance(found, Region):
        raise TypeError(
            f"{source!r}.reserve({nbytes}) returned {reservation!r}, whose region is not an "
            "arenapy.Region"
        )
    for name in ("commit", "decommit"):
        if not callable(getattr(reservation, name, None)):
            raise TypeError(
                f"{source!r}.reserve({nbytes}) returned {reservation!r}, which has no {name}() "
                "method"
            )
    region = <Region>found
    region.check_unused()
    if region.size < nbytes:
        raise ValueError(f"{source!r}.reserve({nbytes}) gave only {region.size} bytes")
    page = region.page_size
    if page < PAGE or page & (page - 1) or <uintptr_t>region.ptr % page:
        raise ValueError(
            f"{source!r}.reserve({nbytes}) gave {region!r} with page_size={page}: a region that "
            f"grows begins on a page, whose size is a power of two from {PAGE}"
        )
    region.partial = True
    return reservation, region


cdef void* grown_in_c(Allocator one, size_t nbytes, size_t align) noexcept nogil:
    cdef void* block
    with gil:
        block = _grown(one, nbytes, align)
    return block


cdef void* _grown(Allocator one, size_t nbytes, size_t align) noexcept:
    cdef PyObject* kind = NULL
    cdef PyObject* value = NULL
    cdef PyObject* trace = NULL
    PyErr_Fetch(&kind, &value, &trace)       # the caller may be on its way out
    try:
        return one.slow_c(nbytes, align)
    except BaseException as error:
        # A nogil caller cannot have it. There is no memory, which it is told, or the allocator was
        # closed meanwhile; or a signal's handler wants something else to happen, and Python will
        # have it.
        if not (is_refusal(error) or isinstance(error, ValueError) and one.base.shut):
            raise_later(error)
    finally:
        PyErr_Restore(kind, value, trace)
    return NULL


cdef bint is_refusal(object error) noexcept:
    """Does it say why there is no memory? As `is_of_system`, but no signal's handler runs here."""
    return isinstance(error, MemoryError) or (
        isinstance(error, OSError) and error.errno is not None
        and not isinstance(error, TimeoutError))


cdef void raise_later(object error) noexcept:
    """In the main thread, which runs the handlers of signals; of another thread, it is reported."""
    # threading.main_thread() is Python code, in which another signal's exception could strike.
    if PyThread_get_thread_native_id() == <unsigned long>getpid():
        Py_INCREF(error)
        if Py_AddPendingCall(raise_now, <void*>error) == 0:
            return
        Py_DECREF(error)                     # there are too many
    PyErr_SetObject(type(error), error)
    PyErr_WriteUnraisable("a call that cannot raise")


cdef int raise_now(void* argument) except -1:
    error = <object>argument
    Py_DECREF(error)
    raise error
