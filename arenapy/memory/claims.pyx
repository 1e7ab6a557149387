"""Claims: which bytes the regions of this process have for themselves, and which they only view.

A `File` or an `Existing` makes regions of bytes that are there before. Two allocators over the
same bytes would hand them out twice, and a file that is emptied takes them from under whoever has
it mapped. So each such region claims its bytes before anything is done to them: for itself, where
nobody else may have a claim, or to view them, beside others that do the same. The bytes are known
by where they are, and not by the object through which they were named: a range of addresses, a
range of a file (device and inode), or both. So it does not matter whether it is one source asked
twice, a copy of it, a link to the file, or another view of the array.

What lives here: the registry of claims. What does not: which ranges a source claims (source.py).

Ranges are in trees, ordered by space and start, each node of which knows the greatest end below it
(an interval tree; as a treap it is balanced by random priorities). All ranges that are claimed
exclusively are disjoint. Nothing under the lock calls Python or allocates.

A claim may outlive its region. Where memory is seen by forked children too, the claim then keeps
the region's record of them, and whether they have ended is asked when others claim something, and
when an allocator that they see looks for memory: the claim may keep a block of it.
"""
cimport cython
from cpython.object cimport PyObject
from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.stdint cimport uint64_t, uintptr_t
from libc.stdlib cimport calloc, free

from arenapy.base.assertion cimport ASSERTS
from arenapy.base.atomic cimport arenapy_finalizing
from arenapy.base.sealed cimport seal
from arenapy.base.thread_slot cimport RANK_CLAIMS, lock_released, lock_taken
from arenapy.memory.children cimport Seen, children_ask, children_forget, children_forget_ended

from arenapy.errors import OutOfMemory

cdef extern from *:
    """
    #include <pthread.h>
    #include <string.h>
    static pthread_mutex_t arenapy_claims = PTHREAD_MUTEX_INITIALIZER;
    #define arenapy_claims_lock() pthread_mutex_lock(&arenapy_claims)
    #define arenapy_claims_unlock() pthread_mutex_unlock(&arenapy_claims)
    """
    void lock_claims "arenapy_claims_lock" () noexcept nogil
    void unlock_claims "arenapy_claims_unlock" () noexcept nogil
    char* strdup(const char* text) noexcept nogil


cdef inline void arenapy_claims_lock() noexcept nogil:
    if ASSERTS:
        lock_taken(RANK_CLAIMS)
    lock_claims()


cdef inline void arenapy_claims_unlock() noexcept nogil:
    if ASSERTS:
        lock_released(RANK_CLAIMS)
    unlock_claims()


cdef enum:
    OWNED = 0                # ranges that nobody else may have
    VIEWED = 1               # ranges that others may view, too
    MAPPED = 2               # addresses where regions have mapped files of theirs
    N_TREES = 3
    FIRST_SWEEP = 64         # holdings

#: See Range. The kernel's devices, inodes of memory that has none, and claims are smaller numbers.
WITHIN = 1 << 63
cdef uint64_t within = WITHIN

cdef Range* trees[N_TREES]
trees[OWNED] = trees[VIEWED] = trees[MAPPED] = NULL
cdef Py_ssize_t n_outliving = 0, sweep_at = FIRST_SWEEP
cdef Holding* outliving = NULL
cdef uint64_t numbers = 0    # of claims so far
cdef uint64_t random = 0x9E3779B97F4A7C15


cdef void claims_lock() noexcept nogil:
    arenapy_claims_lock()


cdef void claims_unlock() noexcept nogil:
    arenapy_claims_unlock()


# ---- a tree of ranges; with the lock held ----------------------------------------------------

cdef inline bint before(Range* a, uint64_t at, Range* b, uint64_t stop) noexcept nogil:
    """Is `at` in the space of a before `stop` in that of b?"""
    if a.device != b.device:
        return a.device < b.device
    if a.inode != b.inode:
        return a.inode < b.inode
    return at < stop


cdef inline bint precedes(Range* a, Range* b) noexcept nogil:
    """The order in a tree. Equal starts are told apart by where the nodes are."""
    if before(a, a.start, b, b.start):
        return True
    return not before(b, b.start, a, a.start) and <uintptr_t>a < <uintptr_t>b


cdef inline bint meet(Range* a, Range* b) noexcept nogil:
    return before(a, a.start, b, b.end) and before(b, b.start, a, a.end)


cdef inline void note_last(Range* node) noexcept nogil:
    """After what is below it has changed."""
    node.last = node
    if node.left != NULL and before(node.last, node.last.end, node.left.last, node.left.last.end):
        node.last = node.left.last
    if node.right != NULL and before(
            node.last, node.last.end, node.right.last, node.right.last.end):
        node.last = node.right.last


