"""Slab: an allocator for items of one size, as the user holds it.

What lives here: arguments, errors, getting memory from the source, and the calls in C that are not
inline (those are in slab.pxd). What does not: which items are free (core), arrays
(allocator/allocator).
"""
cimport cython
from cpython.exc cimport PyErr_CheckSignals
from cpython.object cimport PyObject
from libc.stdint cimport uint64_t

from collections.abc import Iterable
from time import monotonic

from arenapy.allocator.allocator cimport (
    Allocator, aligned_region, check_source, complete, grown_in_c,
)
from arenapy.allocator.allocator_core cimport (
    ALL_LEASES, LEASES_ASKED, all_leases_asked, all_leases_due,
)
from arenapy.base.sizes cimport as_align, as_size, quick_size
from arenapy.base.atomic cimport arenapy_finalizing
from arenapy.base.biased_lock cimport biased_acquire, biased_release
from arenapy.buffer.block cimport (
    CLOSED, NEEDED, Freelist, born_held, init_freelists, freelist_of, track,
)
from arenapy.buffer.buffer cimport Buffer, freelist_pop, new_block
from arenapy.base.sanitizer cimport POISONS
from arenapy.memory.region cimport Region
from arenapy.slab.core cimport SlabCore, SlabFigures, Stack
from arenapy.slab.hot_path cimport cache_alloc, forbid_from

from arenapy.allocator.allocator import note_reset
from arenapy.base.text import format_bytes, reason_of
from arenapy.errors import OutOfMemory
from arenapy.slab.check import listing, verify
from arenapy.memory.sources import Host

cdef extern from "Python.h":
    PyObject** list_items "PySequence_Fast_ITEMS" (object o)
    void PyObject_GC_Track(PyObject* o)
    void PyObject_GC_UnTrack(PyObject* o)

cdef extern from "<unistd.h>" nogil:
    int usleep(unsigned int microseconds)

cdef enum:
    MAX_ITEMS = 0x80000000   # 2 ** 31
    MOMENT = 50              # microseconds between two looks at what another thread does
    PATIENCE = 20            # seconds of waiting for a thread whose source may wait for this one


