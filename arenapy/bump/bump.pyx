"""Bump: an arena as the user holds it.

What lives here: arguments, errors, marks and scopes, and the calls in C that are not inline (those
are in bump.pxd). What does not: address arithmetic and what a reset frees (core), growth (growth),
arrays (allocator/allocator).

Every method makes the Python objects it needs first, then calls the core under its lock, so
that a call that raises has changed nothing, and no Python code runs in between.
"""
cimport cython
from cpython.object cimport PyObject
from libc.stdint cimport uint32_t, uint64_t, uintptr_t

from collections.abc import Iterable

from arenapy.base.atomic cimport (
    ARENAPY_GIL, arenapy_lock_acquire, arenapy_lock_release,
)
from arenapy.allocator.allocator cimport (
    Allocator, check_growth, check_source, complete, grown_in_c, make_region, moved,
)
from arenapy.base.sizes cimport MAX_BYTES, as_align, as_size, quick_size
from arenapy.buffer.block cimport (
    CLOSED, Hold, born_held, check_open, listed_uses, named_stream, new_hold, track,
)
from arenapy.buffer.buffer cimport Buffer, freelist_pop, new_block
from arenapy.bump.hot_path cimport arena_alloc, catch_up, rewind
from arenapy.bump.core cimport BumpCore, Figures, Frame, Mark, begin_mark, end_mark
from arenapy.bump.growth cimport (
    GROWN, GROWN_NOT, GROWN_TO_THE_END, GROWN_TOO_LATE, InPlace, give_back_growth, grow_arena,
    grow_for, grow_in_place, grow_last, holes_of, in_place, times_freed,
)
from arenapy.diagnostics.recorder cimport (
    EVENT_ALLOC, EVENT_MARK, EVENT_RESET,
)
from arenapy.allocator.allocator_core cimport record
from arenapy.diagnostics.call_sites cimport NO_SITE, call_site
from arenapy.base.sealed cimport seal
from arenapy.memory.region cimport Region

from arenapy.base.text import format_bytes
from arenapy.bump.check import verify
from arenapy.memory.sources import Host


cdef extern from "Python.h":
    void PyObject_GC_Track(PyObject* o)
    void PyObject_GC_UnTrack(PyObject* o)

cdef enum:
    NAMED = 4                # blocks that a message names at most
    MOST_TRIES = 10          # to grow in place beside other threads


