# The state of a Buffer, MemoryOwner, which is whatever a Buffer's bytes belong to, and StreamHooks,
# through which memory of a device is reached.
from cpython.object cimport PyObject
from libc.stdint cimport uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport malloc

from arenapy.base.atomic cimport ARENAPY_GIL, arenapy_load, arenapy_lock

cdef enum:
    CLOSED = 1           # bits of Block.word
    HELD = 2
    ONE_EXPORT = 4

    GONE_NOT = 0
    GONE_CLOSED = 1      # the region was closed
    GONE_FORKED = 2      # this process is a forked child and the memory stayed with the parent

    N_FREELISTS = 8      # of an owner, on free-threaded builds: of the threads up to this number
    KEPT_OBJECTS = 256   # dead roots in a freelist, about 30 KB
    FREELIST_BYTES = 128  # two cache lines, which processors fetch together

    NEEDED = -1          # see `StreamHooks.collect`

    HOLD_RETIRED = 1     # outlived a reset of its frame
    HOLD_EMPTY = 2       # a 0-byte block
    HOLD_IDLE = 4        # its Buffer is gone: no capture that is on has the block
    HOLD_UNSETTLED = 8   # leased; children that a Bump has not settled yet may see it

# One held block: a root Buffer that was ever exported, or that a stream uses. Owned by the Buffer
# until `hold_ended` (`StreamHooks.defer_hold`, if it has uses) passes it to the owner. start < end
# always: a 0-byte block occupies one byte.
cdef struct Hold:
    Hold* next           # in its frame's, the retired or the leased list
    Hold* prev
    Hold* ended_next     # in the owner's list of ended holds
    uintptr_t start
    uintptr_t end
    PyObject* uses       # owned: the uses that have to end first, a list of the hooks; or NULL
    uint64_t tag         # the Buffer's tag
    uint32_t pad         # bytes skipped before start for alignment
    uint32_t flags       # HOLD_*
    Py_ssize_t region    # the owner's: which region it is in, once retired or leased


# Dead roots of an owner, for reuse. With a GIL there is one freelist. Without, an owner that
# recycles has one for each of the first threads, which no other thread touches.
cdef struct Freelist:
    PyObject* kept           # linked by ptr
    PyObject* shard          # what roots from here count instead of their owner; NULL: none yet
    int n_kept


# Memory that streams use. Abstract: arenapy.cuda has the ones there are; an owner of plain host
# memory has none. Each allocator has one of its own. `stream` is what `named` gave; a `block` is a
# Block, an `owner` a MemoryOwner, a `hold` a Hold*. All are called with the GIL, which they release
# to call the driver, and never under a lock.
cdef class StreamHooks:
    cdef readonly str kind
    cdef readonly int device_id              # -1: the host
    cdef readonly bint host_accessible
    cdef readonly bint device_accessible
    cdef readonly Py_ssize_t align           # of blocks by default
    # The stream whose order blocks need no event for; None: there is none.
    cdef readonly object own

    # One for blocks that belong to `stream`, as the user gave it; the same for what the allocator
    # keeps for a stream, and for an allocator, of which some streams cannot be.
    cdef StreamHooks bound(self, object stream)
    cdef StreamHooks of_cache(self, object stream)
    cdef StreamHooks of_allocator(self, object stream)
    # The stream of a user's argument; None: no stream but the allocator's own, or none at all.
    cdef object named(self, object stream)
    # The name of a stream whose blocks are kept for it; else None. It may be given work now.
    cdef object stream_cache(self, object stream)
    # The graph that a stream is being captured into. `bound`, `join` (as the first) and `done` take
    # it for a stream: blocks are its own until it is gone, and free for that stream in its capture.
    cdef object graph_of(self, object stream)
    # Of such a stream: is its object gone, so that nobody gives it work any more? Has it done what
    # it was given? Not sure: no. Let it wait for all that another one was given so far.
    cdef bint ended(self, object stream) noexcept
    cdef bint done(self, object stream) noexcept
    cdef int join(self, object stream, object other) except -1
    # Does that object name the same stream for as long as it is kept?
    cdef bint always(self, object stream, object named)
    # May it be given work now, if an object that always names it is still at hand? Not sure: no.
    cdef bint free_now(self, object named) noexcept
    # Before a block is allocated for `stream`: is that being captured? CudaError: no block may be.
    cdef bint may_begin(self, object stream) except -1
    cdef int not_captured(self, object stream) except -1
    # One is.
    cdef int begin(self, object block, object stream) except -1
    # Once it is released, a block waits until `stream` has done what it was given before.
    cdef int use(self, object block, object stream) except -1
    # A hold with uses has ended: `owner.finish_free` will be called with it.
    cdef void defer_hold(self, PyObject* owner, void* hold) noexcept
    # Call `owner.finish_free` for what no stream uses any more, and wait until that is so of `wait`
    # blocks at least, or of all. How many those were. NEEDED: of none, but memory is needed.
    cdef Py_ssize_t collect(self, PyObject* owner, Py_ssize_t wait) noexcept
    # Let what uses the memory next wait for `stream`: its own stream, or else this thread.
    cdef int fence(self, object stream) except -1
    # The stream of DLPack's number; None: the consumer sees to the order itself.
    cdef object consumer(self, object stream)
    # Another library is to use a block, on that stream: which waits for those that used it before.
    cdef int lend(self, object block, object stream) except -1
    # This thread is to use a block: it waits for those, and for `stream`, if it is not None.
    cdef int ready(self, object block, object stream) except -1
    # The same for readers of the CUDA array interface: the number they are to wait for, or None.
    cdef object offer(self, object block)
    # The owner ends: wait for the streams that use it, and free the holds. If that cannot be, keep
    # `memory`, which has its bytes, until they are done.
    cdef void finish(self, PyObject* owner, object memory) noexcept
    # The owner ends, and another one takes its holds over: Holds, linked by ended_next.
    cdef void* hand_over(self) noexcept
    # An allocator lets go of regions, which may outlive it and its stream.
    cdef void leave(self, tuple regions) noexcept
    # A block is to get memory behind it: streams that may use it wait for the own stream.
    cdef int extend(self, object block) except -1
    # Can a block move now? CudaError if not.
    cdef int movable(self, object source) except -1
    # Copy a block, which its user is going to release, to the beginning of another one of this
    # memory, in the order of the streams that use it; those may then use the other one.
    cdef int move(self, object to, object source) except -1
    # Copy between blocks, or a block and another object, of one size; one of them is of this kind.
    # Set all bytes of a block.
    cdef int copy(self, object to, object source, object stream) except -1
    cdef int fill(self, object block, int byte, object stream) except -1


