"""Blocks of a device's Pool that its other streams, and graphs, keep.

What lives here: the idle blocks of one stream, and their way from the pool and back (StreamCache);
which streams of a pool have one, and when their blocks go (StreamCaches). What does not: what calls
for it (pool), streams and events (cuda, behind the hooks), where blocks come from (thread_cache,
page_heap).

A block that its stream gives back is the stream's again at once, without an event: the next user
comes after the last one, in the order of the stream. To the pool such a block is live. It is its
own stream's to use (`hooks.own`), and its Buffer's owner is the cache and not the pool's core.

No byte goes to another stream before this stream is known to have done what it was given, or the
other one waits for it. A chain of idle blocks leaves in three ways. `free_chain`: the stream was
seen done after `detach`, so that nothing given back later is among them. `pass_chain`: the same, or
the other stream waits for this one. `defer_chain`: the pool waits for the stream, as for any that
was told of a block.

A graph has one, too, for each stream of its capture that a block was allocated for (`of_graph`).
Its idle blocks are for later allocations of that stream in the capture. Then nobody gets them until
the graph is gone; so they count as pending.

Why it is light: all there is of a stream is one `Lent` of some 2 KiB, and a node for each block
that it has. Streams share the spans and the regions of the pool, block by block.

Locks: `lent_lock` of the pool's core guards all its `Lent`s. Nothing else is taken under it. (The
GIL does not: libraries that allocate in C take the quick way without it, see interop/raw_blocks.)
"""
cimport cython
from cpython.exc cimport PyErr_CheckSignals
from cpython.object cimport PyObject
from libc.stdint cimport uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport calloc, free, malloc, realloc

from arenapy.allocator.allocator_core cimport link_hold, record, unlink_hold
from arenapy.base.assertion cimport arenapy_assert
from arenapy.base.atomic cimport ARENAPY_GIL, arenapy_count, arenapy_load
from arenapy.base.dicts cimport found_in
from arenapy.base.sealed cimport seal
from arenapy.base.sizes cimport N_CLASSES, N_SMALL, rounded, step_bytes, step_of
from arenapy.buffer.block cimport (
    HELD, HOLD_IDLE, NEEDED, Block, Hold, MemoryOwner, StreamHooks, init_freelists,
)
from arenapy.diagnostics.recorder cimport EVENT_FREE
from arenapy.memory.region cimport register_core, unregister_core
from arenapy.pool.core cimport (
    Lent, Node, PoolCore, lent_bucket, lent_enter, lent_leave,
)
from arenapy.pool.hot_path cimport block_is_live, cache_free, named
from arenapy.pool.page_heap cimport PAGE, SPAN, Descriptor
from arenapy.pool.thread_cache cimport FIT

cdef extern from "<unistd.h>":
    int usleep(unsigned int microseconds) nogil

cdef extern from "Python.h":
    void count_up "Py_INCREF" (PyObject* o) noexcept
    Py_ssize_t size_of_tuple "PyTuple_GET_SIZE" (PyObject* t) noexcept
    PyObject* item_of_tuple "PyTuple_GET_ITEM" (PyObject* t, Py_ssize_t i) noexcept

cdef enum:
    FIRST_NODES = 16
    LOOKS = 32               # blocks of a bucket that are looked at for one that fits
    MAX_NAMED = 4            # streams that are found without a question
    # A block of up to REFILL_BYTES that a stream takes from the pool brings others, so that most
    # of them cost no event: at most as many more, of as many bytes together.
    REFILL = 15
    REFILL_BYTES = 16 << 10
    # Streams come and go: among so many times as many as came, those that are gone are looked for.
    LOOK_SHARE = 64
    ASKED = 4                # streams that have work left are asked at a time; if memory is short,
    ASKED_TO_GROW = 8        # so many
    PASS_BYTES = 8 << 20     # what goes from a stream to the next one, and not to the pool
    # Streams that are gone, and have work left, keep so many bytes together, and at least so many
    # of them whatever that is. Beyond, and beyond MOST_GONE, the next stream waits for one of them.
    GONE_BYTES = 16 << 20
    FEW_GONE = 8
    MOST_GONE = 32
    IDLE_BYTES = 32 << 20    # streams keep so much that is idle together, before a pool grows
    MOMENT = 200             # microseconds
    PATIENCE = 5000          # moments


