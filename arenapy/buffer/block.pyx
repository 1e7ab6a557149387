"""Block: what a Buffer is underneath, and MemoryOwner: what its bytes belong to.

What lives here: the one-word state of a block (closed, held, live exports), what becomes of it when
its Buffer is gone, and what is asked of memory that streams use (StreamHooks). What does not: how
Python sees a block and moves its bytes (buffer), where bytes come from (memory/region), who hands
them out (allocators), any answer to StreamHooks (arenapy.cuda, which alone knows what streams are).

The invariant kept here is the second of the design: a byte that somebody can still see is
never handed out again. Every way to see bytes goes through `acquire`, which marks the root
HELD under the owner's lock, after asking the owner whether the block is still valid. From
then on only the death of the Buffer object ends the hold (see buffer.pyx).
"""
cimport cython
from cpython.object cimport PyObject
from libc.stdint cimport int64_t, uint64_t, uintptr_t
from libc.stdlib cimport free, malloc
from libc.string cimport memset

from arenapy.base.assertion cimport ASSERTS, arenapy_assert
from arenapy.base.atomic cimport (
    ARENAPY_GIL, arenapy_add, arenapy_cas, arenapy_count, arenapy_load, arenapy_lock_acquire,
    arenapy_lock_release, arenapy_store, arenapy_sub, rank_lock,
)
from arenapy.diagnostics.call_sites cimport allocated_at
from arenapy.base.sealed cimport seal
from arenapy.base.thread_slot cimport RANK_OWNER, thread_number

cdef extern from "Python.h":
    void PyObject_GC_Del(void* o)
    bint PyObject_GC_IsTracked(PyObject* o)
    void PyObject_GC_Track(PyObject* o)
    void count_up "Py_INCREF" (PyObject* o) noexcept
    void count_down "Py_DECREF" (PyObject* o) noexcept

cdef extern from "<stdlib.h>" nogil:
    int posix_memalign(void** at, size_t align, size_t size)


cdef class MemoryOwner:
    """The owner of a Buffer's bytes: a Region or an allocator's core. Internal."""

    def __cinit__(self, *args, **kwargs):
        self.kind = "host"
        self.device_id = -1
        self.host_accessible = True
        rank_lock(&self.lock, RANK_OWNER)

    def __dealloc__(self):
        cdef Hold* hold
        cdef int k
        drop_kept(self)
        if self.freelists != NULL:           # who ends the last root is done with its freelist
            for k in range(N_FREELISTS):
                empty_freelist(nth_freelist(self, k))
            free(self.freelists)
        while self.spare != NULL:
            hold = self.spare
            self.spare = hold.next
            free(hold)

    cdef bint alive(self, Block root) noexcept nogil:
        return True

    cdef void enlist(self, Hold* hold) noexcept nogil:
        pass

    cdef void delist(self, Hold* hold) noexcept nogil:
        pass

    cdef void release_block(self, Block root) noexcept nogil:
        pass

    cdef void hold_ended(self, Hold* hold) noexcept nogil:
        free(hold)

    cdef void drop_block(self, PyObject* root) noexcept:
        pass

    cdef bint defer_free(self, Hold* hold) noexcept nogil:
        return True

    cdef void finish_free(self, Hold* hold) noexcept nogil:
        self.hold_ended(hold)

    cdef bint has_holds(self) noexcept nogil:
        return False

    cdef void fork_lock(self) noexcept nogil:
        arenapy_lock_acquire(&self.lock)

    cdef void fork_unlock(self, bint child) noexcept nogil:
        cdef int k
        if child and self.freelists != NULL:
            for k in range(N_FREELISTS):
                if k + 1 != thread_number():  # that of a thread that was stopped anywhere
                    nth_freelist(self, k).kept = NULL
                    nth_freelist(self, k).n_kept = 0
        arenapy_lock_release(&self.lock)

    cdef void disable(self, int why) noexcept nogil:
        self.gone = why

    cdef void expect_leases(self, bint forks) noexcept nogil:
        self.may_lease = True

    cdef void forked(self, bint unmapped) noexcept nogil:
        if unmapped:
            self.gone = GONE_FORKED

    cdef int lease_live(self, PyObject* region, void* seen) noexcept nogil:
        return 0

    cdef int check(self) except -1:
        return 0

    cdef object allocator_of(self):
        return None

    cdef object region_at(self, char* ptr):
        return None

    cdef void leaving(self, void* ptr) noexcept nogil:
        pass

    cdef int verify(self) except -1:
        return 0