cdef Range* meeting(Range* node, Range* r) noexcept nogil:
    """One that has a byte of r, or NULL."""
    while node != NULL and not meet(node, r):
        # If one on the left ends beyond where r begins and none there meets r, then r ends before
        # that one begins, and before all on the right.
        if node.left != NULL and before(r, r.start, node.left.last, node.left.last.end):
            node = node.left
        else:
            node = node.right
    return node


cdef Range* joined(Range* a, Range* b) noexcept nogil:
    """One tree of two, the first of which is before the second."""
    if a == NULL or b == NULL:
        return b if a == NULL else a
    if a.priority > b.priority:
        a.right = joined(a.right, b)
        note_last(a)
        return a
    b.left = joined(a, b.left)
    note_last(b)
    return b


cdef void divide(Range* node, Range* r, Range** low, Range** high) noexcept nogil:
    """A tree into what is before r and what is not."""
    if node == NULL:
        low[0] = high[0] = NULL
    elif precedes(node, r):
        low[0] = node
        divide(node.right, r, &node.right, high)
        note_last(node)
    else:
        high[0] = node
        divide(node.left, r, low, &node.left)
        note_last(node)


cdef void insert(Range* r) noexcept nogil:
    global random
    cdef Range* low
    cdef Range* high
    random ^= random << 13                   # xorshift (Marsaglia, 2003)
    random ^= random >> 7
    random ^= random << 17
    r.priority = random
    r.left = r.right = NULL
    r.last = r
    divide(trees[r.tree], r, &low, &high)
    trees[r.tree] = joined(joined(low, r), high)


cdef Range* without(Range* node, Range* r) noexcept nogil:
    if node == r:
        return joined(r.left, r.right)
    if precedes(r, node):
        node.left = without(node.left, r)
    else:
        node.right = without(node.right, r)
    note_last(node)
    return node


cdef void remove(Range* r) noexcept nogil:
    trees[r.tree] = without(trees[r.tree], r)


# ---- holdings; with the lock held ------------------------------------------------------------

cdef Holding* sweep() noexcept nogil:
    """Take those that no child sees any more out of those that outlived their region."""
    global outliving, n_outliving
    cdef Holding** at = &outliving
    cdef Holding* holding
    cdef Holding* over = NULL
    if outliving != NULL:
        children_ask()
    while at[0] != NULL:
        holding = at[0]
        if holding.seens != NULL:
            children_forget_ended(&holding.seens)
            if holding.seens == NULL:
                at[0] = holding.next
                n_outliving -= 1
                leave(holding)
                holding.next = over
                over = holding
                continue
        at = &holding.next
    return over


cdef void leave(Holding* holding) noexcept nogil:
    """Its ranges are nobody's from now on."""
    cdef int i
    for i in range(holding.n):
        if holding.ranges[i].tree >= 0:
            remove(&holding.ranges[i])


cdef void settle_claims() noexcept:
    cdef Holding* over
    arenapy_claims_lock()
    over = sweep()
    arenapy_claims_unlock()
    forget(over)


# Without the lock.
cdef void forget(Holding* holding) noexcept:
    """End holdings, linked by next, that no tree and no list has any more."""
    cdef Holding* next
    while holding != NULL:
        next = holding.next
        children_forget(&holding.seens)
        if holding.view != NULL:
            Py_DECREF(<object>holding.view)
        free(holding.label)
        free(holding.ranges)
        free(holding)
        holding = next


# ---- for regions -----------------------------------------------------------------------------

@cython.final
@cython.no_gc_clear               # the view is needed until the region is gone
cdef class Claim:
    """The claim of a region. `claim` makes it, and the region keeps it as its owner. Internal."""

    def __enter__(self):
        return self

    def __exit__(self, *_details):
        """Give it up, unless a region has it: a traceback may keep this object."""
        if not self.taken:
            self.end()
            self.view = None

    def __dealloc__(self):
        self.end()

    cdef void end(self) noexcept:
        cdef Holding* holding = self.holding
        # Once the interpreter ends nothing is unmapped, and nothing is given up.
        if holding != NULL and not arenapy_finalizing():
            self.holding = NULL
            arenapy_claims_lock()
            leave(holding)
            arenapy_claims_unlock()
            forget(holding)

    cdef void place(self, uint64_t address, uint64_t nbytes) noexcept:
        cdef Range* r = &self.holding.ranges[self.holding.n]
        r.device = r.inode = 0
        r.start, r.end = address, address + nbytes
        r.tree, r.holding = MAPPED, self.holding
        arenapy_claims_lock()
        insert(r)
        self.holding.n += 1
        arenapy_claims_unlock()

    cdef void outlive(self, Seen** seens) noexcept:
        global outliving, n_outliving, sweep_at
        cdef Holding* holding = self.holding
        cdef Holding* over = NULL
        cdef bint in_files = False
        cdef int i
        for i in range(holding.n):
            in_files = in_files or 0 < holding.ranges[i].device < within
        self.holding = NULL
        holding.outlived = True
        if seens != NULL:
            holding.seens, seens[0] = seens[0], NULL
        if not in_files and self.view is not None:
            holding.view = <PyObject*>self.view
            Py_INCREF(self.view)
        arenapy_claims_lock()
        if n_outliving >= sweep_at:          # not for each of many that are dropped together
            over = sweep()
            sweep_at = max(2 * n_outliving, FIRST_SWEEP)
        for i in range(holding.n):
            # Other memory may come to lie there. It is the file's bytes that others see.
            if in_files and holding.ranges[i].device == 0:
                remove(&holding.ranges[i])
                holding.ranges[i].tree = -1
        holding.next = outliving
        outliving = holding
        n_outliving += 1
        arenapy_claims_unlock()
        forget(over)


