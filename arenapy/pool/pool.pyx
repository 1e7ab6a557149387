"""Pool: an allocator for blocks that are given back in any order, as the user holds it.

What lives here: arguments, errors, the order of what is tried when memory runs out. What does not:
where blocks come from and go to (core, page_heap), the blocks of other streams (stream_cache), the
source (memory), arrays (allocator), the calls in C (c_api).
"""
cimport cython
from cpython.object cimport PyObject
from libc.stdint cimport uint32_t, uint64_t, uintptr_t

from collections.abc import Iterable, Mapping
from time import monotonic, perf_counter

from arenapy.allocator.allocator cimport (
    Allocator, begun, check_growth, check_source, complete, grown_in_c, moved,
)
from arenapy.allocator.allocator_core cimport (
    ALL_LEASES, LEASES_ASKED, all_leases_asked, all_leases_due, permit,
)
from arenapy.base.sizes cimport (
    HOST_ALIGN, MAX_ALIGN, MAX_BYTES, ROUND_CLASS, ROUND_LINES, ROUND_STEP, as_align, as_size,
    quick_size,
)
from arenapy.base.atomic cimport (
    arenapy_finalizing, arenapy_glance, arenapy_lock_acquire, arenapy_lock_release,
    arenapy_spin_acquire, arenapy_spin_release,
)
from arenapy.buffer.block cimport (
    CLOSED, NEEDED, ONE_EXPORT, Freelist, MemoryOwner, born_held, check_open, freelist_of,
    init_freelists, is_open_locked, track,
)
from arenapy.buffer.buffer cimport Buffer, freelist_pop, new_block
from arenapy.pool.page_heap cimport (
    HUGE_PAGES, MAX_PAGES, MAX_SEGMENTS, PAGE, PAGE_BITS, STOCK, Place, have_spare, roomy,
)
from arenapy.pool.hot_path cimport cache_alloc
from arenapy.pool.core cimport BlockBatch, PoolCore, PoolFigures
from arenapy.pool.memory cimport PoolMemory, checked_limit
from arenapy.pool.stream_cache cimport StreamCache, StreamCaches, new_stream_caches
from arenapy.memory.region cimport ask_source

from arenapy.allocator.allocator import note_reset
from arenapy.base.text import format_bytes, reason_of
from arenapy.errors import OutOfMemory
from arenapy.linux.limits import machine_nbytes
from arenapy.pool.check import extents, figures_of, listing, verify
from arenapy.memory.sources import Existing, File, Host, Shared
from arenapy.pool.trimming import start_trimming

cdef extern from "Python.h":
    PyObject* PyTuple_GET_ITEM(tuple items, Py_ssize_t i) noexcept
    void PyObject_GC_Track(PyObject* o)
    void PyObject_GC_UnTrack(PyObject* o)

# Bytes: bookkeeping has addresses for as much memory, four times over.
cdef size_t DEVICE_ROOM = <size_t>1 << 38
cdef int STREAM_LOOKS = 8    # at what streams have done, in the seconds of `trim_after`


cdef enum:
    GROWTH_SHARE = 64        # a pool grows by this part of what it has, or by a huge page;
    MAX_GROWTH = 8           # on a device, where memory is scarcer, by so many of those at most,
    DEVICE_SHARE = 256       # or by this part
    MOST_TURNS = 100         # after which it is somebody else who has it
    FEW_ROUNDS = 2           # of a request; each further one waits for twice as many blocks


cdef inline object quick_alloc(PyObject* core, object nbytes):
    """The usual allocation; None if it is not that. References are borrowed, as in Bump.alloc."""
    cdef Freelist* freelist = freelist_of(core)
    cdef PyObject* o = freelist.kept
    cdef Py_ssize_t n = quick_size(<PyObject*>nbytes)
    cdef char* ptr
    if o == NULL or n < 0:
        return None
    ptr = cache_alloc(<PoolCore>core, n, False, &(<Buffer>o).tag)
    if ptr == NULL:
        return None
    (<Buffer>o).size = n
    (<Buffer>o).align = 0
    (<Buffer>o).word = 0
    return freelist_pop(core, freelist, ptr)


cdef inline object quick_stream_alloc(PyObject* cache, object nbytes):
    """The same of a stream's cache."""
    cdef Freelist* freelist = freelist_of(cache)
    cdef PyObject* o = freelist.kept
    cdef Py_ssize_t n = quick_size(<PyObject*>nbytes)
    cdef char* ptr
    if o == NULL or n < 0 or (<StreamCache>cache).core.fast_path_off:
        return None
    ptr = (<StreamCache>cache).pop(
        n, (<StreamCache>cache).core.block_align, &(<Buffer>o).tag)
    if ptr == NULL:
        return None
    (<Buffer>o).size = n
    (<Buffer>o).align = 0
    (<Buffer>o).word = 0
    return freelist_pop(cache, freelist, ptr)