# The owner of bytes: a Region, or the core of an allocator. It keeps them mapped, knows
# whether an unheld Buffer is still valid, and is told when a held one ends.
cdef class MemoryOwner:
    cdef readonly str kind
    cdef readonly int device_id          # -1: the host
    cdef readonly bint readonly
    cdef readonly bint host_accessible
    cdef readonly bint device_accessible
    cdef StreamHooks hooks                   # None: no streams work on this memory
    cdef bint foreign                    # reaches a user's object: Buffers are then GC-tracked
    cdef bint checked                    # check() has something to check
    cdef bint may_lease                  # other processes may see bytes: ask before reuse
    cdef bint recycles                   # Buffers go back when dropped: `drop_block`, and no Holds
    cdef bint debug                      # debug mode: `leaving` and `verify` want to be called
    cdef int gone                        # GONE_*
    cdef arenapy_lock lock
    cdef uint64_t n_held                 # held Buffers, if it recycles: an `arenapy_count`
    cdef Hold* spare                     # ended holds, linked by next, for reuse; under lock,
    cdef uint64_t n_made                 # as is: how many `new_hold` has had memory for
    cdef Freelist freelist               # GIL builds only
    cdef char* freelists                 # others: N_FREELISTS of them, FREELIST_BYTES each; or NULL
    cdef PyObject* shards                # a list, its allocator's, which alone may use it; or NULL
    cdef bint ending                     # an allocator's core that ends: nobody may keep it
    cdef object weak                     # a weak reference to it, on free-threaded builds
    cdef PyObject* next_core             # the registry of allocators' cores (see region.pyx)
    cdef PyObject* prev_core

    # Called with `lock` held, but for `hold_ended`: on any thread, without lock or GIL.
    # `release_block` of an owner that recycles is called without it, too: the Buffer is CLOSED, and
    # so nobody else's.
    cdef bint alive(self, Block root) noexcept nogil
    cdef void enlist(self, Hold* hold) noexcept nogil
    cdef void delist(self, Hold* hold) noexcept nogil   # of a hold that is not retired
    cdef void release_block(self, Block root) noexcept nogil
    cdef void hold_ended(self, Hold* hold) noexcept nogil
    # The end of a root Buffer of one that recycles, which has no references left.
    cdef void drop_block(self, PyObject* root) noexcept
    # The same with a hold, which has uses; also after `release_block` of a Buffer that has one. The
    # block becomes pending, until `finish_free`, which takes the hold. False: it is not live.
    cdef bint defer_free(self, Hold* hold) noexcept nogil
    cdef void finish_free(self, Hold* hold) noexcept nogil
    # For allocators' cores: the end of a region, and fork (see region.pyx).
    cdef bint has_holds(self) noexcept nogil
    cdef void disable(self, int why) noexcept nogil
    cdef void fork_lock(self) noexcept nogil          # everything, so that a child has it whole
    cdef void fork_unlock(self, bint child) noexcept nogil
    cdef void expect_leases(self, bint forks) noexcept nogil     # sets may_lease, for good
    cdef void forked(self, bint unmapped) noexcept nogil
    cdef int lease_live(self, PyObject* region, void* seen) noexcept nogil
    cdef int check(self) except -1
    cdef object allocator_of(self)
    # The Region that the byte at `ptr` lies in; None: there is none.
    cdef object region_at(self, char* ptr)
    # Debug mode: before the block there is given back, under no lock; after an operation.
    cdef void leaving(self, void* ptr) noexcept nogil
    cdef int verify(self) except -1


