"""Records of the memory that forked children see, and of whether the children have ended.

What lives here: the records of what was in use at each fork, and the one lease of each child. What
does not: which ranges those are (the allocators), which regions a child sees (region).

A child's lease is a read lock on one byte of a file without bytes, which all forks of a process
share. The child alone keeps the open file description that has the lock: by a mapping of one page,
which no code knows, so that a child that closes all descriptors keeps its lease. The kernel drops
it when the child, and all that it forked, have exited or executed another program. Which ranges
the child sees is written down here and not in locks: the kernel has the locks of a file in one
list, which it walks at each call, so that many locks would take quadratic time.

The byte's offset has the number of the process that forks, because children share the file with it:
what they fork in turn must not be taken for its own.
"""
from libc.stdint cimport uintptr_t
from libc.stdlib cimport calloc, free, malloc, realloc
from libc.string cimport memcpy
from posix.unistd cimport close, getpid

from arenapy.base.assertion cimport arenapy_assert
from arenapy.base.atomic cimport (
    arenapy_spin, arenapy_spin_acquire, arenapy_spin_release, rank_spin,
)
from arenapy.base.thread_slot cimport RANK_CHILDREN
from arenapy.linux.vm cimport (
    OpenFile, vm_close, vm_first_lease, vm_is_open, vm_keep_leases, vm_lease, vm_lease_file,
    vm_reopen, vm_unmap,
)

# The child of one fork, with all that it forks.
cdef struct Child:
    OpenFile file            # has its lease; `lease_file` owns that, or did
    long long at             # the byte that is locked while it has not ended
    long long fork           # its number
    bint over
    long long asked          # the value of `asking` when it was last asked
    Py_ssize_t users         # records of it, and `expected`

cdef enum:
    FIRST_ROOM = 16          # spans
    PAGE = 4096              # at least; of the mapping that keeps a lease
    PID_SHIFT = 36           # of an offset; process numbers have 22 bits

cdef arenapy_spin guard      # of all records, children and the file
cdef OpenFile lease_file     # open while there is a child
cdef Py_ssize_t n_children = 0
cdef long long forks = 0
cdef long long asking = 0    # counts calls of children_ask
cdef Child* expected = NULL  # of the fork under way
cdef bint refused = False    # it cannot be known when that child ends
cdef void* page = NULL       # keeps its lease, until the fork
lease_file.fd = -1
rank_spin(&guard, RANK_CHILDREN)


# ---- with the guard held ---------------------------------------------------------------------

cdef bint ended(Child* child) noexcept nogil:
    """If nobody can be asked it has not."""
    cdef long long at, n
    if not child.over and vm_is_open(&child.file):
        child.over = vm_first_lease(child.file.fd, child.at, 1, &at, &n) == 0
    return child.over


cdef bint ended_by_now(Child* child) noexcept nogil:
    """The same, asked once for each value of `asking`: a child has a record in many regions."""
    if child.asked == asking:
        return child.over
    child.asked = asking
    return ended(child)


cdef void let_go(Child* child) noexcept nogil:
    global n_children
    child.users -= 1
    if child.users == 0:
        free(child)
        n_children -= 1
        if n_children == 0:
            vm_close(&lease_file)


cdef void drop(Seen** link) noexcept nogil:
    """Take a record out of its list."""
    cdef Seen* seen = link[0]
    link[0] = seen.next
    let_go(seen.child)
    seen_drop(seen)


cdef Child* new_child() noexcept nogil:
    """A child with a lease, which `page` keeps; NULL: it could not be given one."""
    global page, forks, n_children
    cdef Child* child = <Child*>calloc(1, sizeof(Child))
    cdef int fd = -1, rc = -1
    forks += 1                   # also if this fails: each fork has a number of its own
    if child == NULL:
        return NULL
    # If the program closed it, the number is not ours any more.
    if vm_is_open(&lease_file) or vm_lease_file(&lease_file) == 0:
        fd = vm_reopen(&lease_file)
    if fd >= 0:
        child.fork = forks
        child.file = lease_file
        child.at = (<long long>getpid() << PID_SHIFT) + forks
        child.asked = -1
        child.users = 1
        page = vm_keep_leases(fd, PAGE)
        rc = vm_lease(fd, child.at, 1)
        close(fd)
    if rc == 0 and page != NULL:
        n_children += 1
        return child
    if page != NULL:
        vm_unmap(<size_t>page, PAGE)
        page = NULL
    if n_children == 0:
        vm_close(&lease_file)
    free(child)
    return NULL


# ---- at a fork -------------------------------------------------------------------------------

cdef void children_ask() noexcept nogil:
    global asking
    arenapy_spin_acquire(&guard)
    asking += 1
    arenapy_spin_release(&guard)


cdef void children_forget_ended(Seen** seens) noexcept nogil:
    cdef Seen** link = seens
    arenapy_spin_acquire(&guard)
    while link[0] != NULL:
        if ended_by_now(link[0].child):
            drop(link)
        else:
            link = &link[0].next
    arenapy_spin_release(&guard)


cdef bint child_expected() noexcept nogil:
    global expected, refused
    if expected == NULL and not refused:
        arenapy_spin_acquire(&guard)
        expected = new_child()
        arenapy_spin_release(&guard)
        refused = expected == NULL
    return not refused


cdef Seen* seen_new() noexcept nogil:
    cdef Seen* seen = <Seen*>calloc(1, sizeof(Seen))
    if seen != NULL:
        seen.room = FIRST_ROOM
        seen.spans = <Span*>malloc(FIRST_ROOM * sizeof(Span))
        if seen.spans == NULL:
            free(seen)
            return NULL
    return seen