@cython.final
cdef class Bump(Allocator):
    """Bump(nbytes, source=None, max_bytes=None, strict=False, debug=None, *, stream=None)\n--\n
    An arena: an allocation moves a cursor, and a reset moves it back.

    Parameters
    ----------
    nbytes : int
        Size of the first region.
    source : source, optional
        The kind of memory. By default ``Host()``, prefaulted.
    max_bytes : int, optional
        The arena grows by further regions, each twice as large as the previous one, up to this
        many bytes in total. Over a source with ``grow=True`` it has one region, which grows in
        place. By default it does not grow.
    strict : bool
        If True, a reset raises BufferError if blocks are held, instead of retiring them.
    debug : bool, optional
        Fill freed memory with a pattern and check it. By default, the environment variable
        ``ARENAPY_DEBUG`` decides.
    stream : stream, optional
        For memory of arenapy.cuda: the stream of blocks that name no other stream; see Pool.

    Notes
    -----
    Thread-safety: only one thread at a time may use it. Any thread may drop Buffers and arrays.

    Examples
    --------
    >>> import arenapy
    >>> arena = arenapy.Bump(1 << 20)
    >>> with arena.scope():
    ...     x = arena.empty((4, 4), "f4")
    ...     x[...] = 1
    ...     total = float(x.sum())
    ...     del x
    >>> total, arena.used
    (16.0, 0)
    """

    def __cinit__(self, nbytes=None, source=None, max_bytes=None, strict=False, debug=None, *,
                  stream=None):
        cdef BumpCore core = BumpCore.__new__(BumpCore)
        cdef Py_ssize_t n
        if nbytes is None:
            raise TypeError("nbytes=None: a Bump needs its size in bytes, like Bump(1 << 20)")
        n = as_size(nbytes, "nbytes")
        self.base = self.core = core
        if n == 0:
            raise ValueError("nbytes=0: an arena needs room; give its size in bytes")
        if max_bytes is not None:
            max_bytes = as_size(max_bytes, "max_bytes")
            if max_bytes < n:
                raise ValueError(f"max_bytes={max_bytes} is less than nbytes={n}; give more")
        if source is None:
            source = Host()
        core.adopt(source, stream)
        self.debug = core.watch(debug, verify)
        core.keep_dead_buffers(not self.debug)
        self.strict = strict
        check_source(source)
        self.source = self.grows_from = source
        if getattr(source, "grow", False) is True and hasattr(source, "reserve"):
            self.grows_from = in_place(source, n if max_bytes is None else max_bytes)
        core.open(make_region(core, self.grows_from, n))   # last: a file is emptied by it
        self.max_bytes = max_bytes
        complete(self)

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
            For memory of arenapy.cuda: the stream that will use the block. If this is not the
            allocator's own stream, the block is also held until that stream has finished.

        Returns
        -------
        Buffer
            Uninitialized. If it is never exported, the next reset closes it.

        Raises
        ------
        ValueError, TypeError
            If a size or an alignment is out of range.
        OutOfMemory
            If it does not fit. Nothing has changed then.

        Examples
        --------
        >>> arena = arenapy.Bump(1 << 20)
        >>> block = arena.alloc(4096, align=4096)
        >>> block.nbytes, block.address % 4096, arena.used
        (4096, 0, 4096)
        """
        # The usual call, with a GIL: no lock, no call but arena_alloc_slow's, and borrowed
        # references, since counting them takes as long as moving the cursor.
        cdef PyObject* core = <PyObject*>self.core
        cdef PyObject* o = (<BumpCore>core).freelist.kept
        cdef Py_ssize_t n = quick_size(<PyObject*>nbytes)
        cdef void* start
        if not ARENAPY_GIL or o == NULL or n < 0 or align is not None or stream is not None:
            return self.general_alloc(nbytes, align, stream)
        if (<BumpCore>core).ended_list != NULL:
            (<BumpCore>core).drain()
        start = arena_alloc(<BumpCore>core, n, (<BumpCore>core).block_align, &(<Buffer>o).pad)
        if start == NULL:
            return self.general_alloc(nbytes, align, stream)
        (<Buffer>o).size = n
        (<Buffer>o).align = <uint32_t>(<BumpCore>core).block_align
        (<Buffer>o).word = 0
        (<Buffer>o).tag = (<BumpCore>core).content
        return freelist_pop(core, &(<BumpCore>core).freelist, <char*>start)

    cdef Buffer general_alloc(self, object nbytes, object align, object stream):
        cdef Py_ssize_t n = as_size(nbytes, "nbytes")
        cdef Py_ssize_t a = self.core.block_align if align is None else as_align(align)
        return self.buffer_for(n, a, stream)

    cdef Buffer block(self, Py_ssize_t n, Py_ssize_t align, bint held):
        cdef BumpCore c = self.core
        cdef Buffer b
        if c.checked:
            c.check()
        b = new_block(c, n)
        b.word = CLOSED                      # until there is memory: the source may find it
        b.align = align
        cdef Hold* hold = NULL
        cdef void* start
        arenapy_lock_acquire(&c.lock)
        catch_up(c)
        if held:
            hold = new_hold(c)               # before the cursor moves
        start = arena_alloc(c, n, align, &b.pad) if hold != NULL or not held else NULL
        b.ptr = <char*>start
        b.tag = c.content
        if start != NULL:
            b.word = 0
            if held:
                born_held(b, hold)
        arenapy_lock_release(&c.lock)
        if held and hold == NULL:
            raise MemoryError("no memory for the record of an export")
        if start == NULL:
            grow_for(c, self.grows_from, self.max_bytes, b, n, align, hold)
            if c.foreign:
                track(b)
        record(c, EVENT_ALLOC, b.ptr, n)
        if c.debug:
            c.began(b.ptr, n + (n == 0), n)
            try:
                c.allocated([b])
            except BaseException:
                b.release()
                raise
        return b

    cdef void* slow_c(self, size_t nbytes, size_t align) except? NULL:
        cdef uint32_t pad
        if self.max_bytes is None and not isinstance(self.grows_from, InPlace):
            return NULL
        grow_arena(self.core, self.grows_from, self.max_bytes, nbytes, align)
        return arena_alloc(self.core, nbytes, align, &pad)

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

        Examples
        --------
        >>> arena = arenapy.Bump(1 << 20)
        >>> [block.nbytes for block in arena.alloc_many([100, 200, 300])]
        [100, 200, 300]
        """
        cdef list wanted, holes, blocks = []
        cdef BumpCore c = self.core
        cdef size_t size
        cdef Figures before
        cdef Buffer b
        cdef uint64_t made, nbytes = 0
        if not isinstance(sizes, Iterable):
            raise TypeError(f"sizes={sizes!r} is not iterable; alloc() takes a single size")
        PyObject_GC_UnTrack(<PyObject*>blocks)   # so that nobody changes it meanwhile
        wanted = [as_size(n, "sizes") for n in sizes]
        before = c.figures()                 # now: the sizes may come from code that allocates
        arenapy_lock_acquire(&c.lock)
        size = (<Region>c.region[0]).size
        arenapy_lock_release(&c.lock)
        holes = holes_of(c) if c.holes.n else None
        try:
            for n in wanted:
                b = self.block(n, self.core.block_align, False)
                blocks.append(b)
                nbytes += <size_t>b.size
        except BaseException:
            made = len(blocks)
            while blocks:                    # newest first: each moves the cursor back
                (<Buffer>blocks.pop()).release()
            arenapy_lock_acquire(&c.lock)
            catch_up(c)
            c.total -= made                  # other code may have allocated meanwhile
            c.freed -= nbytes
            c.peak_bytes = before.peak
            arenapy_lock_release(&c.lock)
            give_back_growth(
                c, self.grows_from, before.regions, before.capacity, size, holes)
            raise
        PyObject_GC_Track(<PyObject*>blocks)
        return blocks

    def grow(self, Buffer buffer not None, nbytes):
        """Grow `buffer`, a block of this arena, to `nbytes` and keep its contents.

        Parameters
        ----------
        buffer : Buffer
            A Buffer from :meth:`alloc` of this arena.
        nbytes : int
            The new size in bytes, at least the present size.

        Returns
        -------
        Buffer
            The same Buffer if it is the newest block, no mark is newer and there is room. Otherwise
            a new Buffer with the same contents, and the old one is released. Streams that use the
            old Buffer may continue with the new one: arenapy orders the copy after their earlier
            work, and their later work after the copy. In a scope, a new Buffer belongs to that
            scope.

        Raises
        ------
        BufferError
            If the block has to move and has live exports. Nothing has changed then.
        CudaError
            If the block has to move while a stream that uses it is captured. Nothing has changed
            then.
        ValueError
            If `buffer` is not a block of this arena, or is larger than `nbytes`.
        OutOfMemory
            If it does not fit. Nothing has changed then.

        Examples
        --------
        >>> arena = arenapy.Bump(1 << 20)
        >>> block = arena.alloc(5).copy_from(b"hello")
        >>> block = arena.grow(block, 4096)      # in place, because it is the newest block
        >>> block.nbytes, bytes(block[:5])
        (4096, b'hello')
        """
        cdef BumpCore c = self.core
        cdef Py_ssize_t n = as_size(nbytes, "nbytes")
        cdef bint asked = False
        cdef list told
        cdef int how = GROWN_NOT
        cdef int _n
        cdef uint64_t freed = 0
        cdef uintptr_t start
        check_open(buffer)
        if buffer.root is not None or <PyObject*>buffer.owner != <PyObject*>c:
            raise ValueError(f"{buffer!r} is not a block of this arena; pass one of its blocks")
        check_growth(buffer, n)
        self.core.open_check()
        # Streams and sources let other threads run, which may use and free the memory behind the
        # block, or change the block. Then the streams are told again.
        for _n in range(MOST_TRIES):
            freed = times_freed(c)
            told = listed_uses(buffer)
            if told is not None and n > buffer.size:
                c.hooks.extend(buffer)
            how = grow_last(c, buffer, n, told, freed)
            if how == GROWN_TO_THE_END and not asked and isinstance(self.grows_from, InPlace):
                asked = True
                try:
                    grow_in_place(c, <InPlace>self.grows_from, self.max_bytes,
                                  n - max(buffer.size, 1), 1, True)
                except MemoryError:
                    break                    # a free extent elsewhere may be large enough
                how = grow_last(c, buffer, n, told, freed)
            if how != GROWN_TOO_LATE:
                break
        if how == GROWN:
            record(c, EVENT_ALLOC, buffer.ptr, n)    # which ends the block that was there
            if c.debug:
                start = <uintptr_t>buffer.ptr
                c.ledger.begin(start, start + n + (n == 0), n, buffer.place)
                c.operated()
            return buffer
        check_growth(buffer, n)              # other code may have changed it
        return moved(self, c, buffer, n)

    def _reserved(self):
        ranges = []
        holes = holes_of(self.core)
        for region in self.regions:
            at = region.address
            for start, end in holes:         # of the only region
                ranges.append((at, start - at))
                at = end
            if at < region.address + region.nbytes:
                ranges.append((at, region.address + region.nbytes - at))
        return ranges

    def trim(self, keep_bytes=0):
        """Return free memory to the source.

        Over a source with ``grow=True``, the region shrinks in place to its last block, or to the
        last mark. Free memory before it is returned, too, in whole granules of 2 MiB, or of a page
        if that is larger, but not the first granule. It is the first to have memory again when the
        arena grows. Otherwise, the last regions are returned, as far as they are entirely free. The
        first one stays.

        Parameters
        ----------
        keep_bytes : int
            The arena keeps at least this capacity.

        Returns
        -------
        int
            The bytes by which the capacity shrank. 0 for memory of a device while its stream is
            captured.

        Examples
        --------
        >>> arena = arenapy.Bump(1 << 20, arenapy.Host(grow=True), max_bytes=1 << 30)
        >>> with arena.scope():
        ...     block = arena.alloc(100 << 20)
        >>> arena.trim() > 90 << 20, len(arena.regions)
        (True, 1)
        """
        cdef BumpCore c = self.core
        cdef size_t keep = as_size(keep_bytes, "keep_bytes")
        cdef Figures before
        c.open_check()
        before = c.figures()
        give_back_growth(c, self.grows_from, 1, keep, 1, [(0, <uintptr_t>-1)])
        if self.debug:
            c.operated()
        return before.capacity - c.figures().capacity

    # -- marks

    def mark(self):
        """Return a mark of the present position, for :meth:`reset`. Marks nest.

        Returns
        -------
        Mark

        Examples
        --------
        >>> arena = arenapy.Bump(1 << 20)
        >>> mark = arena.mark()
        >>> block = arena.alloc(1000)
        >>> arena.reset(mark)
        >>> arena.used, block.closed
        (0, True)
        """
        return self.enter()

    cdef Mark enter(self):
        cdef BumpCore c = self.core
        cdef Mark m = Mark.__new__(Mark)
        cdef Frame* frame
        arenapy_lock_acquire(&c.lock)
        catch_up(c)
        frame = c.push_frame() if not c.shut else NULL
        if frame != NULL:
            m.core = c
            begin_mark(m, c, frame)
        arenapy_lock_release(&c.lock)
        if frame == NULL:
            self.core.open_check()
            raise MemoryError("no memory for another mark")
        record(c, EVENT_MARK, <PyObject*>m, 0)
        return m

    def reset(self, mark=None, stream=None):
        """Free all blocks since a mark, except those that are held.

        Held blocks are retired: their bytes are free when they are dropped.
        Buffers that were never exported are closed. Marks newer than this one end. This mark
        stays valid.

        Parameters
        ----------
        mark : Mark, optional
            Without it, everything is freed and all marks end.
        stream : stream, optional
            A stream that may still use the memory. If the host can access the memory, too, the call
            waits for this stream.

        Raises
        ------
        ValueError
            If the mark has ended, or belongs to another arena.
        BufferError
            In a strict arena, if blocks are held. The message names them. Nothing has changed then.

        Examples
        --------
        >>> arena = arenapy.Bump(1 << 20)
        >>> x = arena.zeros(100)                 # an array holds its block
        >>> arena.reset()                        # so the block is retired
        >>> arena.used, arena.retired
        (0, 800)
        >>> del x
        >>> arena.retired
        0
        """
        if mark is not None and type(mark) is not Mark:
            raise TypeError(f"mark={mark!r} is not a Mark; pass a mark from Bump.mark()")
        if stream is not None:
            self.core.open_check()
            self.core.hooks.fence(named_stream(self.core, stream))
        self.rewind_to(<Mark>mark, self.strict)

    cdef int rewind_to(self, Mark mark, bint strict) except -1:
        cdef BumpCore c = self.core
        cdef Py_ssize_t f = 0, held = 0
        cdef int status = 0
        cdef int named = 0
        cdef Hold* hold
        cdef Py_ssize_t i
        cdef (uintptr_t, size_t)[4] names
        if not c.fast_rewind:
            c.open_check()
            if c.debug and c.ledger.place == NO_SITE:
                return self.rewind_watched(mark, strict)
        c.settle_sends()
        if mark is not None and <PyObject*>mark.core != <PyObject*>c:
            raise ValueError(f"{mark!r} belongs to another arena; reset that arena")
        arenapy_lock_acquire(&c.lock)
        if mark is not None:
            f = c.frame_of_mark(mark)
        if f >= 0 and strict:
            held = c.survivors(f)
            for i in range(f, c.n_frames):
                hold = c.frames[i].holds
                while hold != NULL and named < NAMED:
                    names[named] = (hold.start, hold.end - hold.start)
                    named += 1
                    hold = hold.next
        if f >= 0 and held == 0:
            status = rewind(c, f)
            if status == 0:
                while c.last_mark != NULL and c.last_mark != <PyObject*>mark:
                    end_mark(c.last_mark)
                if mark is not None:
                    c.frames[f].c_marks = min(c.frames[f].c_marks, mark.serial)
        arenapy_lock_release(&c.lock)
        if f < 0:
            raise ValueError(f"{mark!r} was ended by a reset to an older one; take a new mark")
        if status < 0:
            raise MemoryError("no memory for the bookkeeping of a reset")
        if c.unrecorded:
            raise MemoryError(
                "no memory to record which bytes of this arena other processes see, so it hands "
                "out none any more: make a new arena")
        if held:
            blocks = ", ".join([
                f"{names[i][1]} bytes at {names[i][0]:#x}{c.born_at(names[i][0])}"
                for i in range(named)])
            raise BufferError(
                f"{held} blocks are held, which this strict reset refuses: {blocks}"
                f"{', ...' if held > named else ''}; drop their arrays and views "
                "first, and let calls that copy or fill them return"
            )
        record(c, EVENT_RESET, NULL if mark is None else <PyObject*>mark, 0)
        return 0

    cdef int rewind_watched(self, Mark mark, bint strict) except -1:
        """Debug mode: let the ledger know where this reset is."""
        cdef BumpCore c = self.core
        c.ledger.place = call_site()
        try:
            self.rewind_to(mark, strict)
        finally:
            c.ledger.place = NO_SITE
        return c.operated()

    cdef int leave(self, Mark mark, bint failed) except -1:
        """End a scope: reset to its mark, unless a reset to an older one did."""
        cdef BumpCore c = self.core
        cdef bint stands
        try:
            # A region may have been closed, or a fork happened: then there is nothing to free.
            arenapy_lock_acquire(&c.lock)
            stands = c.frame_of_mark(mark) >= 0 and not c.shut
            arenapy_lock_release(&c.lock)
            if stands:
                # An exception on its way is never masked: a strict arena then retires.
                self.rewind_to(mark, self.strict and not failed)
        finally:
            arenapy_lock_acquire(&c.lock)
            end_mark(<PyObject*>mark)
            c.prune()
            arenapy_lock_release(&c.lock)

    def scope(self):
        """A context manager that marks on entry and resets to that mark on exit.

        ``as`` gives the arena. Exceptions are passed on. A reset to an older mark ends the scope
        early.

        Examples
        --------
        >>> arena = arenapy.Bump(1 << 20)
        >>> for _ in range(3):
        ...     with arena.scope():
        ...         _ = arena.alloc(1000)
        >>> arena.used, arena.peak
        (0, 1000)
        """
        cdef Scope scope = Scope.__new__(Scope)
        scope.arena = self
        return scope

    # -- figures

    @property
    def capacity(self) -> int:
        """Bytes of all regions."""
        return self.core.capacity

    @property
    def used(self) -> int:
        """Bytes of live blocks, padding included."""
        return self.core.figures().used

    @property
    def peak(self) -> int:
        """The peak of `used`, in bytes."""
        return self.core.figures().peak

    @property
    def remaining(self) -> int:
        """Free bytes, without growth."""
        return self.core.figures().free

    @property
    def retired(self) -> int:
        """Bytes of blocks that were held at a reset and still are."""
        return self.core.figures().retired

    @property
    def regions(self) -> tuple:
        """The regions, in order of growth."""
        return self.core.listed()

    @property
    def kind(self) -> str:
        """Kind of memory, as its Buffers report it."""
        return self.core.kind

    def stats(self):
        """The present figures, as a :class:`arenapy.stats.BumpStats`.

        Examples
        --------
        >>> arena = arenapy.Bump(1 << 20)
        >>> block = arena.alloc(1000)
        >>> arena.stats().live_bytes
        1000
        """
        from arenapy.stats import BumpStats

        cdef Figures f = self.core.figures()
        return BumpStats(
            capacity=f.capacity,
            live_bytes=f.live,
            free_bytes=f.free,
            largest_free_extent=f.largest_free,
            retired_bytes=f.retired,
            pending_bytes=f.leased,
            padding_bytes=f.used - f.live,
            peak_bytes=f.peak,
            held_buffers=f.held,
            marks=f.marks,
            regions=f.regions,
            total_allocations=f.total,
            metadata_bytes=f.metadata,
        )

    def _tally(self):
        cdef Figures f = self.core.figures_now()
        return f.total, f.bytes, f.used

    def _exchange_peak(self, peak):
        cdef size_t before = self.core.figures_now().peak
        self.core.peak_bytes = 0 if peak is None else peak
        return before

    def _record(self, recorder, ended=None):
        self.core.record_into(recorder, ended)
        self.core.keep_dead_buffers(self.core.recorder == NULL and not self.debug)

    def check(self):
        """Verify the bookkeeping; raise AssertionError on an error.

        The time grows with the number of free ranges and held blocks.

        In debug mode, also verify free memory. MemoryCorruption then names the block.

        Examples
        --------
        >>> arena = arenapy.Bump(1 << 20)
        >>> arena.check()                        # it finds no error
        """
        verify(self.core)
        self.core.check_free()

    def __repr__(self):
        cdef Figures f = self.core.figures()
        return (
            f"<Bump {self.core.kind} {format_bytes(f.capacity)}, {format_bytes(f.used)} used"
            f"{f', {format_bytes(f.retired)} retired' if f.retired else ''}"
            f"{', closed' if self.core.shut else ''}>"
        )

    def __reduce__(self):
        raise TypeError("a Bump is not pickled; only the process that made it allocates from it")