cdef bint has_run(PoolCore c, size_t pages) noexcept:
    """Is there a free extent of at least so many pages?"""
    cdef bint found
    arenapy_spin_acquire(&c.heap_lock)
    found = roomy(c, &c.free_bins, pages) != 0
    arenapy_spin_release(&c.heap_lock)
    return found


@cython.final
cdef class Pool(Allocator):
    """Pool(max_bytes=None, source=None, initial_bytes=0, trim_after=None, on_oom=None, \
rounding='step', debug=None, *, trim_thread=False, stream=None)\n--\n
    A pool: blocks of any size, in 21 size classes. Freed blocks are kept for reuse.

    Parameters
    ----------
    max_bytes : int, optional
        The most bytes that the pool reserves. By default there is no limit.
    source : source, optional
        The kind of memory. By default ``Host()``, prefaulted.
    initial_bytes : int
        Bytes to reserve at the beginning, at least a page of 4 KiB.
    trim_after : float, optional
        At each allocation from Python code, return memory that was not used for this many seconds.
        Infinity means never.
    on_oom : callable, optional
        ``on_oom(nbytes) -> bool`` is called when a request of `nbytes` cannot be served. If it
        frees something and returns True, the pool tries the request again.
    rounding : {"step", "class"}
        "step": blocks are rounded up to an eighth of a doubling, or to pages on a device. "class":
        blocks are rounded up to the bound of their class, which wastes up to half.
    debug : bool, optional
        Fill freed memory with a pattern and check it. By default, the environment variable
        ``ARENAPY_DEBUG`` decides.
    trim_thread : bool
        Also return memory after `trim_after` seconds while the pool is not used, from a thread.
    stream : stream, optional
        For memory of arenapy.cuda: the stream of blocks that name no other stream. The default is
        the legacy default stream on a device, and no stream if the host can access the memory.

    Notes
    -----
    Thread-safety: every method is thread-safe. Any thread may release a block that another
    thread allocated.

    Examples
    --------
    >>> import arenapy
    >>> pool = arenapy.Pool(max_bytes=64 << 20)
    >>> x = pool.empty((1000, 1000), "f4")
    >>> pool.stats().active_allocations
    1
    >>> del x
    >>> pool.stats().active_allocations
    0
    """

    def __cinit__(self, max_bytes=None, source=None, initial_bytes=0, trim_after=None, on_oom=None,
                  rounding="step", debug=None, *, trim_thread=False, stream=None):
        cdef PoolCore core = PoolCore.__new__(PoolCore)
        cdef size_t initial = as_size(initial_bytes, "initial_bytes")
        cdef size_t most
        self.base = self.core = core
        self.shards = []
        init_freelists(core, self.shards)
        max_bytes = checked_limit(max_bytes, initial)
        if rounding not in ("step", "class"):
            raise ValueError(f"rounding={rounding!r} is neither 'step' nor 'class'")
        if on_oom is not None and not callable(on_oom):
            raise TypeError(f"on_oom={on_oom!r} cannot be called; give a function of nbytes")
        if trim_after is not None:
            trim_after = as_seconds(trim_after)
        if trim_thread and trim_after is None:
            raise ValueError("trim_thread=True needs trim_after, the number of seconds to wait")
        if source is None:
            source = Host()
        check_source(source)
        self.max_bytes, self.on_oom, self.trim_after = max_bytes, on_oom, trim_after
        self.rounding, self.debug = str.__str__(rounding), core.watch(debug, verify)
        core.timed = -1 if trim_after is None else trim_after
        core.adopt(source, stream)
        machine = machine_nbytes() if core.hooks is None else DEVICE_ROOM
        most = machine if max_bytes is None else <size_t>max_bytes
        core.open(2 * (min(most, <size_t>4 * machine) >> PAGE_BITS),
                  ROUND_CLASS if rounding == "class" else
                  ROUND_LINES if core.block_align > HOST_ALIGN else ROUND_STEP)
        self.memory = PoolMemory(
            core, source, <size_t>-1 if max_bytes is None else most >> PAGE_BITS,
            min(most, 2 * <size_t>machine))
        if isinstance(source, (Existing, File)):
            # Such a source has one region. It decides what kind of memory this is, or refuses.
            size = initial or None
            if getattr(source, "mode", "") == "w+":
                # The file is emptied by it. So it gets the page that a pool needs at least, and
                # is not refused afterwards.
                size = max(initial, <size_t>PAGE) if initial else max_bytes
            self.memory.add_only(ask_source(source, size))
        elif initial:
            self.memory.begin(initial)
        elif core.hooks is None:
            core.kind = "shared" if isinstance(source, Shared) else "host"
        core.merges_first = core.hooks is not None
        if core.hooks is not None and not core.host_accessible:
            self.streams = new_stream_caches(core)
        core.ready()
        complete(self)
        if trim_thread:
            start_trimming(self, trim_after)

    def __del__(self):
        Allocator.__del__(self)
        if self.streams is not None and self.streams.of_graphs and not arenapy_finalizing():
            # Regions that a graph has blocks in stay until it is gone. Others need not.
            try:
                self.trim()
            except Exception:
                pass

    # -- allocation

    def alloc(self, nbytes, align=None, stream=None):
        """Allocate a block.

        Parameters
        ----------
        nbytes : int
            Size in bytes. 0 gives a separate empty Buffer.
        align : int, optional
            A power of two up to 2 MiB; by default 64, on a device 256.
        stream : stream, optional
            For memory of arenapy.cuda: the stream that will use the block. If it is being captured,
            the block belongs to the graph.

        Returns
        -------
        Buffer
            Uninitialized. Its block returns to the pool when the Buffer is released or dropped. If
            it was exported, the block returns when the Buffer object is gone.

        Raises
        ------
        ValueError, TypeError
            If a size or an alignment is out of range.
        OutOfMemory
            If it cannot be served. Nothing has changed then.

        Examples
        --------
        >>> pool = arenapy.Pool()
        >>> block = pool.alloc(100_000, align=4096)
        >>> block.nbytes, block.address % 4096
        (100000, 0)
        """
        # The usual call. References are borrowed, as in Bump.alloc.
        cdef PyObject* core = <PyObject*>self.core
        cdef Freelist* freelist = freelist_of(core)
        cdef PyObject* o = freelist.kept
        cdef Py_ssize_t n = quick_size(<PyObject*>nbytes)
        cdef char* ptr
        if o == NULL or n < 0 or align is not None or stream is not None:
            return self.general_alloc(nbytes, align, stream)
        ptr = cache_alloc(<PoolCore>core, n, False, &(<Buffer>o).tag)
        if ptr == NULL:
            return self.general_alloc(nbytes, align, stream)
        (<Buffer>o).size = n
        (<Buffer>o).align = 0
        (<Buffer>o).word = 0
        return freelist_pop(core, freelist, ptr)

    cdef Buffer general_alloc(self, object nbytes, object align, object stream):
        cdef Py_ssize_t n
        if stream is not None and self.streams is not None:
            if self.core.timed >= 0:         # an allocation of a stream's looks at its cache alone
                self.core.open_check()
                self.trim_old()
            owner = self.streams.owner_of(stream)
            if isinstance(owner, StreamCache):
                block = None if align is not None else quick_stream_alloc(<PyObject*>owner, nbytes)
                if block is None:
                    block = self.stream_block(<StreamCache>owner, nbytes, align)
                return <Buffer>block
            if owner is self.core:
                block = None if align is not None else quick_alloc(<PyObject*>self.core, nbytes)
                if block is not None:
                    return <Buffer>block
                owner = None
            stream = owner
        n = as_size(nbytes, "nbytes")
        return self.buffer_for(
            n, self.core.block_align if align is None else as_align(align), stream)

    cdef object usual_alloc(self, object nbytes):
        return quick_alloc(<PyObject*>self.core, nbytes)

    cdef Buffer captured_block(self, Py_ssize_t n, Py_ssize_t align, object stream):
        cdef StreamCache cache
        if self.streams is None:
            return Allocator.captured_block(self, n, align, stream)
        cache = self.streams.graph_cache(stream)
        return begun(cache, self.stream_block(cache, n, align), stream)

    cdef Buffer stream_block(self, StreamCache cache, object nbytes, object alignment):
        cdef PoolCore c = self.core
        cdef Py_ssize_t n = as_size(nbytes, "nbytes")
        cdef Py_ssize_t align = c.block_align if alignment is None else as_align(alignment)
        cdef Buffer b = new_block(cache, n)
        cdef uint64_t block_id
        cdef char* ptr = NULL
        cdef char* fresh = NULL              # from the pool, and not the stream's as yet
        b.tag = 0                            # until there is a block
        b.word = CLOSED
        if c.checked:
            c.check()
        c.open_check()
        if n <= <Py_ssize_t>MAX_BYTES:
            ptr = cache.pop(n, align, &block_id)
            if ptr == NULL and cache.hooks.collect(<PyObject*>cache, False):
                ptr = cache.pop(n, align, &block_id)
        if ptr == NULL:
            fresh = c.alloc_block(n, align, False, &block_id)
            if (fresh == NULL and n <= <Py_ssize_t>MAX_BYTES
                    and cache.hooks.collect(<PyObject*>cache, NEEDED)):
                ptr = cache.pop(n, align, &block_id)
            if fresh == NULL and ptr == NULL:
                fresh = self.source_alloc(n, align, True, &block_id)
        if fresh != NULL:
            ptr = fresh
            self.streams.lend(cache, ptr, block_id, n, align)
        elif c.fast_path_off:
            c.handed_out(ptr, n, block_id)
        b.ptr, b.tag, b.align, b.word = ptr, block_id, align, 0
        if c.foreign:
            track(b)
        if c.debug:
            c.allocated([b])
        return b

    cdef size_t trim_old(self) except? 0:
        cdef double now
        cdef double late
        cdef uint32_t looks
        if self.core.hooks is not None:     # whose driver is not to be asked at each allocation
            now = monotonic()
            late = now - self.streams_due
            if late >= 0:
                looks = STREAM_LOOKS         # as many as there was time for
                if late < self.core.timed:
                    looks = <uint32_t>(late * STREAM_LOOKS / self.core.timed)
                self.streams_due = now + self.core.timed / STREAM_LOOKS
                if self.streams is not None:
                    self.streams.trim_old(looks + 1, STREAM_LOOKS + 1)
                self.core.settle_streams(False)
        return self.memory.trim_stale(self.core.timed)

    cdef Buffer block(self, Py_ssize_t n, Py_ssize_t align, bint held):
        cdef PoolCore c = self.core
        cdef Buffer b = new_block(c, n)
        cdef uint64_t block_id
        cdef char* ptr
        b.tag = 0                            # until there is a block, nothing is to be given back
        b.word = CLOSED
        if c.checked:
            c.check()
        if c.timed >= 0:
            c.open_check()
            self.trim_old()
        ptr = c.alloc_block(n, align, False, &block_id)
        if ptr == NULL:
            ptr = self.source_alloc(n, align, True, &block_id)
        b.ptr = ptr
        b.tag = block_id
        b.align = align
        b.word = 0
        if c.foreign:
            track(b)
        if held:
            born_held(b, NULL)
        if c.debug:
            c.allocated([b])
        return b

    cdef void* alloc_c(self, size_t nbytes, size_t align) noexcept nogil:
        cdef uint64_t block_id
        cdef void* block
        if nbytes > MAX_BYTES or align > MAX_ALIGN or align & (align - 1):
            return NULL
        align = max(align, self.core.block_align)
        block = self.core.alloc_block(nbytes, align, False, &block_id)
        if block == NULL and not self.core.shut:
            block = grown_in_c(self, nbytes, align)
        self.core.tell()
        return block

    cdef void* slow_c(self, size_t nbytes, size_t align) except? NULL:
        cdef uint64_t block_id
        return self.source_alloc(nbytes, align, False, &block_id)

    def alloc_many(self, sizes):
        """Allocate a block for each size, aligned to 64 bytes: all of them, or none.

        Parameters
        ----------
        sizes : iterable of int
            Bytes of each block.

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
        >>> pool = arenapy.Pool()
        >>> [block.nbytes for block in pool.alloc_many([100, 200, 300])]
        [100, 200, 300]
        """
        cdef PoolCore c = self.core
        cdef list blocks = []
        cdef tuple wanted                    # which code of the user cannot change meanwhile
        cdef BlockBatch batch
        cdef Buffer b
        cdef Py_ssize_t i, n
        PyObject_GC_UnTrack(<PyObject*>blocks)   # so that nobody changes it meanwhile
        if not isinstance(sizes, Iterable):
            raise TypeError(f"sizes={sizes!r} is not iterable; alloc() takes a single size")
        wanted = tuple(sizes)
        batch = BlockBatch(len(wanted))
        for i in range(batch.n):
            n = quick_size(PyTuple_GET_ITEM(wanted, i))
            batch.sizes[i] = n if n >= 0 else as_size(wanted[i], "sizes")
            b = new_block(c, batch.sizes[i])
            b.tag = 0                        # until there is a block
            b.word = CLOSED
            blocks.append(b)
        if c.checked:
            c.check()
        if c.timed >= 0:
            c.open_check()
            self.trim_old()
        self.take_batch(batch)
        for i in range(batch.n):
            b = <Buffer>blocks[i]
            b.ptr, b.tag, b.word = batch.entries[i].ptr, batch.entries[i].block_id, 0
            b.align = 0
            if c.foreign:
                track(b)
            if c.fast_path_off:
                c.handed_out(b.ptr, b.size, b.tag)
        PyObject_GC_Track(<PyObject*>blocks)
        if c.debug:
            c.allocated(blocks)
        return blocks

    def prewarm(self, counts):
        """Reserve memory for these blocks, so that later allocations need not ask the source.

        Parameters
        ----------
        counts : mapping of int to int
            For each size in bytes, the number of blocks that will be live at the same time.

        Raises
        ------
        ValueError, TypeError
            If a size or a count is invalid.
        OutOfMemory
            If it does not fit. Nothing has changed then.

        Examples
        --------
        >>> pool = arenapy.Pool()
        >>> pool.prewarm({1 << 20: 8, 4096: 100})
        >>> blocks = [pool.alloc(1 << 20) for _ in range(8)]
        >>> pool.stats().pool_misses             # no request went to the source
        0
        """
        cdef BlockBatch batch
        if not isinstance(counts, Mapping):
            raise TypeError(f"counts={counts!r} is not a mapping; give one like {{1 << 20: 8}}")
        wanted = [(as_size(n, "nbytes"), as_size(count, "count")) for n, count in counts.items()]
        total = sum([max(n, 64) * count for n, count in wanted])
        room = min(self.memory.max_pages, self.memory.min_reservation >> PAGE_BITS) * PAGE
        if total > room:
            raise OutOfMemory(
                f"counts={counts!r} need {total} bytes, and at most {room} can be reserved; "
                "ask for fewer, or give a larger max_bytes"
            )
        batch = BlockBatch(sum([count for _, count in wanted]))
        for n, count in wanted:
            batch.repeat(n, count)
        self.take_batch(batch)
        batch.undo(self.core)
        if self.debug:
            self.core.operated()

    def grow(self, Buffer buffer not None, nbytes):
        """Grow `buffer`, a block of this pool, to `nbytes` and keep its contents.

        Parameters
        ----------
        buffer : Buffer
            A Buffer from :meth:`alloc` of this pool.
        nbytes : int
            The new size in bytes, at least the present size.

        Returns
        -------
        Buffer
            The same Buffer if the bytes behind the block are free, or are addresses of a range that
            grows in place. Otherwise a new Buffer with the same contents, and the old one is
            released. A block without exports also moves if more bytes are idle than were ever live.
            Streams that use the old Buffer may continue with the new one: they wait for its
            contents, and it waits for them.

        Raises
        ------
        BufferError
            If the block has to move and has live exports. Nothing has changed then.
        CudaError
            If the block has to move while a stream that uses it is captured. Nothing has changed
            then.
        ValueError
            If `buffer` is not a block of this pool, or is larger than `nbytes`.
        OutOfMemory
            If it does not fit. Nothing has changed then.

        Notes
        -----
        A block up to 32 KiB grows in place only within the bytes that it was rounded up to. Memory
        of a device that other streams use always moves. In the statistics, other growth in place is
        a release and an allocation.

        Examples
        --------
        >>> pool = arenapy.Pool()
        >>> block = pool.alloc(1 << 20)
        >>> block = pool.grow(block, 100 << 20)  # in place, because nothing lies behind it
        >>> block.nbytes >> 20, pool.stats().active_allocations
        (100, 1)
        """
        cdef PoolCore c = self.core
        cdef Py_ssize_t n = as_size(nbytes, "nbytes")
        cdef MemoryOwner owner = buffer.owner
        check_open(buffer)
        if buffer.root is not None or not (
                owner is c or isinstance(owner, StreamCache) and (<StreamCache>owner).core is c):
            raise ValueError(f"{buffer!r} is not a block of this pool; pass one of its blocks")
        check_growth(buffer, n)
        c.open_check()
        if owner is c and self.grow_here(buffer, n):
            return buffer
        check_growth(buffer, n)              # making room may have run code
        return moved(self, owner, buffer, n)

    cdef bint grow_here(self, Buffer buffer, Py_ssize_t n) except -1:
        cdef PoolCore c = self.core
        cdef uint32_t missing = 0
        cdef bint done, miss = False
        cdef int attempt
        cdef Place behind
        if c.hooks is not None and not c.host_accessible and buffer.hold != NULL:
            return False                     # pages behind it are free in another stream's order
        for attempt in range(3):
            arenapy_lock_acquire(&c.lock)
            done = is_open_locked(buffer) and n >= buffer.size and c.grow_block(
                buffer.tag, n, miss, &missing)
            if done:
                buffer.size = n
                permit(c, <uintptr_t>buffer.ptr, n)
            arenapy_lock_release(&c.lock)
            if done or missing == 0:
                break
            if attempt == 0:
                c.flush_all(True, NULL)      # what is free there may be in a thread's cache
            elif attempt == 1:
                # Blocks at the end that grow one after another would make the pool grow without
                # bound. So a block moves into idle memory, or as much of that is given back.
                if self.is_mostly_idle():
                    if self.can_move(buffer, n):
                        return False
                    behind = Place(0, <uintptr_t>buffer.ptr, <uintptr_t>buffer.ptr + n)
                    self.memory.shrink(missing, True, &behind)
                try:
                    miss = self.memory.grow_behind(buffer.tag, missing)
                except MemoryError:
                    break
                if not miss:
                    break
        if done:
            c.handed_out(buffer.ptr, n, buffer.tag)
            if c.debug:
                c.operated()
        return done

    cdef bint is_mostly_idle(self):
        cdef PoolFigures f = self.core.figures()
        return f.all.idle > f.all.peak

    cdef bint can_move(self, Buffer buffer, Py_ssize_t n):
        """Into memory of the pool, now?"""
        cdef PoolCore c = self.core
        return (
            buffer.word < ONE_EXPORT
            and (c.hooks is not None or c.host_accessible)
            and has_run(c, c.pages_for(n, max(buffer.align, c.block_align)))
        )

    cdef Buffer block_of(self, MemoryOwner owner, Py_ssize_t n, Py_ssize_t align):
        # A graph uses its idle memory whenever it is launched. (A block that moves is of a capture
        # that is over.)
        if isinstance(owner, StreamCache) and not (<StreamCache>owner).lent.of_graph:
            return self.stream_block(<StreamCache>owner, n, align)
        return self.block(n, align, False)

    # -- giving memory back

    def trim(self, keep_bytes=0):
        """Return idle memory to the source, starting with the memory that was idle for longest.

        Over Host and ``Shared(grow=True)``, single pages are returned, and over a device with
        ``grow=True``, single pages of 2 MiB. Over other sources, whole regions are returned.

        Parameters
        ----------
        keep_bytes : int
            Stop when this many idle bytes are left.

        Returns
        -------
        int
            The number of returned bytes.

        Examples
        --------
        >>> pool = arenapy.Pool()
        >>> pool.alloc(1 << 20).release()
        >>> pool.trim() >= 1 << 20, pool.stats().idle_bytes
        (True, 0)
        """
        cdef PoolCore c = self.core
        cdef size_t keep = as_size(keep_bytes, "keep_bytes")
        cdef size_t idle, freed
        c.open_check()
        c.settle_sends()                     # if there are leases
        c.reclaim_leases(ALL_LEASES)
        if self.streams is not None:
            self.streams.give_back_all(False, 0)
            self.streams.settle_gone(None)
            self.streams.settle_graphs(False)
        c.settle_streams(False)
        c.flush_all(True, NULL)
        idle = c.figures().all.idle
        freed = self.memory.trim((idle - keep) >> PAGE_BITS) if idle > keep else 0
        return freed << PAGE_BITS

    def defragment(self):
        """Merge all free memory and return it to the source. No live block moves.

        Returns
        -------
        Defragmented
            The number of returned bytes, and the time in milliseconds.

        Examples
        --------
        >>> pool = arenapy.Pool()
        >>> pool.alloc(1 << 20).release()
        >>> pool.defragment().bytes >= 1 << 20
        True
        """
        from arenapy.stats import Defragmented

        start = perf_counter()
        return Defragmented(self.trim(), 1e3 * (perf_counter() - start))

    def _growth(self):
        """Of all growth: bytes faulted in, seconds by the clock, and of the processor. The most
        bytes that were ever reserved. Why the source refused its last request, or None."""
        cdef PoolMemory memory = self.memory
        return (memory.grown_bytes, memory.grown_seconds, memory.grown_cpu,
                memory.peak_pages << PAGE_BITS, memory.refused())

    def _trim_stale(self):
        """Give back now what `trim_after` would give back; return the bytes."""
        return self.trim_old() << PAGE_BITS

    # -- growth: what is done for a request that the memory of the pool cannot serve

    cdef char* source_alloc(
        self, size_t n, size_t align, bint hooks, uint64_t* block_id
    ) except NULL:
        cdef char* ptr = NULL
        cdef bint miss
        cdef int round = 0
        while ptr == NULL:
            try:
                miss = self.more(n, align, hooks, round)
            except OutOfMemory:
                # Others may have let go meanwhile.
                ptr = self.core.alloc_block(n, align, False, block_id)
                if ptr == NULL:
                    raise
            if ptr == NULL:
                ptr = self.core.alloc_block(n, align, miss, block_id)
            round += 1
        return ptr

    cdef bint more(self, size_t n, size_t align, bint hooks, int round) except -1:
        cdef PoolCore c = self.core
        cdef bint asked = False              # about all leases
        # Each round asks about all blocks that are pending: so there should be few.
        cdef Py_ssize_t wait = 1 << min(max(round - FEW_ROUNDS, 0), 30)
        cdef StreamCaches streams = self.streams
        cdef size_t missing = 0, wished, before, idle, least, freed
        cdef size_t most = <size_t>-1        # idle pages that are given back for a source
        cdef size_t pages = c.pages_for(n, align)
        cdef Place place = Place(0, 0, 0)
        cdef object error = None
        cdef bint others = False             # another thread had the only region
        c.open_check()
        if n > <size_t>MAX_PAGES << PAGE_BITS:
            raise OutOfMemory(self.full(n, hooks, "no address space is that large"))
        if c.may_lease:
            c.settle_sends()
            asked = all_leases_due(&c.leased, c.reserved_pages)
            if asked and self.reclaim_all():
                return False
        if (c.settle_streams(NEEDED)
                or streams is not None and (streams.settle_graphs(NEEDED) or streams.reclaim())):
            return False
        wished = max(pages, <size_t>HUGE_PAGES, self.growth())
        if c.merges_first:                   # the driver takes so much, and nobody had the rest
            wished = (wished + HUGE_PAGES - 1) // HUGE_PAGES * HUGE_PAGES
        self.memory.recycle(pages, n)
        before = c.reserved_pages
        while True:
            if not have_spare(c):
                raise OutOfMemory(self.full(n, hooks, "there is no memory for more bookkeeping"))
            others = c.n_segments > 0
            try:
                if self.memory.grow(pages, wished, &missing, &place):
                    return True
            # The second one: a child still sees the file whose memory `trim` gave back.
            except (MemoryError, BlockingIOError) as e:
                error = e
                missing = 0
            # The blocks that were unused longest make room, in the limit or in the machine. To find
            # them, all caches of threads are flushed. The request may fit into what was in those.
            # A device's memory is looked through in another way, and might refuse it again.
            idle = self.memory.trimmable()
            if not c.merges_first and has_run(c, pages):
                return False
            if missing == 0:                 # a source does not say how much it lacks
                most = min(most, idle)       # others may free memory as long as this goes on
                missing = min(place.lacking if place.lacking else pages, most)
            if missing > idle or self.memory.only:
                break
            freed = self.memory.shrink(missing, True, &place)
            if freed == 0:
                break
            most -= min(most, freed)
            wished = pages
        if not asked and self.reclaim_all():
            return False
        # Another thread has given the only region back meanwhile, or has room in it again.
        if (self.memory.only and others and round < MOST_TURNS
                and pages << PAGE_BITS <= self.memory.only
                and (c.n_segments == 0 or has_run(c, pages))):
            return False
        # Another thread that grows has the room meanwhile, and may have had more than it needs.
        if error is None and (c.reserved_pages > before or self.memory.wait_for_growth()):
            return False
        # Memory that other streams keep or still work on; in the order of the pool's own.
        if streams is not None and (streams.give_back_all(False, 0) or streams.settle_graphs(True)):
            c.settle_streams(wait)
            return False
        if c.settle_streams(wait):
            return False
        if (streams is not None and (streams.give_back_all(True, 0) or streams.wait_for_chains())
                or hooks and self.on_oom is not None and self.on_oom(n)):
            c.settle_streams(wait)
            return False
        if error is not None:
            raise OutOfMemory(
                self.full(n, hooks, f"its source has no more ({reason_of(error)})")) from error
        self.memory.note_refusal(None)       # this is another reason
        least = pages + self.memory.unaligned
        if least <= self.memory.max_pages:
            raise OutOfMemory(self.full(n, hooks, "it has reached its limit"))
        wished = least
        if c.merges_first:                   # the driver takes such pages anyway
            wished = (least + HUGE_PAGES - 1) // HUGE_PAGES * HUGE_PAGES
        raise OutOfMemory(self.full(
            n, hooks, f"a region for them needs {least << PAGE_BITS} bytes, which is more than "
            f"max_bytes (set it to {wished << PAGE_BITS} or more)"))

    cdef bint reclaim_all(self) noexcept:
        """Free all that other processes have let go of. False: that is nothing."""
        cdef PoolCore c = self.core
        cdef size_t freed = c.reclaim_leases(ALL_LEASES)
        all_leases_asked(&c.leased, c.reserved_pages, freed >> PAGE_BITS)
        return freed > 0

    cdef size_t growth(self) noexcept:
        """Pages that a pool takes at once, though a request wants fewer."""
        cdef PoolCore c = self.core
        cdef size_t part = c.reserved_pages // GROWTH_SHARE
        cdef int share
        if not c.merges_first:
            return part
        # There are not many regions in the end: the last ones double what there is.
        share = max(1, min(<int>DEVICE_SHARE, MAX_SEGMENTS - c.n_segments))
        return max(min(part, <size_t>MAX_GROWTH * HUGE_PAGES), c.reserved_pages // share)

    cdef str full(self, size_t n, bint read, str why):
        """Why a request failed, and what to do; not all of it if nobody can `read` it, as in C."""
        cdef PoolFigures f
        if not read:
            return why
        f = self.core.figures()
        limit = "no limit" if self.max_bytes is None else f"max_bytes={self.max_bytes}"
        wait = ""
        if f.all.pending and self.core.hooks is not None:
            wait = ", or wait, outside of captures, for the streams that use the pending blocks"
        return (
            f"{n} bytes do not fit into the pool, and {why}. It has reserved {f.reserved} bytes "
            f"({limit}): {f.all.live} live, {f.all.pending} pending, {f.all.idle} idle. The "
            f"largest free block has {f.all.largest} bytes. Release blocks, "
            f"give a larger max_bytes, or free memory in on_oom{wait}"
        )

    cdef int take_batch(self, BlockBatch batch) except -1:
        """All blocks, or an exception and nothing was taken."""
        cdef PoolCore c = self.core
        cdef bint miss = False
        cdef Py_ssize_t got
        cdef int round = 0
        c.open_check()
        batch.begin(c)
        try:
            while batch.done < batch.n:
                got = batch.take(c, miss)
                miss = False
                if got == 0:                 # others may have let go; and once it is merged,
                    if c.may_lease:          # what is free may do
                        c.settle_sends()
                        c.reclaim_leases(LEASES_ASKED)
                    c.flush_all(True, NULL)
                    got = batch.take(c, False)
                if got == 0 and (
                        arenapy_glance(&c.spare) >= STOCK or not c.more_descriptors(STOCK)):
                    try:
                        miss = self.more(batch.sizes[batch.done], c.block_align, True, round)
                    finally:
                        batch.note_others(c)
                round = 0 if got else round + 1
        except BaseException:
            batch.undo(c)
            raise
        return 0

    # -- figures

    @property
    def kind(self) -> str:
        """Kind of memory, as its Buffers report it."""
        return self.core.kind

    @property
    def regions(self) -> tuple:
        """The regions. If they grow in place, they are address ranges with memory in parts."""
        return self.core.listed()

    def stats(self):
        """The present figures, as a :class:`arenapy.stats.PoolStats`.

        On a device, `peak_bytes` includes all memory kept by streams other than the pool's own.

        Examples
        --------
        >>> pool = arenapy.Pool()
        >>> x = pool.empty(1000)
        >>> stats = pool.stats()
        >>> stats.active_allocations, stats.allocated_bytes
        (1, 8192)
        """
        from arenapy.stats import ClassStats, PoolStats

        figures = self._figures()
        classes = tuple([ClassStats(**one) for one in figures.pop("classes")])
        return PoolStats(**figures, classes=classes)

    def _figures(self):
        # As stats(), without the import of the dataclasses.
        if self.core.may_lease:
            self.core.settle_sends()
        self.core.reclaim_leases(ALL_LEASES)
        self.core.settle_streams(False)
        if self.streams is not None:
            self.streams.settle_graphs(False)
            self.streams.collect()
        return figures_of(self.core)

    def reset_peak(self):
        """Restart `peak_bytes` from the present value, for the pool and each class.

        Examples
        --------
        >>> pool = arenapy.Pool()
        >>> pool.alloc(1 << 20).release()
        >>> pool.reset_peak()
        >>> pool.stats().peak_bytes
        0
        """
        note_reset(self)
        self.core.reset_peaks()

    def blocks(self):
        """Iterate over all blocks, live and free, by address.

        Returns
        -------
        iterator of BlockInfo
            The state at the moment of the call. Blocks of up to 32 KiB have the age of the span of
            pages that they share.

        Examples
        --------
        >>> pool = arenapy.Pool()
        >>> x = pool.empty(1 << 20, "u1")
        >>> [block.nbytes for block in pool.blocks() if block.state == "live"]
        [1048576]
        """
        return listing(self.core)

    def _tally(self):
        cdef PoolFigures f = self.core.figures()
        return f.all.allocations, f.bytes, f.all.live

    def _exchange_peak(self, peak):
        return self.core.exchange_peak(0 if peak is None else peak)

    def _record(self, recorder, ended=None):
        self.core.record_into(recorder, ended)
        self.core.update_fast_path()

    def _reserved(self):
        return extents(self.core)

    def check(self):
        """Verify the bookkeeping; raise an error that names the fault.

        The time grows with the number of blocks.

        In debug mode, also verify free memory.

        Examples
        --------
        >>> pool = arenapy.Pool()
        >>> pool.check()                         # it finds no error
        """
        verify(self.core)
        self.core.check_free()

    def __repr__(self):
        cdef PoolFigures f = self.core.figures()
        return (
            f"<Pool {self.core.kind} {format_bytes(f.reserved)}, {format_bytes(f.all.live)} live, "
            f"{format_bytes(f.all.idle)} idle{', closed' if self.core.shut else ''}>"
        )

    def __reduce__(self):
        raise TypeError("a Pool is not pickled; only the process that made it allocates from it")


cdef object as_seconds(object value):
    """The argument `trim_after` as a float."""
    cdef double seconds = -1
    try:
        seconds = float(value)
    except (TypeError, ValueError):
        raise TypeError(
            f"trim_after={value!r} is of type {type(value).__name__}; give seconds, or None"
        ) from None
    except OverflowError:
        pass
    if not seconds >= 0:
        raise ValueError(f"trim_after={value} is not a number of seconds, 0 or more")
    return seconds