seal(MemoryOwner, "a MemoryOwner is internal; make a source's region, or an allocator")


# no_gc_clear: the dealloc needs the owner to the last. A cycle through a block goes through a
# user's object too, which the collector can clear.
@cython.no_gc_clear
cdef class Block:
    """The state of a Buffer. Internal: what users see is Buffer."""

    def __cinit__(self):
        self.word = CLOSED        # until its maker opens it


seal(Block, "a Block is internal; what users see is Buffer")


# ---- dead roots --------------------------------------------------------------------------

cdef Freelist no_freelist
no_freelist.n_kept = KEPT_OBJECTS            # nothing is found there, and nothing left


cdef inline Freelist* nth_freelist(MemoryOwner owner, int64_t k) noexcept nogil:
    return <Freelist*>(owner.freelists + k * FREELIST_BYTES)


cdef int init_freelists(MemoryOwner owner, list shards) except -1:
    cdef void* freelists = NULL
    if not ARENAPY_GIL:
        if posix_memalign(&freelists, FREELIST_BYTES, N_FREELISTS * FREELIST_BYTES):
            raise MemoryError("no memory for the bookkeeping of an allocator")
        memset(freelists, 0, N_FREELISTS * FREELIST_BYTES)
        owner.freelists = <char*>freelists
        owner.shards = <PyObject*>shards if shards is not None else NULL
    return 0


cdef Freelist* own_freelist(PyObject* owner) noexcept:
    cdef uint64_t k = thread_number() - 1
    if k >= N_FREELISTS or (<MemoryOwner>owner).freelists == NULL or (<MemoryOwner>owner).foreign:
        return &no_freelist
    return nth_freelist(<MemoryOwner>owner, k)


@cython.final
@cython.no_gc_clear               # the owner is needed to the last
cdef class CountShard:
    pass


seal(CountShard)


cdef int take_shard(Block root) except -1:
    cdef Freelist* freelist = freelist_of(<PyObject*>root.owner)
    cdef CountShard shard
    if ARENAPY_GIL or freelist == &no_freelist:
        return 0
    if freelist.shard == NULL and root.owner.shards == NULL:
        freelist.shard = <PyObject*>root.owner
    elif freelist.shard == NULL:
        shard = CountShard.__new__(CountShard)
        shard.owner = root.owner
        (<list>root.owner.shards).append(shard)
        freelist.shard = <PyObject*>shard
    root.shard = freelist.shard
    count_up(root.shard)
    count_down(<PyObject*>root.owner)
    return 0


cdef void track(Block root) noexcept:
    cdef PyObject* shard = root.shard
    if shard != NULL:                        # the collector takes it that `owner` is counted
        count_up(<PyObject*>root.owner)
        root.shard = NULL
        count_down(shard)
    if not PyObject_GC_IsTracked(<PyObject*>root):
        PyObject_GC_Track(<PyObject*>root)


cdef void empty_freelist(Freelist* freelist) noexcept:
    cdef PyObject* root
    while freelist.kept != NULL:
        root = freelist.kept
        freelist.kept = <PyObject*>(<Block>root).ptr
        freelist.n_kept -= 1
        PyObject_GC_Del(root)


cdef void drop_kept(MemoryOwner owner) noexcept:
    empty_freelist(&owner.freelist)


# ---- state -------------------------------------------------------------------------------

cdef Block root_of(Block block):
    return block if block.root is None else block.root


cdef bint is_open_locked(Block block) noexcept:
    cdef Block root = root_of(block)
    cdef uint64_t word = arenapy_load(&root.word)
    if (word | arenapy_load(&block.word)) & CLOSED or root.owner.gone:
        return False
    return word != 0 or root.owner.alive(root)


cdef bint is_open(Block block) noexcept:
    cdef MemoryOwner owner = root_of(block).owner
    cdef bint valid
    arenapy_lock_acquire(&owner.lock)
    valid = is_open_locked(block)
    arenapy_lock_release(&owner.lock)
    return valid


cdef int check_open(Block block) except -1:
    if not is_open(block):
        raise ValueError(why_closed(block))
    return 0