@cython.final
cdef class Slab(Allocator):
    """Slab(item_size, count, source=None, align=None, max_count=None, debug=None, *, stream=None)\
\n--\n
    A slab: items of one size. The item that was freed last is handed out first.

    Parameters
    ----------
    item_size : int
        Bytes of an item.
    count : int
        The number of items at the beginning, from 1 to 2**31.
    source : source, optional
        The kind of memory. By default ``Host()``, prefaulted.
    align : int, optional
        Alignment of every item, a power of two up to 2 MiB. The default is 64, so that no two
        items share a cache line. The distance between items is `item_size`, rounded up to a
        multiple of `align`. So a smaller alignment packs small items.
    max_count : int, optional
        The slab grows up to this many items. Each further region doubles the number of items. By
        default it does not grow.
    debug : bool, optional
        Fill freed memory with a pattern and check it. By default, the environment variable
        ``ARENAPY_DEBUG`` decides.
    stream : stream, optional
        For memory of arenapy.cuda: the stream of blocks that name no other stream; see Pool.

    Raises
    ------
    ValueError, TypeError
        If an argument is out of range, or if the source's memory is not large enough.
    OutOfMemory
        If the source has no memory for `count` items.

    Notes
    -----
    Thread-safety: every method is thread-safe. Any thread may release a block that another
    thread allocated. If the slab is full and another thread is asking the source for more, an
    allocation waits for that thread. It raises OutOfMemory after 20 seconds, since the source may
    wait for the thread of the allocation.

    Examples
    --------
    >>> import arenapy
    >>> slab = arenapy.Slab(1000, count=16)
    >>> item = slab.alloc()
    >>> item.nbytes, slab.stride, slab.count, slab.capacity
    (1000, 1024, 1, 16)
    >>> address = item.address
    >>> del item
    >>> slab.alloc().address == address
    True
    """

    def __cinit__(self, item_size=None, count=None, source=None, align=None, max_count=None,
                  debug=None, *, stream=None):
        cdef SlabCore core = SlabCore.__new__(SlabCore)
        cdef size_t size
        cdef uint64_t items
        cdef Py_ssize_t a
        cdef Region region
        if item_size is None:
            raise TypeError(
                "item_size=None: a Slab needs item_size, the bytes of an item, and count, the "
                "number of items, like Slab(4096, count=64)"
            )
        if count is None:
            raise TypeError(
                "count=None: a Slab needs count, the number of items, like "
                f"Slab({item_size!r}, count=64)"
            )
        size, items = as_size(item_size, "item_size"), as_count(count, "count")
        self.base = self.core = core
        self.shards = []
        init_freelists(core, self.shards)
        self.most = items if max_count is None else as_count(max_count, "max_count")
        if self.most < items:
            raise ValueError(
                f"max_count={max_count} is less than count={count}; give more, or None for no "
                "growth"
            )
        source = Host() if source is None else source
        check_source(source)
        core.adopt(source, stream)
        a = core.block_align if align is None else as_align(align)
        if size + <size_t>a > (<size_t>-1 >> 1) // self.most - 1:
            raise ValueError(
                f"{self.most} items of item_size={item_size} bytes, aligned to {a}, are more than "
                "any address space holds"
            )
        self.debug = core.watch(debug, verify)
        self.source, self.max_count = source, max_count
        core.open(size, a, self.most)
        region = self.region_for(items)
        if region is None:
            raise ValueError(
                f"count={count} items of {core.stride} bytes, aligned to {a}, do not fit into the "
                f"memory of {source!r}, which begins between two multiples of {a}; give a lower "
                "count, a smaller align, or aligned memory"
            )
        core.add_part(region, items, items)
        core.ready()
        complete(self)

    # -- allocation

    def alloc(self, nbytes=None, align=None, stream=None):
        """Allocate an item, or the first bytes of an item.

        Parameters
        ----------
        nbytes : int, optional
            Size in bytes, at most `item_size`, which is also the default.
        align : int, optional
            A power of two up to the alignment of the items.
        stream : stream, optional
            For memory of arenapy.cuda: the stream that will use the item.

        Returns
        -------
        Buffer
            Uninitialized. Its item returns to the slab when the Buffer is released or dropped. If
            it was exported, the item returns when the Buffer object is gone.

        Raises
        ------
        ValueError, TypeError
            If the size is larger than an item, or the alignment is larger than that of the items.
        OutOfMemory
            If no item is free and the slab cannot grow. Nothing has changed then.

        Examples
        --------
        >>> slab = arenapy.Slab(4096, count=8)
        >>> slab.alloc().nbytes, slab.alloc(100).nbytes
        (4096, 100)
        """
        # The usual call. References are borrowed, as in Bump.alloc.
        cdef PyObject* core = <PyObject*>self.core
        cdef Freelist* freelist = freelist_of(core)
        cdef PyObject* o = freelist.kept
        cdef size_t n = (<SlabCore>core).item_size
        cdef char* ptr
        if nbytes is not None:
            n = <size_t>quick_size(<PyObject*>nbytes)
        if (o == NULL or n > (<SlabCore>core).item_size or align is not None
                or stream is not None):
            return self.general_alloc(nbytes, align, stream)
        ptr = cache_alloc(<SlabCore>core, &(<Buffer>o).tag)
        if ptr == NULL:
            return self.general_alloc(nbytes, align, stream)
        if POISONS:
            forbid_from(<SlabCore>core, ptr, n, (<SlabCore>core).item_size)
        (<Buffer>o).size = n
        (<Buffer>o).word = 0
        return freelist_pop(core, freelist, ptr)

    cdef Buffer general_alloc(self, object nbytes, object align, object stream):
        cdef Py_ssize_t n = self.core.item_size if nbytes is None else as_size(nbytes, "nbytes")
        cdef Py_ssize_t a = 1 if align is None else as_align(align)
        return self.buffer_for(n, a, stream)

    cdef int fits(self, Py_ssize_t n, Py_ssize_t align) except -1:
        """Raise ValueError if no item can be that."""
        self.core.open_check()
        if <size_t>n > self.core.item_size:
            raise ValueError(
                f"nbytes={n} is more than the {self.core.item_size} bytes of an item; make a Slab "
                "of larger items, or use a Pool"
            )
        if <size_t>align > self.core.align:
            raise ValueError(
                f"align={align}: items of this slab, which are {self.core.stride} bytes apart, are "
                f"aligned to {self.core.align}; make the Slab with align={align}"
            )
        return 0

    cdef Buffer block(self, Py_ssize_t n, Py_ssize_t align, bint held):
        cdef SlabCore c = self.core
        cdef Buffer b
        cdef uint64_t name
        cdef char* ptr
        self.fits(n, align)
        b = new_block(c, n)
        b.word = CLOSED                      # until there is an item: the source may find it
        b.tag = 0                            # nothing is to be given back
        if c.checked:
            c.check()
        ptr = self.source_alloc(n, &name)
        b.ptr, b.tag, b.word = ptr, name, 0
        if c.foreign:
            track(b)
        if held:
            born_held(b, NULL)
        if c.debug:
            c.allocated([b])
        return b

    cdef char* source_alloc(self, size_t nbytes, uint64_t* name) except NULL:
        cdef char* ptr = self.core.alloc_block(nbytes, name)
        while ptr == NULL:
            self.more(1)
            ptr = self.core.alloc_block(nbytes, name)
        return ptr

    cdef void* slow_c(self, size_t nbytes, size_t align) except? NULL:
        cdef uint64_t name
        return self.source_alloc(nbytes, &name)

    def alloc_many(self, n_or_sizes):
        """Allocate many items: all of them, or none.

        Parameters
        ----------
        n_or_sizes : int or iterable of int
            The number of whole items, or the size of each item in bytes.

        Returns
        -------
        list of Buffer

        Raises
        ------
        ValueError, TypeError, OutOfMemory
            As :meth:`alloc`. Nothing has changed then.

        Notes
        -----
        It takes the lock once, so it costs less than many calls of :meth:`alloc`.

        Examples
        --------
        >>> slab = arenapy.Slab(4096, count=8)
        >>> items = slab.alloc_many(5)
        >>> len(items), slab.count
        (5, 5)
        """
        cdef SlabCore c = self.core
        cdef list blocks
        cdef Buffer b
        cdef Py_ssize_t count
        if isinstance(n_or_sizes, Iterable):
            sizes = [as_size(n, "sizes") for n in n_or_sizes]
            for n in sizes:
                self.fits(n, 1)
            count = len(sizes)
        else:
            count = as_size(n_or_sizes, "n_or_sizes")
            sizes = None
        c.open_check()
        if <uint64_t>count > self.most:
            raise OutOfMemory(self._full(count, "that is more than it may ever have"))
        blocks = []
        PyObject_GC_UnTrack(<PyObject*>blocks)   # so that nobody changes it meanwhile
        for i in range(count):
            b = new_block(c, c.item_size if sizes is None else sizes[i])
            b.word, b.tag = CLOSED, 0        # until there is an item
            blocks.append(b)
        if c.checked:
            c.check()
        before = c.listed()
        try:
            while not c.alloc_blocks(list_items(blocks), count):
                self.more(count)
        except BaseException:
            for region in c.listed():
                if region not in before:
                    c.remove_part(region)
            raise
        if c.foreign:
            for b in blocks:
                track(b)
        PyObject_GC_Track(<PyObject*>blocks)
        if c.debug:
            c.allocated(blocks)
        return blocks

    # -- memory

    cdef int more(self, uint64_t wanted) except -1:
        cdef SlabCore c = self.core
        cdef uint64_t items, known
        cdef double deadline = 0
        cdef Region region = None
        cdef object error = None
        while True:
            c.open_check()
            if c.may_lease:
                c.settle_sends()
                if all_leases_due(&c.leased, c.items) and self.reclaim_all():
                    return 0
            # Before others have to wait for this thread: a stream may be asked by code of the user.
            if c.settle_streams(NEEDED) or (
                    wanted > c.idle() + self.most - c.items
                    and c.settle_streams(missing(c, wanted))):
                return 0
            if c.begin_growth():
                break
            if arenapy_finalizing():         # that thread has ended, in its source
                raise OutOfMemory(self._full(wanted, "the interpreter is ending"))
            if deadline == 0:
                deadline = monotonic() + PATIENCE
            elif monotonic() > deadline:
                if self.reclaim_all():
                    return 0
                raise OutOfMemory(self._full(
                    wanted, "another thread, which has been growing it for long, may wait for this "
                    "one in its source"))
            with nogil:
                usleep(MOMENT)
            PyErr_CheckSignals()             # the source may take long
            if c.idle() >= wanted or c.leased.n and c.reclaim_leases(LEASES_ASKED):
                return 0
        try:
            items = c.idle()
            if items >= wanted:
                return 0
            if wanted - items > self.most - c.items:
                if self.reclaim_all():
                    return 0
                raise OutOfMemory(self._full(wanted, "it has reached its limit"))
            known = c.items
            items = min(known, self.most - known)
            while region is None:
                try:
                    region = self.region_for(items)
                except MemoryError as e:
                    error = e
                if region is None and items == 1:
                    if (c.settle_streams(missing(c, wanted)) or self.reclaim_all()
                            or c.idle() >= wanted):
                        return 0
                    raise OutOfMemory(self._full(
                        wanted, f"its source has no more ({reason_of(error)})")) from error
                if region is None:
                    items //= 2              # perhaps it has fewer
            if (c.items == known or c.idle() < wanted) and c.add_part(region, items, self.most):
                c.update_fast_path()         # it may have to be checked
        finally:
            c.end_growth()
        return 0

    cdef bint reclaim_all(self) noexcept:
        """Free all that other processes have let go of. False: that is nothing."""
        cdef SlabCore c = self.core
        cdef size_t freed = c.reclaim_leases(ALL_LEASES)
        all_leases_asked(&c.leased, c.items, freed)
        return freed > 0

    cdef Region region_for(self, uint64_t items):
        return aligned_region(self.core, self.source, items * self.core.stride, self.core.align)

    def _full(self, wanted, why):
        """Why a request failed, and what to do."""
        cdef SlabFigures f = self.core.figures()
        limit = "no growth" if self.max_count is None else f"max_count={self.max_count}"
        return (
            f"{wanted} more items of {self.core.item_size} bytes do not fit into the slab, and "
            f"{why}: it has {f.items} items ({limit}), {f.active} live, {f.pending} pending, "
            f"{f.items - f.active - f.pending} free. Release items, or give a larger max_count"
        )

    def trim(self):
        """Return regions without a live item to the source, except the first region.

        Returns
        -------
        int
            The number of returned bytes.

        Examples
        --------
        >>> slab = arenapy.Slab(4096, count=8, max_count=64)
        >>> items = slab.alloc_many(30)          # the slab grows
        >>> del items
        >>> slab.trim() > 0, slab.capacity
        (True, 8)
        """
        cdef SlabCore c = self.core
        cdef size_t freed = 0
        c.open_check()
        if c.may_lease:
            c.settle_sends()
        c.reclaim_leases(ALL_LEASES)
        c.settle_streams(False)
        for region in c.listed()[:0:-1]:
            if c.remove_part(<Region>region):
                freed += (<Region>region).size
        if c.debug:
            c.operated()
        return freed

    # -- figures

    @property
    def item_size(self) -> int:
        """Bytes of an item."""
        return self.core.item_size

    @property
    def stride(self) -> int:
        """Bytes from one item to the next."""
        return self.core.stride

    @property
    def capacity(self) -> int:
        """Items, live or not."""
        return self.core.items

    @property
    def count(self) -> int:
        """Live items."""
        return self.core.figures().active

    @property
    def kind(self) -> str:
        """Kind of memory, as its Buffers report it."""
        return self.core.kind

    @property
    def regions(self) -> tuple:
        """The regions, in order of growth."""
        return self.core.listed()

    def stats(self):
        """The present figures, as a :class:`arenapy.stats.SlabStats`.

        Examples
        --------
        >>> slab = arenapy.Slab(1000, count=8)
        >>> item = slab.alloc()
        >>> stats = slab.stats()
        >>> stats.active_allocations, stats.allocated_bytes, stats.idle_bytes
        (1, 1024, 7168)
        """
        from arenapy.stats import SlabStats

        cdef SlabCore c = self.core
        cdef SlabFigures f
        if c.may_lease:
            c.settle_sends()
        c.reclaim_leases(ALL_LEASES)
        c.settle_streams(False)
        f = c.figures()
        return SlabStats(
            item_size=c.item_size,
            stride=c.stride,
            capacity=f.items,
            active_allocations=f.active,
            total_allocations=f.allocations,
            allocated_bytes=f.active * c.stride,
            pending_bytes=f.pending * c.stride,
            idle_bytes=(f.items - f.active - f.pending) * c.stride,
            padding_bytes=f.reserved - f.items * c.stride,
            reserved_bytes=f.reserved,
            peak_bytes=f.peak * c.stride,
            metadata_bytes=f.metadata,
            regions=f.regions,
        )

    def reset_peak(self):
        """Restart `peak_bytes` from the present value.

        Examples
        --------
        >>> slab = arenapy.Slab(4096, count=8)
        >>> slab.alloc().release()
        >>> slab.reset_peak()
        >>> slab.stats().peak_bytes
        0
        """
        note_reset(self)
        self._exchange_peak(None)

    def _tally(self):
        cdef SlabFigures f = self.core.figures()
        return f.allocations, f.allocations * self.core.stride, f.active * self.core.stride

    def _exchange_peak(self, peak):
        cdef SlabCore c = self.core
        return c.exchange_peak(0 if peak is None else peak // c.stride) * c.stride

    def _record(self, recorder, ended=None):
        self.core.record_into(recorder, ended)
        self.core.update_fast_path()

    def blocks(self):
        """Iterate over all items, live and free, by address.

        Returns
        -------
        iterator of BlockInfo
            The state at the moment of the call. 64 neighbours share one age.

        Examples
        --------
        >>> slab = arenapy.Slab(4096, count=3)
        >>> item = slab.alloc()
        >>> [block.state for block in slab.blocks()]
        ['live', 'idle', 'idle']
        """
        return listing(self.core)

    def check(self):
        """Verify the bookkeeping; raise an error that names the fault.

        The time grows with the number of items.

        In debug mode, also verify free memory.

        Examples
        --------
        >>> slab = arenapy.Slab(4096, count=8)
        >>> slab.check()                         # it finds no error
        """
        verify(self.core)
        self.core.check_free()

    def __repr__(self):
        cdef SlabFigures f = self.core.figures()
        return (
            f"<Slab {self.core.kind} {f.items:,} items of {format_bytes(self.core.item_size)}, "
            f"{f.active:,} live{', closed' if self.core.shut else ''}>"
        )

    def __reduce__(self):
        raise TypeError("a Slab is not pickled; only the process that made it allocates from it")


cdef Py_ssize_t missing(SlabCore c, uint64_t wanted) noexcept:
    """How many items a request waits for."""
    cdef uint64_t idle = c.idle()
    return <Py_ssize_t>(wanted - idle) if wanted > idle else 1


cdef uint64_t as_count(object value, str what) except 0:
    cdef Py_ssize_t n
    try:
        n = as_size(value, what)
    except TypeError:
        raise TypeError(
            f"{what}={value!r} is of type {type(value).__name__}; give a whole number of items"
        ) from None
    if not 1 <= n <= MAX_ITEMS:
        raise ValueError(f"{what}={n} is not a number of items from 1 to 2**31")
    return n

# ---- in C, without the GIL --------------------------------------------------------------------

cdef void* slab_alloc_slow(Slab slab) noexcept nogil:
    cdef uint64_t name
    cdef char* item = slab.core.alloc_block(slab.core.item_size, &name)
    if item == NULL and not slab.core.shut:
        item = <char*>grown_in_c(slab, slab.core.item_size, 1)
    slab.core.tell()
    return item


cdef int slab_free_slow(Slab slab, void* item) noexcept nogil:
    return _given(slab.core, item)


cdef int _given(SlabCore c, void* item) noexcept nogil:
    cdef Stack* s
    cdef uint64_t name
    if c.shut:
        return -1
    s = c.own_stack()
    biased_acquire(&s.lock)
    name = c.find(s, <char*>item)
    biased_release(&s.lock)
    if name and c.free_block(name):
        return 0
    c.refuse(b"slab_free", item)
    return -1