cdef void seen_add(Seen* seen, uintptr_t start, uintptr_t end) noexcept nogil:
    cdef Span* more
    arenapy_assert(
        start < end and (seen.n == 0 or seen.spans[seen.n - 1].end <= start),
        b"what a child sees is noted from low to high")
    if seen.n and seen.spans[seen.n - 1].end == start:
        seen.spans[seen.n - 1].end = end
        return
    if seen.n == seen.room:
        more = <Span*>realloc(seen.spans, 2 * seen.room * sizeof(Span))
        if more != NULL:
            seen.spans = more
            seen.room *= 2
        else:                    # one that covers them all, with what is free between them
            seen.spans[0].end = seen.spans[seen.n - 1].end
            seen.n = 1
    seen.spans[seen.n].start, seen.spans[seen.n].end = start, end
    seen.n += 1


cdef void seen_drop(Seen* seen) noexcept nogil:
    free(seen.spans)
    free(seen)


cdef void seen_keep(Seen* seen, Seen** seens) noexcept nogil:
    if seen.n == 0:
        seen_drop(seen)
        return
    arenapy_spin_acquire(&guard)
    seen.child = expected
    expected.users += 1
    seen.next = seens[0]
    seens[0] = seen
    arenapy_spin_release(&guard)


cdef void children_lock() noexcept nogil:
    arenapy_spin_acquire(&guard)


cdef void children_unlock(bint child) noexcept nogil:
    global expected, refused, page
    if not child and page != NULL:
        vm_unmap(<size_t>page, PAGE)
    page = NULL                  # the child's stays until it ends
    if expected != NULL:
        let_go(expected)
    expected = NULL
    refused = False
    arenapy_spin_release(&guard)


# ---- what is still seen ----------------------------------------------------------------------

cdef Py_ssize_t first_above(Seen* seen, uintptr_t at) noexcept nogil:
    """The first span that ends above an address."""
    cdef Py_ssize_t low = 0, high = seen.n, middle
    while low < high:
        middle = (low + high) // 2
        if seen.spans[middle].end > at:
            high = middle
        else:
            low = middle + 1
    return low


cdef bint children_see(
    Seen** seens, uintptr_t start, uintptr_t end, uintptr_t* at, uintptr_t* stop
) noexcept nogil:
    cdef Seen** link = seens
    cdef Py_ssize_t i
    cdef bint meets, found = False
    arenapy_spin_acquire(&guard)
    while link[0] != NULL and not found:
        i = first_above(link[0], start)
        meets = i < link[0].n and link[0].spans[i].start < end
        if link[0].child.over or (meets and ended_by_now(link[0].child)):
            drop(link)
        elif meets:
            at[0], stop[0] = max(start, link[0].spans[i].start), min(end, link[0].spans[i].end)
            found = True
        else:
            link = &link[0].next
    arenapy_spin_release(&guard)
    return found


cdef long long children_forks() noexcept nogil:
    cdef long long n
    arenapy_spin_acquire(&guard)
    n = forks
    arenapy_spin_release(&guard)
    return n


cdef bint children_between(Seen** seens, long long after, long long until) noexcept nogil:
    cdef Seen** link = seens
    cdef bint found = False
    arenapy_spin_acquire(&guard)
    while not found and link[0] != NULL:
        if not after < link[0].child.fork <= until:
            link = &link[0].next
        elif ended(link[0].child):
            drop(link)
        else:
            found = True
    arenapy_spin_release(&guard)
    return found


cdef bint children_unsettled(Seen** seens) noexcept nogil:
    cdef Seen* seen
    arenapy_spin_acquire(&guard)
    seen = seens[0]
    while seen != NULL and (not seen.unsettled or seen.child == expected):
        seen = seen.next
    arenapy_spin_release(&guard)
    return seen != NULL


cdef void children_settle(Seen** seens, Seen* spans) noexcept nogil:
    cdef Seen** link = seens
    cdef Span* copy
    arenapy_spin_acquire(&guard)
    while link[0] != NULL:
        # Of a fork that is about to happen, the allocator will be told after it.
        if not link[0].unsettled or link[0].child == expected:
            link = &link[0].next
            continue
        if spans.n == 0:
            drop(link)
            continue
        copy = <Span*>malloc(spans.n * sizeof(Span))
        if copy != NULL:             # else the child keeps all
            memcpy(copy, spans.spans, spans.n * sizeof(Span))
            free(link[0].spans)
            link[0].spans, link[0].n, link[0].room = copy, spans.n, spans.n
            link[0].unsettled = False
        link = &link[0].next
    arenapy_spin_release(&guard)


cdef size_t children_nbytes(Seen** seens) noexcept nogil:
    cdef Seen* seen
    cdef size_t n = 0
    arenapy_spin_acquire(&guard)
    seen = seens[0]
    while seen != NULL:
        n += sizeof(Seen) + seen.room * sizeof(Span)
        seen = seen.next
    arenapy_spin_release(&guard)
    return n


cdef bint children_ended(Seen** seens) noexcept nogil:
    cdef Seen** link = seens
    arenapy_spin_acquire(&guard)
    while link[0] != NULL:
        if ended(link[0].child):
            drop(link)
        else:
            link = &link[0].next
    arenapy_spin_release(&guard)
    return seens[0] == NULL


cdef void children_forget(Seen** seens) noexcept nogil:
    arenapy_spin_acquire(&guard)
    while seens[0] != NULL:
        drop(seens)
    arenapy_spin_release(&guard)