cdef str why_closed(Block block):
    cdef MemoryOwner owner = root_of(block).owner
    cdef str why = "it was released, or its frame was reset"
    if owner.gone == GONE_CLOSED:
        why = "its region was closed"
    elif owner.gone == GONE_FORKED:
        why = "its memory stayed with the parent process when this one was forked"
    return f"{name_of(block)} is closed: {why}; allocate a new Buffer"


cdef int acquire(Block block, bint count) except -1:
    return take_hold(block, ONE_EXPORT if count else 0, HELD)


cdef int pin(Block block) except -1:
    return take_hold(block, ONE_EXPORT, 0)


cdef inline int take_hold(Block block, uint64_t step, uint64_t state) except -1:
    """Count it, and set `state`, as one change."""
    cdef Block root = root_of(block)
    cdef bint held, no_memory = False
    check_open(block)
    if root.owner.checked:
        root.owner.check()
    if root is not block and not add_export(block, step, 0):     # the slice's own, which may close
        raise ValueError(why_closed(block))
    held = add_export(root, step, HELD)
    if not held:
        arenapy_lock_acquire(&root.owner.lock)
        if not arenapy_load(&root.word) & HELD and is_open_locked(block):
            held = keep_in_place(root)
            no_memory = not held
            if held:
                arenapy_add(&root.word, state + step)    # at once: who sees HELD may close it
        else:                                # another thread was first, or it is closed
            held = add_export(root, step, HELD)
        arenapy_lock_release(&root.owner.lock)
    if held:
        if ASSERTS:                          # compilers keep atomic loads
            arenapy_assert(
                arenapy_load(&root.word) & ~<uint64_t>CLOSED != 0, b"a block that is held says so")
            arenapy_assert(
                root.owner.recycles or root.hold != NULL, b"a held block has a hold")
        return 0
    if root is not block:
        arenapy_sub(&block.word, step)
    if no_memory:
        raise MemoryError("no memory for the record of an export")
    raise ValueError(why_closed(block))


cdef void unpin(Block block) noexcept:
    cdef Block root = root_of(block)
    cdef MemoryOwner owner = root.owner
    cdef bint over = False
    if root is not block:
        arenapy_sub(&block.word, ONE_EXPORT)
    arenapy_lock_acquire(&owner.lock)       # against whoever marks it HELD
    if ASSERTS:
        arenapy_assert(arenapy_load(&root.word) >= ONE_EXPORT, b"a pin that ends was counted")
    if arenapy_sub(&root.word, ONE_EXPORT) == ONE_EXPORT:
        if owner.recycles:
            arenapy_count(&owner.n_held, -1)
        elif root.hold.flags & HOLD_RETIRED:
            # Its frame was reset meanwhile, which closes a block that nobody else sees.
            arenapy_store(&root.word, CLOSED)
            over = True
        else:
            owner.delist(root.hold)
            drop_hold(owner, root.hold)
            root.hold = NULL
    arenapy_lock_release(&owner.lock)
    if over:
        end_hold(<PyObject*>root)


cdef inline bint keep_in_place(Block root) noexcept nogil:
    """The first export or pin of a root; lock held. False: no memory."""
    cdef Hold* hold = NULL
    if arenapy_load(&root.word):
        return True                          # it is pinned
    if not root.owner.recycles:
        hold = new_hold(root.owner)
        if hold == NULL:
            return False
    enlist_hold(root, hold)
    return True


cdef inline bint add_export(Block block, uint64_t step, uint64_t state) noexcept nogil:
    """Count it, as one change, unless HELD and CLOSED are not as in `state`."""
    cdef uint64_t word = arenapy_load(&block.word)
    while word & (HELD | CLOSED) == state:
        if arenapy_cas(&block.word, &word, word + step):
            return True
    return False


cdef void born_held(Block root, Hold* hold) noexcept nogil:
    enlist_hold(root, hold)
    arenapy_store(&root.word, HELD)


cdef void enlist_hold(Block root, Hold* hold) noexcept nogil:
    """All of it but the word."""
    if root.owner.recycles:
        arenapy_count(&root.owner.n_held, 1)
        return
    hold.start = <uintptr_t>root.ptr
    hold.end = hold.start + <size_t>root.size + (root.size == 0)   # a 0-byte block occupies one
    hold.tag = root.tag
    hold.pad = root.pad
    hold.flags = HOLD_EMPTY if root.size == 0 else 0
    arenapy_assert(hold.start < hold.end, b"a hold has bytes: start < end")
    root.hold = hold
    root.owner.enlist(hold)