seal(Claim)


def claim(ranges not None, str label not None, *, view=None, bint anyway=False, bint shared=False):
    """Claim bytes, all of them or none.

    Parameters
    ----------
    ranges : list of tuple[int, int, int, int, bool]
        Device and inode of the file (0 and 0: addresses), first byte and last one + 1, and whether
        nobody else may have them.
    label : str
        The name of the region in messages.
    view : object, optional
        Kept until the region is gone.
    anyway : bool
        Do not ask others: leases see to it that the bytes are not reused.
    shared : bool
        No allocator is to have the region: others may view, and write, the same bytes.

    Raises
    ------
    OutOfMemory
        If that cannot be beside what another region has claimed. Nothing is claimed then.
    """
    global numbers
    cdef Claim self = Claim.__new__(Claim)
    cdef bytes name = label.encode("utf-8", "replace")
    cdef Py_ssize_t n = len(ranges)
    cdef Holding* holding = <Holding*>calloc(1, sizeof(Holding))
    cdef Range* r
    cdef Range* other = NULL
    cdef Holding* over
    cdef char* holder = NULL
    cdef bint outlived = False, leased = False
    cdef Py_ssize_t i
    self.view, self.shared = view, shared
    if holding != NULL:
        holding.ranges = <Range*>calloc(n + 1, sizeof(Range))
        holding.label = strdup(name)
        self.holding = holding               # which frees it
    if holding == NULL or holding.ranges == NULL or holding.label == NULL:
        raise MemoryError("no memory for the bookkeeping of a region")
    for i in range(n):
        r = &holding.ranges[i]
        r.device, r.inode, r.start, r.end, own = ranges[i]
        r.tree, r.holding = OWNED if own else VIEWED, holding
    arenapy_claims_lock()
    numbers += 1
    self.number = numbers
    over = sweep()
    while holding.n < n and other == NULL:
        r = &holding.ranges[holding.n]
        if not anyway:
            other = meeting(trees[OWNED], r)
            if other == NULL and r.tree == OWNED:
                other = meeting(trees[VIEWED], r)
        if other == NULL:
            insert(r)
            holding.n += 1
    if other != NULL:
        while holding.n:
            holding.n -= 1
            remove(&holding.ranges[holding.n])
        holder = strdup(other.holding.label)
        outlived, leased = other.holding.outlived, other.holding.seens != NULL
    arenapy_claims_unlock()
    forget(over)
    if other == NULL:
        return self
    try:
        first = holder.decode("utf-8", "replace") if holder != NULL else "a region"
    finally:
        free(holder)
    refused = f"{label} already" if first == label else f"{label} is refused: {first} already"
    if not outlived:
        raise OutOfMemory(
            f"{refused} has a region of these bytes, and only read-only regions may "
            "overlap. Drop that region with everything that uses it, or use another source"
        )
    if leased:
        raise OutOfMemory(
            f"{refused} had a region of these bytes, and a forked child still sees some of them. "
            "Wait until that process has ended, or use another source"
        )
    raise OutOfMemory(
        f"{refused} had a region of these bytes, and another process may still see some of them: "
        "the one that this one was forked from, or a forked child that has no lease. Use "
        "another source"
    )


def in_file(uint64_t start, uint64_t end):
    """Are these addresses in a region's own mapping of a file, which claims the file?"""
    cdef Range wanted
    cdef Range* found
    cdef bint inside
    wanted.device = wanted.inode = 0
    wanted.start, wanted.end = start, end
    arenapy_claims_lock()
    found = meeting(trees[MAPPED], &wanted)
    inside = found != NULL and found.start <= start and end <= found.end
    arenapy_claims_unlock()
    return inside