@cython.final
@cython.no_gc_clear
cdef class StreamCache(MemoryOwner):
    """The blocks of one stream. Internal; Buffers keep it alive."""

    def __cinit__(self):
        self.recycles = True
        register_core(self)

    def __dealloc__(self):
        cdef Lent* lent = self.lent
        cdef int k
        unregister_core(self)
        if lent == NULL:
            return
        if self.core.shut:
            self.hooks.finish(<PyObject*>self, self.core.regions)
        else:
            self.pass_pending()
        try:
            self.defer_chain(self.detach(0))
        except Exception:
            pass                             # without memory for records they are never free again
        lent_enter(self.core)
        if lent.prev != NULL:
            lent.prev.next = lent.next
        else:
            self.core.lent = lent.next
        if lent.next != NULL:
            lent.next.prev = lent.prev
        for k in range(N_CLASSES):
            self.core.lent_before[k] += lent.allocations[k] - lent.taken[k]
        self.core.lent_bytes_before += lent.bytes - lent.taken_bytes
        lent_leave(self.core)
        free(lent.nodes)
        free(lent)

    # -- idle blocks

    cdef char* pop(self, size_t n, size_t align, uint64_t* block_id) noexcept nogil:
        cdef Lent* lent = self.lent
        cdef size_t size = rounded(n, self.core.rounding)
        cdef size_t pages = max((size + PAGE - 1) & ~<size_t>(PAGE - 1), <size_t>PAGE)
        cdef int s = step_of(size)
        cdef uint32_t* link
        cdef uint32_t at
        cdef int looks = 0
        cdef Node* node
        cdef Descriptor* d
        cdef char* found = NULL
        if s < N_SMALL and align > PAGE:
            s = step_of(pages)               # as heap_alloc does
        while s < N_SMALL and align <= PAGE and align > 64 and step_bytes(s) & (align - 1):
            s += 1
        link = &lent.heads[lent_bucket(s)]
        lent_enter(self.core)
        at = link[0]
        while at and looks < LOOKS:
            node = &lent.nodes[at]
            d = named(self.core, node.block_id)
            # A slot of the very step, or pages of which hardly any are too many.
            if ((d.step == s if d.state == SPAN else
                 pages <= d.size and d.size - pages <= d.size >> FIT)
                    and not <uintptr_t>node.ptr & (align - 1)):
                link[0] = node.next
                found = node.ptr
                block_id[0] = node.block_id
                node.next = lent.unused
                lent.unused = at
                lent.idle_bytes[d.size_class] -= d.size
                lent.idle_blocks[d.size_class] -= 1
                self.core.lent_idle -= d.size
                lent.allocations[d.size_class] += 1
                lent.bytes += d.size
                break
            link = &node.next
            at = node.next
            looks += 1
        lent_leave(self.core)
        return found

    cdef int reserve(self, uint32_t more) except -1:
        """Nodes for so many blocks more: whatever is given back later then has one."""
        cdef Lent* lent = self.lent
        cdef uint32_t wanted, i
        cdef Node* nodes
        cdef bint done = True
        lent_enter(self.core)
        wanted = lent.blocks + more + 1      # [0] is nothing
        if wanted > lent.n_nodes:
            wanted = max(wanted, max(2 * lent.n_nodes, <uint32_t>FIRST_NODES))
            nodes = <Node*>realloc(lent.nodes, wanted * sizeof(Node))
            done = nodes != NULL
            if done:
                lent.nodes = nodes
                for i in range(max(lent.n_nodes, <uint32_t>1), wanted):
                    nodes[i].next = lent.unused
                    lent.unused = i
                lent.n_nodes = wanted
        if done:
            lent.blocks += more
        lent_leave(self.core)
        if not done:
            raise MemoryError("no memory for the record of a stream's block")
        return 0

    cdef int own(self, char* ptr, uint64_t block_id) except -1:
        cdef Descriptor* d = named(self.core, block_id)
        self.reserve(1)
        arenapy_count(&self.core.n_held, 1)    # its region stays open
        lent_enter(self.core)
        self.lent.allocations[d.size_class] += 1
        self.lent.taken[d.size_class] += 1
        self.lent.bytes += d.size
        self.lent.taken_bytes += d.size
        lent_leave(self.core)
        return 0

    cdef int add(self, char* ptr, uint64_t block_id) except -1:
        cdef Descriptor* d = named(self.core, block_id)
        self.reserve(1)
        arenapy_count(&self.core.n_held, 1)
        lent_enter(self.core)
        self.lent.taken[d.size_class] += 1
        self.lent.taken_bytes += d.size
        put(self.core, self.lent, d, ptr, block_id)
        lent_leave(self.core)
        return 0

    cdef uint32_t detach(self, uint32_t age) noexcept nogil:
        cdef Lent* lent = self.lent
        cdef uint32_t chain = 0, at
        cdef uint32_t* link
        cdef int i
        lent_enter(self.core)
        for i in range(sizeof(lent.heads) // sizeof(uint32_t)):
            link = &lent.heads[i]
            while link[0]:
                at = link[0]
                if lent.look - lent.nodes[at].look < age:
                    link = &lent.nodes[at].next
                    continue
                link[0] = lent.nodes[at].next
                lent.nodes[at].next = chain
                chain = at
                lent.away += 1
        lent_leave(self.core)
        return chain

    cdef void grow_old(self, uint32_t looks) noexcept nogil:
        cdef Lent* lent = self.lent
        cdef uint32_t at
        cdef int i
        lent_enter(self.core)
        for i in range(sizeof(lent.heads) // sizeof(uint32_t) if looks > 1 else 0):
            at = lent.heads[i]
            while at:
                if lent.nodes[at].look == lent.look:
                    lent.nodes[at].look += looks - 1
                at = lent.nodes[at].next
        lent.look += looks
        lent_leave(self.core)

    cdef void attach(self, uint32_t chain) noexcept nogil:
        cdef Lent* lent = self.lent
        cdef uint32_t at
        cdef int s
        lent_enter(self.core)
        while chain:
            at = chain
            chain = lent.nodes[at].next
            s = lent_bucket(named(self.core, lent.nodes[at].block_id).step)
            lent.nodes[at].next = lent.heads[s]
            lent.heads[s] = at
            lent.away -= 1
        lent_leave(self.core)

    cdef uint32_t unlink(self, uint32_t chain, char** ptr, uint64_t* block_id) noexcept nogil:
        """The first block of a chain is no longer this stream's; the rest of the chain."""
        cdef Lent* lent = self.lent
        cdef Node* node
        cdef Descriptor* d
        cdef uint32_t rest
        lent_enter(self.core)
        node = &lent.nodes[chain]
        ptr[0], block_id[0], rest = node.ptr, node.block_id, node.next
        d = named(self.core, node.block_id)
        arenapy_assert(lent.blocks > 0, b"a stream's blocks were counted")
        lent.idle_bytes[d.size_class] -= d.size
        lent.idle_blocks[d.size_class] -= 1
        self.core.lent_idle -= d.size
        lent.blocks -= 1
        lent.away -= 1
        node.next = lent.unused
        lent.unused = chain
        lent_leave(self.core)
        return rest

    cdef size_t free_chain(self, uint32_t chain) noexcept:
        cdef char* ptr
        cdef uint64_t block_id
        cdef size_t freed = 0
        while chain and not self.core.shut:
            chain = self.unlink(chain, &ptr, &block_id)
            freed += named(self.core, block_id).size
            arenapy_count(&self.core.n_held, -1)
            cache_free(self.core, ptr, block_id)
        return freed

    cdef int defer_chain(self, uint32_t chain) except -1:
        cdef Hold* hold
        cdef char* ptr
        cdef uint64_t block_id
        cdef list uses
        while chain and not self.core.shut:
            hold = <Hold*>malloc(sizeof(Hold))
            if hold == NULL:
                self.attach(chain)
                raise MemoryError("no memory for the record of a stream's block")
            uses = [self.stream]
            chain = self.unlink(chain, &ptr, &block_id)
            hold.start = <uintptr_t>ptr
            hold.end = hold.start + named(self.core, block_id).size
            hold.tag = block_id
            hold.pad, hold.flags = 0, HOLD_IDLE
            hold.uses = <PyObject*>uses
            count_up(hold.uses)
            self.defer(hold)
        return 0

    cdef void pass_pending(self) noexcept:
        """The pool waits for the blocks that are pending here, and for this stream."""
        cdef Hold* next = <Hold*>self.hooks.hand_over()
        cdef Hold* hold
        cdef Descriptor* d
        while next != NULL:
            hold, next = next, next.ended_next
            d = named(self.core, hold.tag)
            lent_enter(self.core)
            unlink_hold(&self.lent.aside, hold)
            self.lent.pending_bytes[d.size_class] -= d.size
            self.lent.pending_blocks[d.size_class] -= 1
            self.lent.blocks -= 1
            lent_leave(self.core)
            arenapy_count(&self.n_held, -1)
            if self.stream not in <list>hold.uses:
                (<list>hold.uses).append(self.stream)
            hold.flags |= HOLD_IDLE
            self.defer(hold)

    cdef void defer(self, Hold* hold) noexcept:
        """A block that is no longer this stream's waits for its uses in the pool."""
        self.core.set_aside(hold)            # which counts it in n_held, too
        arenapy_count(&self.core.n_held, -1)
        self.core.hooks.defer_hold(<PyObject*>self.core, hold)

    cdef int pass_chain(self, uint32_t chain, StreamCache other) except -1:
        cdef char* ptr
        cdef uint64_t block_id
        cdef Descriptor* d
        while chain and not self.core.shut:
            try:
                other.reserve(1)
            except MemoryError:
                self.attach(chain)
                raise
            chain = self.unlink(chain, &ptr, &block_id)
            d = named(self.core, block_id)
            lent_enter(self.core)
            put(self.core, other.lent, d, ptr, block_id)
            lent_leave(self.core)
        return 0

    cdef size_t idle(self) noexcept nogil:
        cdef size_t nbytes = 0
        cdef int k
        lent_enter(self.core)
        for k in range(N_CLASSES):
            nbytes += self.lent.idle_bytes[k]
        lent_leave(self.core)
        return nbytes

    cdef uint64_t allocations(self) noexcept nogil:
        cdef uint64_t n = 0
        cdef int k
        lent_enter(self.core)
        for k in range(N_CLASSES):
            n += self.lent.allocations[k]
        lent_leave(self.core)
        return n

    # -- as the owner of Buffers

    cdef void take_back(self, char* ptr, uint64_t block_id) noexcept nogil:
        cdef Descriptor* d = named(self.core, block_id)
        if self.core.fast_path_off:
            if self.core.shut:
                return                       # the memory is not ours any more
            record(self.core, EVENT_FREE, ptr, 0)
            if self.core.debug:
                self.core.leaving(ptr)
                self.core.poison(<uintptr_t>ptr, <uintptr_t>ptr + d.size)
        lent_enter(self.core)
        put(self.core, self.lent, d, ptr, block_id)
        lent_leave(self.core)

    cdef void drop_block(self, PyObject* root) noexcept:
        if (<Block>root).word & HELD:
            arenapy_assert(arenapy_load(&self.n_held) > 0, b"a hold that ends was counted")
            arenapy_count(&self.n_held, -1)
        if (<Block>root).tag == 0:
            return                           # released before
        self.take_back((<Block>root).ptr, (<Block>root).tag)
        if self.debug:
            self.core.verify_dropped()

    cdef void release_block(self, Block root) noexcept nogil:
        cdef uint64_t block_id = root.tag
        root.tag = 0
        if block_id and root.hold == NULL:   # else `defer_free` comes next
            self.take_back(root.ptr, block_id)

    cdef bint defer_free(self, Hold* hold) noexcept nogil:
        cdef Descriptor* d = named(self.core, hold.tag)
        if self.core.shut:
            return False
        record(self.core, EVENT_FREE, <void*>hold.start, 0)
        if self.core.debug:
            self.core.leaving(<void*>hold.start)
        arenapy_count(&self.n_held, 1)
        lent_enter(self.core)
        self.lent.pending_bytes[d.size_class] += d.size
        self.lent.pending_blocks[d.size_class] += 1
        link_hold(&self.lent.aside, hold)
        lent_leave(self.core)
        return True

    cdef void finish_free(self, Hold* hold) noexcept nogil:
        cdef Descriptor* d = named(self.core, hold.tag)
        lent_enter(self.core)
        unlink_hold(&self.lent.aside, hold)
        self.lent.pending_bytes[d.size_class] -= d.size
        self.lent.pending_blocks[d.size_class] -= 1
        lent_leave(self.core)
        arenapy_count(&self.n_held, -1)
        if not self.core.shut:
            self.core.poison(hold.start, hold.start + d.size)
            lent_enter(self.core)
            put(self.core, self.lent, d, <char*>hold.start, hold.tag)
            lent_leave(self.core)
        free(hold)

    cdef int check(self) except -1:
        return self.core.check()

    cdef void leaving(self, void* ptr) noexcept nogil:
        self.core.leaving(ptr)

    cdef int verify(self) except -1:
        return self.core.verify()

    cdef object allocator_of(self):
        return self.core.allocator_of()

    cdef object region_at(self, char* ptr):
        return self.core.region_at(ptr)


seal(StreamCache)


# An idle block gets a node, for which there is one; lent_lock held.
cdef inline void put(
    PoolCore core, Lent* lent, Descriptor* d, char* ptr, uint64_t block_id
) noexcept nogil:
    cdef uint32_t at = lent.unused
    cdef Node* node = &lent.nodes[at]
    cdef uint32_t* head = &lent.heads[lent_bucket(d.step)]
    arenapy_assert(at != 0, b"each block of a stream has a node")
    arenapy_assert(block_is_live(core, block_id), b"a block of a stream is live in its pool")
    lent.unused = node.next
    node.ptr, node.block_id, node.look, node.next = ptr, block_id, lent.look, head[0]
    head[0] = at
    lent.idle_bytes[d.size_class] += d.size
    lent.idle_blocks[d.size_class] += 1
    core.lent_idle += d.size


cdef StreamCache new_stream_cache(PoolCore core, object stream, bint of_graph):
    cdef StreamCache cache = StreamCache.__new__(StreamCache)
    cdef Lent* lent
    cache.core, cache.stream = core, stream
    cache.hooks = core.hooks.of_cache(stream)
    init_freelists(cache, None)
    cache.kind, cache.device_id = core.kind, core.device_id
    cache.host_accessible, cache.device_accessible = core.host_accessible, core.device_accessible
    cache.checked, cache.debug, cache.foreign = core.checked, core.debug, core.foreign
    lent = <Lent*>calloc(1, sizeof(Lent))
    if lent == NULL:
        raise MemoryError("no memory for the blocks of a stream")
    lent.owner, lent.of_graph = <void*>cache, of_graph
    cache.lent = lent
    lent_enter(core)
    lent.next = core.lent
    if core.lent != NULL:
        core.lent.prev = lent
    core.lent = lent
    lent_leave(core)
    return cache


# -- all of one pool

@cython.final
@cython.no_gc_clear
cdef class StreamCaches:
    """All stream caches of one Pool. Internal."""

    cdef object owner_of(self, object stream):
        cdef PyObject* recent = <PyObject*>self.recent     # borrowed: no code of the user runs
        cdef PyObject* cache_found
        cdef Py_ssize_t i
        for i in range(0, size_of_tuple(recent) if ARENAPY_GIL else 0, 2):
            if item_of_tuple(recent, i) == <PyObject*>stream:
                cache_found = item_of_tuple(recent, i + 1)
                if self.core.hooks.free_now((<StreamCache>cache_found).stream):
                    return <object>cache_found
                break
        name = self.core.hooks.named(stream)
        # The blocks are a graph's, or any stream's.
        if self.core.hooks.may_begin(name) or self.core.hooks.stream_cache(name) is None:
            return name
        if name is self.core.hooks.own:
            return self.core
        cache = found_in(self.of_streams, name)
        fresh = cache is None
        if fresh:
            cache = self.of_streams.setdefault(name, new_stream_cache(self.core, name, False))
            self.come += 1
        if ARENAPY_GIL and self.core.hooks.always(stream, name):     # which may let go of a stream
            self.recent = (stream, cache, *self.recent[:2 * MAX_NAMED - 2])
        if fresh and LOOK_SHARE * self.come > len(self.of_streams):
            self.come = 0
            self.settle_gone(<StreamCache>cache)
        return cache

    cdef StreamCache graph_cache(self, object name):
        graph = self.core.hooks.graph_of(name)
        cache = found_in(self.of_graphs, graph)
        if cache is None:
            self.settle_graphs(NEEDED)       # this one may get what others had
            cache = self.of_graphs.setdefault(graph, new_stream_cache(self.core, graph, True))
        return <StreamCache>cache

    cdef int lend(
        self, StreamCache cache, char* ptr, uint64_t block_id, size_t n, size_t align
    ) except -1:
        cdef PoolCore c = self.core
        cdef uint64_t ids[REFILL]
        cdef char* more[REFILL]
        cdef int i, k = 0
        cdef bint owned = False
        while k < REFILL and (k + 2) * max(n, c.block_align) <= REFILL_BYTES:
            more[k] = c.heap_alloc(n, align, False, &ids[k])
            if more[k] == NULL:
                break
            k += 1
        i = 0
        try:
            c.hooks.join(cache.stream, c.hooks.own)
            cache.own(ptr, block_id)
            owned = True
            while i < k:
                cache.add(more[i], ids[i])
                i += 1
        except BaseException:
            while i < k:
                cache_free(c, more[i], ids[i])
                i += 1
            if not owned:                    # else there is the user's block, without the others
                c.free_block(ptr, block_id)
                raise
        # It came back for what others had got of it: so much more may lie idle.
        self.idle_allowed += cache.reclaimed
        cache.reclaimed = 0
        return 0

    cdef bint settle_graphs(self, Py_ssize_t wait) except -1:
        cdef StreamCache cache
        cdef bint freed = False
        for graph, cache in self.of_graphs.copy().items():
            if not self.core.hooks.done(graph):
                continue
            if cache.n_held:                 # those that were dropped after the capture
                cache.hooks.collect(<PyObject*>cache, wait)
            freed = cache.free_chain(cache.detach(0)) > 0 or freed
            if cache.lent.blocks == 0:
                self.of_graphs.pop(graph, None)
        return freed

    cdef size_t settle_gone(self, StreamCache heir) except? 0:
        cdef StreamHooks hooks = self.core.hooks
        cdef StreamCache cache
        cdef list busy = []
        cdef size_t nbytes, kept = 0, freed = 0
        cdef Py_ssize_t left
        cdef uint32_t chain
        cdef bint inherits = heir is not None
        for name, cache in self.of_streams.copy().items():
            if cache is heir or not hooks.ended(name):
                continue
            if cache.n_held:
                cache.hooks.collect(<PyObject*>cache, False)
            nbytes = cache.idle()
            chain = cache.detach(0)
            if chain and len(busy) < ASKED and hooks.done(name):
                if inherits and nbytes <= PASS_BYTES:
                    cache.pass_chain(chain, heir)
                    inherits = False
                else:
                    freed += cache.free_chain(chain)
            elif chain:
                cache.attach(chain)
                kept += nbytes
                busy.append(cache)
            self.forget(name, cache)
        left = len(busy)
        for cache in busy[ASKED:] if inherits else []:   # those before were asked: they take long
            if left <= MOST_GONE and (left <= FEW_GONE or kept <= GONE_BYTES):
                break
            nbytes = cache.idle()
            chain = cache.detach(0)
            try:
                hooks.join(heir.stream, cache.stream)
            except Exception:                # one of them is captured
                cache.attach(chain)
                continue
            cache.pass_chain(chain, heir)
            self.forget(cache.stream, cache)
            kept -= min(kept, nbytes)
            left -= 1
        return freed

    cdef int forget(self, object name, StreamCache cache) except -1:
        if (cache.lent.blocks == 0 and self.core.hooks.ended(name)
                and self.of_streams.pop(name, None) is not None and ARENAPY_GIL):
            self.recent = tuple([
                one for i in range(0, len(self.recent), 2) if self.recent[i + 1] is not cache
                for one in self.recent[i:i + 2]])
        return 0

    cdef bint reclaim(self) except -1:
        cdef StreamCache cache
        cdef size_t nbytes, freed = self.settle_gone(None)
        cdef size_t allowed = self.idle_allowed
        cdef uint64_t asked
        cdef uint32_t chain
        cdef int busy = 0
        for cache in self.of_graphs.copy().values():
            allowed += cache.idle()          # which nobody else may have
        if self.core.lent_idle <= allowed:
            return freed > 0
        for cache in self.of_streams.copy().values():
            asked = cache.allocations()
            if (asked == cache.asked and self.core.lent_idle > allowed
                    and busy < ASKED_TO_GROW and cache.idle()):
                chain = cache.detach(0)
                if chain and self.core.hooks.done(cache.stream):
                    nbytes = cache.free_chain(chain)
                    cache.reclaimed += nbytes
                    freed += nbytes
                else:
                    cache.attach(chain)
                    busy += 1
            cache.asked = asked
        return freed > 0

    cdef bint give_back_all(self, bint wait, uint32_t age) except -1:
        cdef StreamCache cache
        cdef uint32_t chain
        cdef bint any = False
        for cache in self.of_streams.copy().values():
            cache.hooks.collect(<PyObject*>cache, wait)
            chain = cache.detach(age)
            if chain == 0:
                continue
            any = True
            if self.core.hooks.done(cache.stream):
                cache.free_chain(chain)
            else:
                cache.defer_chain(chain)
        return any

    cdef int collect(self) except -1:
        cdef StreamCache cache
        for cache in self.of_streams.copy().values():
            cache.hooks.collect(<PyObject*>cache, False)
        return 0

    cdef int trim_old(self, uint32_t looks, uint32_t age) except -1:
        cdef StreamCache cache
        for cache in self.of_streams.copy().values():
            cache.grow_old(looks)
        self.give_back_all(False, age)
        self.settle_gone(None)
        self.settle_graphs(False)
        return 0

    cdef bint wait_for_chains(self) except -1:
        cdef int n = 0
        while self.core.lent_away() and n < PATIENCE:
            with nogil:
                usleep(MOMENT)
            PyErr_CheckSignals()
            n += 1
        return 0 < n < PATIENCE              # it may be this very thread, in a destructor


seal(StreamCaches)


cdef StreamCaches new_stream_caches(PoolCore core):
    cdef StreamCaches caches = StreamCaches.__new__(StreamCaches)
    caches.core = core
    caches.of_streams, caches.of_graphs, caches.recent = {}, {}, ()
    caches.idle_allowed = IDLE_BYTES
    return caches