cdef void unacquire(Block block) noexcept:
    if ASSERTS:
        arenapy_assert(
            arenapy_load(&block.word) >= ONE_EXPORT, b"an export that ends was counted")
        arenapy_assert(
            arenapy_load(&root_of(block).word) >= ONE_EXPORT,
            b"an export that ends was counted by its root")
    if block.root is not None:
        arenapy_sub(&block.word, ONE_EXPORT)
    arenapy_sub(&root_of(block).word, ONE_EXPORT)


cdef str name_of(Block block):
    """How messages call it: enough to find the block."""
    cdef MemoryOwner owner = root_of(block).owner
    allocator = owner.allocator_of()
    return (
        f"the {owner.kind} Buffer of {block.size} bytes at {<uintptr_t>block.ptr:#x}"
        + (f" of {type(allocator).__name__}" if allocator is not None else "")
        + place_of(block)
    )


cdef str place_of(Block block):
    """In debug mode where it was allocated, to follow its name; else nothing."""
    return allocated_at(root_of(block).place)


# ---- streams -----------------------------------------------------------------------------

cdef object named_stream(MemoryOwner owner, object stream):
    if stream is None:
        return None
    if owner.hooks is None:                # say so instead of ignoring the argument
        raise ValueError(
            f"stream={stream!r}: {owner.kind} memory is not ordered by a stream; pass None, "
            "or use a source of arenapy.cuda"
        )
    return owner.hooks.named(stream)


# Nobody changes the list of a block's uses: who adds one or drops one makes another list. So no
# list is changed under the lock, and a use is noted before the block is closed or not at all.

cdef int note_use(Block block, object use) except -1:
    cdef Block root = root_of(block)
    cdef MemoryOwner owner = root.owner
    cdef list uses = None
    cdef Hold* hold = NULL
    if not owner.recycles:
        acquire(block, False)                # which makes a hold
    elif root.hold == NULL:
        hold = <Hold*>malloc(sizeof(Hold))
        if hold == NULL:
            raise MemoryError("no memory for the record of a stream")
        hold.uses = NULL
        hold.start = <uintptr_t>root.ptr
        hold.end = hold.start + <size_t>root.size + (root.size == 0)
        hold.tag = root.tag
        hold.pad = hold.flags = 0
    try:
        while True:
            uses = listed_uses(root)
            if uses is not None and use in uses:
                check_open(block)
                return 0
            if replace_uses(block, uses, [use] if uses is None else uses + [use], &hold):
                return 1 if uses is None else <int>len(uses) + 1
            check_open(block)                # else another thread was faster
    finally:
        free(hold)


cdef int drop_use(Block block, object use) except -1:
    cdef Block root = root_of(block)
    cdef list uses = listed_uses(root), others
    while uses is not None and len(uses) > 1:
        others = [one for one in uses if one is not use]
        if len(others) == len(uses) or replace_uses(root, uses, others, NULL):
            break
        uses = listed_uses(root)
    return 0


cdef list uses_of(Block block):
    return list(listed_uses(root_of(block)) or ())


cdef list listed_uses(Block root):
    """Of an open block, or None."""
    cdef list uses = None
    arenapy_lock_acquire(&root.owner.lock)
    if is_open_locked(root) and root.hold != NULL and root.hold.uses != NULL:
        uses = <list>root.hold.uses
    arenapy_lock_release(&root.owner.lock)
    return uses


cdef bint replace_uses(Block block, list seen, list uses, Hold** hold) noexcept:
    """False if `seen` is not its list any more, or the block is closed.

    The hold is for a block that has none.
    """
    cdef Block root = root_of(block)
    cdef PyObject* old = NULL if seen is None else <PyObject*>seen
    cdef bint same
    arenapy_lock_acquire(&root.owner.lock)
    same = is_open_locked(block) and (
        hold != NULL and old == NULL if root.hold == NULL else root.hold.uses == old)
    if same:
        if root.hold == NULL:
            root.hold, hold[0] = hold[0], NULL
            arenapy_count(&root.owner.n_held, 1)     # it keeps its region open
        root.hold.uses = <PyObject*>uses
        count_up(root.hold.uses)
    arenapy_lock_release(&root.owner.lock)
    if same and old != NULL:
        count_down(old)
    return same