@cython.final
@cython.freelist(64)
cdef class Scope:
    """The result of :meth:`Bump.scope`: it marks on entry, and resets to the mark on exit."""

    def __enter__(self):
        if self.mark is not None:
            raise ValueError("this scope is already entered; call arena.scope() for another one")
        self.mark = self.arena.enter()
        return self.arena

    def __exit__(self, kind, value, traceback):
        cdef Mark mark = self.mark
        if mark is None:
            raise ValueError("this scope is not entered")
        self.mark = None
        self.arena.leave(mark, kind is not None)

    def __repr__(self):
        return f"<Scope of {self.arena!r}, {'open' if self.mark is not None else 'not open'}>"


seal(Scope, "a scope is made by Bump.scope(), not by calling the class")


# ---- in C, without the GIL --------------------------------------------------------------------

cdef void* bump_alloc_slow(Bump arena, size_t nbytes, size_t align) noexcept nogil:
    if arena.core.shut or nbytes > MAX_BYTES or align > MAX_BYTES:
        return NULL
    return grown_in_c(arena, nbytes, align)


cdef int bump_free(Bump arena, void* block, size_t nbytes) noexcept nogil:
    cdef uintptr_t start = <uintptr_t>block
    cdef uintptr_t end = start + nbytes + (nbytes == 0)
    cdef uintptr_t run_end
    cdef Py_ssize_t i
    if end <= start:               # it wraps: no block has so many bytes
        arena.core.refuse(b"bump_free", block)
        return -1
    catch_up(arena.core)
    if arena.core.move_back(start, end, arena.core.content, 0, nbytes == 0):
        return 0
    for i in range(arena.core.n_runs):
        run_end = arena.core.runs[i].end if i < arena.core.n_runs - 1 else arena.core.cursor
        if arena.core.runs[i].start <= start and end <= run_end:
            return 1
    arena.core.refuse(b"bump_free", block)
    return -1


cdef BumpMark bump_mark_slow(Bump arena) noexcept nogil:
    cdef Frame* frame = arena.core.push_frame() if not arena.core.shut else NULL
    if frame == NULL:
        return BumpMark(0, 0)
    arena.core.stamp += 1
    frame.c_marks = arena.core.stamp
    return BumpMark(frame.id, frame.c_marks)


cdef int bump_reset_slow(Bump arena, BumpMark mark) noexcept nogil:
    cdef Py_ssize_t f = arena.core.find_frame(mark.id)
    if arena.core.shut or mark.id == 0 or f < 0 or mark.serial > arena.core.frames[f].c_marks:
        return -1
    if rewind(arena.core, f) < 0:
        return -1
    arena.core.frames[f].c_marks = mark.serial
    arena.core.frames[f].python_marks = min(arena.core.frames[f].python_marks, mark.serial)
    return 0