# `word` is the whole state of a root, changed as one atomic: bit 0 CLOSED, bit 1 HELD (was ever
# exported), the rest: live exports and pins in units of ONE_EXPORT, those of its slices and views
# included. Without HELD these are pins, and the word changes with the owner's lock held. A slice
# or view has a word of its own, without HELD.
cdef class Block:
    cdef char* ptr
    cdef Py_ssize_t size
    cdef uint64_t word
    cdef uint64_t tag                    # the owner's: which frame or slot the block is in
    cdef uint32_t pad                    # the owner's: bytes skipped before ptr
    cdef uint32_t align                  # of a Bump or Pool: asked for (0: not), kept in growth
    cdef bint sealed                     # read-only although the memory is not
    cdef uint32_t place                  # debug mode: where it was allocated; else NO_SITE
    cdef Hold* hold          # not NULL once HELD or pinned; if the owner recycles, with uses
    cdef PyObject* shard                 # of a root that does not count its owner; else NULL
    cdef MemoryOwner owner                   # keeps the bytes mapped
    cdef Block root                      # None: this is a root; else what counts as held


# Reference-count shard: roots made in one thread slot count it instead of their owner, whose count
# would be a cache line that all threads write. It counts the owner. Its allocator, and each of
# those roots, keeps it.
cdef class CountShard:
    cdef MemoryOwner owner


cdef Block root_of(Block block)
cdef bint is_open(Block block) noexcept
cdef int check_open(Block block) except -1
# The same with the owner's lock held.
cdef bint is_open_locked(Block block) noexcept
cdef str name_of(Block block)
cdef str place_of(Block block)
# Raise unless it is open and the host may read it; write it.
cdef int check_host(Block block) except -1
cdef int writable(Block block) except -1


cdef inline int host_only(Block block) except -1:
    # Every array asks, and most of a root that was born held.
    if (
        ARENAPY_GIL and block.root is None and arenapy_load(&block.word) & (CLOSED | HELD) == HELD
        and not block.owner.gone and block.owner.host_accessible
    ):
        return 0
    return check_host(block)


cdef inline bint is_readonly(Block block) noexcept:
    return block.sealed or block.owner.readonly


# Mark the root held and count one live export (or, with count False, only mark it).
cdef int acquire(Block block, bint count) except -1
cdef void unacquire(Block block) noexcept
# While a call uses a block: nobody can release it, and a reset retires it, but it is not exported
# and so not HELD afterwards (unless it was before). If it was retired, it is closed then.
cdef int pin(Block block) except -1
cdef void unpin(Block block) noexcept
cdef str why_closed(Block block)
# A hold for a new export, reused or allocated; lock held; NULL without memory.
cdef inline Hold* new_hold(MemoryOwner owner) noexcept nogil:
    cdef Hold* hold = owner.spare
    if hold == NULL:
        hold = <Hold*>malloc(sizeof(Hold))
        if hold == NULL:
            return NULL
        owner.n_made += 1
    else:
        owner.spare = hold.next
    hold.uses = NULL
    return hold


# Forget the dead roots, which are not tracked by the cycle collector; lock held. (Without a GIL
# they are left: nobody looks for them any more.)
cdef void drop_kept(MemoryOwner owner) noexcept
# For an owner that recycles. Its allocator gives, and keeps as long as it lives, a list for shards.
# An owner without an allocator gives None, since with a list of its own it would be in a cycle: its
# roots count it itself.
cdef int init_freelists(MemoryOwner owner, list shards) except -1
# For a root that counts its owner and is not tracked: to count a shard instead, if it may.
cdef int take_shard(Block root) except -1
# After its owner has taken on memory of a user's object: the collector has to see the root.
cdef void track(Block root) noexcept


# Where this thread finds and leaves dead roots of an owner. An empty freelist without a shard may
# be nobody's.
cdef inline Freelist* freelist_of(PyObject* owner) noexcept:
    return &(<MemoryOwner>owner).freelist if ARENAPY_GIL else own_freelist(owner)


cdef Freelist* own_freelist(PyObject* owner) noexcept


cdef inline void drop_hold(MemoryOwner owner, Hold* hold) noexcept nogil:
    hold.next = owner.spare
    owner.spare = hold


# A hold of a Buffer that has ended.
cdef void end_hold(PyObject* root) noexcept
# Add a further use of a block to the hold's list of uses. The owner has hooks.
# The length of that list; 0: it was there already. And no longer, unless it is the only one.
cdef int note_use(Block block, object use) except -1
# Its uses, a list that nobody changes, or None.
cdef list listed_uses(Block root)
cdef int drop_use(Block block, object use) except -1
cdef list uses_of(Block block)               # as they are now
# The stream of an argument, for memory of this owner; None: nothing to take note of.
cdef object named_stream(MemoryOwner owner, object stream)


# For an allocator that exports at birth: link a new hold (none if it recycles); lock held.
cdef void born_held(Block root, Hold* hold) noexcept nogil