cdef void end_hold(PyObject* o) noexcept:
    cdef PyObject* owner = <PyObject*>(<Block>o).owner
    cdef Hold* hold = (<Block>o).hold
    cdef bint live = True
    (<Block>o).hold = NULL
    arenapy_assert(hold.start < hold.end, b"a hold has bytes: start < end")
    if (<MemoryOwner>owner).recycles:
        arenapy_assert(
            arenapy_load(&(<MemoryOwner>owner).n_held) >= (2 if (<Block>o).word & HELD else 1),
            b"a hold that ends was counted")
        arenapy_count(&(<MemoryOwner>owner).n_held, -2 if (<Block>o).word & HELD else -1)
        live = hold.tag != 0 and (<MemoryOwner>owner).defer_free(hold)
    if live and hold.uses != NULL:
        (<MemoryOwner>owner).hooks.defer_hold(owner, hold)
    elif (<MemoryOwner>owner).recycles:
        free_hold(hold)
    else:
        (<MemoryOwner>owner).hold_ended(hold)


cdef void free_hold(Hold* hold) noexcept:
    if hold.uses != NULL:
        count_down(hold.uses)
    free(hold)


cdef int check_host(Block block) except -1:
    check_open(block)
    if not block.owner.host_accessible:
        how = "with copy_to(host_buffer)" if block.owner.hooks is not None else "as its source says"
        raise BufferError(f"{name_of(block)} cannot be read by the host; copy it {how}")
    return 0


cdef int writable(Block block) except -1:
    host_only(block)
    if is_readonly(block):
        raise BufferError(f"{name_of(block)} is read-only; copy it to a writable Buffer")
    return 0

# ---- what cuda/ implements --------------------------------------------------------------------

cdef class StreamHooks:
    """Memory that streams use. Internal."""

    cdef StreamHooks bound(self, object stream):
        raise NotImplementedError

    cdef StreamHooks of_cache(self, object stream):
        return self.bound(stream)

    cdef StreamHooks of_allocator(self, object stream):
        return self.bound(stream)

    cdef object named(self, object stream):
        raise NotImplementedError

    cdef object stream_cache(self, object stream):
        return None

    cdef object graph_of(self, object stream):
        raise NotImplementedError

    cdef bint always(self, object stream, object named):
        raise NotImplementedError

    cdef bint free_now(self, object named) noexcept:
        return False

    cdef bint ended(self, object stream) noexcept:
        return False

    cdef bint done(self, object stream) noexcept:
        return False

    cdef int join(self, object stream, object other) except -1:
        raise NotImplementedError

    cdef bint may_begin(self, object stream) except -1:
        raise NotImplementedError

    cdef int not_captured(self, object stream) except -1:
        raise NotImplementedError

    cdef int begin(self, object block, object stream) except -1:
        raise NotImplementedError

    cdef int use(self, object block, object stream) except -1:
        raise NotImplementedError

    cdef void defer_hold(self, PyObject* owner, void* hold) noexcept:
        pass

    cdef Py_ssize_t collect(self, PyObject* owner, Py_ssize_t wait) noexcept:
        return 0

    cdef int fence(self, object stream) except -1:
        raise NotImplementedError

    cdef object consumer(self, object stream):
        raise NotImplementedError

    cdef int lend(self, object block, object stream) except -1:
        raise NotImplementedError

    cdef int ready(self, object block, object stream) except -1:
        raise NotImplementedError

    cdef object offer(self, object block):
        raise NotImplementedError

    cdef void finish(self, PyObject* owner, object memory) noexcept:
        pass

    cdef void* hand_over(self) noexcept:
        return NULL

    cdef void leave(self, tuple regions) noexcept:
        pass

    cdef int extend(self, object block) except -1:
        return 0

    cdef int movable(self, object source) except -1:
        raise NotImplementedError

    cdef int move(self, object to, object source) except -1:
        raise NotImplementedError

    cdef int copy(self, object to, object source, object stream) except -1:
        raise NotImplementedError

    cdef int fill(self, object block, int byte, object stream) except -1:
        raise NotImplementedError


seal(StreamHooks, "a StreamHooks is internal; use a source of arenapy.cuda")
