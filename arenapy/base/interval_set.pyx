"""Ordered sets of address ranges, as trees.

What lives here: finding by address and by size, inserting with coalescing, carving out. Extents of
different regions never merge, wherever they lie.

A set is a treap in an array: a search tree by address, whose shape is random because it is a heap
by hashes of the nodes' places. Each node knows the largest extent below it. So everything takes
logarithmic time: an arena with 100,000 survivors has as many gaps between them, and a shift of an
array of those costs 100 µs.

Nothing raises: room is made first (`extents_room`), and then nothing can fail.
"""
from libc.stdint cimport uint32_t, uintptr_t
from libc.stdlib cimport realloc
from libc.string cimport memset

cdef enum:
    ALIGN_LOOKS = 32         # extents that are large enough and lie badly, before that is avoided
    MAX_NODES = 0xFFFFFFFF


cdef bint make_room(
    void** items, Py_ssize_t* capacity, Py_ssize_t wanted, size_t item
) noexcept nogil:
    cdef Py_ssize_t more
    cdef void* new
    if wanted <= capacity[0]:
        return True
    more = max(wanted, 2 * capacity[0], 16)
    new = realloc(items[0], more * item)
    if new == NULL:
        return False
    items[0], capacity[0] = new, more
    return True


cdef bint extents_room(Extents* set, Py_ssize_t more) noexcept nogil:
    cdef bint first = set.capacity == 0
    if set.n + more >= MAX_NODES or not make_room(
            <void**>&set.nodes, &set.capacity, set.n + more + 1, sizeof(Node)):
        return False
    if first:
        memset(set.nodes, 0, sizeof(Node))
    return True


# ---- the tree ----------------------------------------------------------------------------

cdef inline uint32_t priority(uint32_t i) noexcept nogil:
    """A hash: nodes that are neighbours in the array, or some stride apart, are unlike."""
    i = (i ^ i >> 16) * <uint32_t>0x85EBCA6B
    i = (i ^ i >> 13) * <uint32_t>0xC2B2AE35
    return i ^ i >> 16


cdef inline size_t size_of(Extent* e) noexcept nogil:
    return e.end - e.start


cdef inline bint starts_above(Extent* e, Py_ssize_t region, uintptr_t at) noexcept nogil:
    return e.region > region or (e.region == region and e.start > at)


cdef inline void renew(Node* nodes, uint32_t t) noexcept nogil:
    """After the extent of a node, or what is below it, has changed."""
    cdef Node* node = &nodes[t]
    node.most = max(
        size_of(&node.extent), max(nodes[node.left].most, nodes[node.right].most))


cdef void renew_path(Node* nodes, uint32_t t, Extent* e) noexcept nogil:
    """From node t down to that of an extent whose bounds have changed, not its place."""
    if &nodes[t].extent != e:
        renew_path(
            nodes,
            nodes[t].left if starts_above(&nodes[t].extent, e.region, e.start) else nodes[t].right,
            e)
    renew(nodes, t)


cdef uint32_t join(Node* nodes, uint32_t low, uint32_t high) noexcept nogil:
    """One tree of two, all of the first before all of the second."""
    if low == 0 or high == 0:
        return low | high
    if priority(low) > priority(high):
        nodes[low].right = join(nodes, nodes[low].right, high)
        renew(nodes, low)
        return low
    nodes[high].left = join(nodes, low, nodes[high].left)
    renew(nodes, high)
    return high


cdef uint32_t with_node(Node* nodes, uint32_t t, uint32_t new) noexcept nogil:
    """The tree t and a new node."""
    cdef Extent* e = &nodes[new].extent
    cdef uint32_t child
    if t == 0:
        return new
    if starts_above(&nodes[t].extent, e.region, e.start):
        nodes[t].left = child = with_node(nodes, nodes[t].left, new)
        if priority(child) > priority(t):    # then it goes up
            nodes[t].left = nodes[child].right
            nodes[child].right = t
    else:
        nodes[t].right = child = with_node(nodes, nodes[t].right, new)
        if priority(child) > priority(t):
            nodes[t].right = nodes[child].left
            nodes[child].left = t
    renew(nodes, t)
    if priority(child) <= priority(t):
        return t
    renew(nodes, child)
    return child


cdef uint32_t without(Node* nodes, uint32_t t, Extent* e) noexcept nogil:
    """The tree t less the node of an extent."""
    if &nodes[t].extent == e:
        return join(nodes, nodes[t].left, nodes[t].right)
    if starts_above(&nodes[t].extent, e.region, e.start):
        nodes[t].left = without(nodes, nodes[t].left, e)
    else:
        nodes[t].right = without(nodes, nodes[t].right, e)
    renew(nodes, t)
    return t


# ---- finding -----------------------------------------------------------------------------

cdef Extent* extents_below(Extents* set, Py_ssize_t region, uintptr_t at) noexcept nogil:
    cdef uint32_t t = set.root, found = 0
    while t:
        if starts_above(&set.nodes[t].extent, region, at):
            t = set.nodes[t].left
        else:
            found = t
            t = set.nodes[t].right
    return &set.nodes[found].extent if found else NULL


cdef Extent* extents_above(Extents* set, Py_ssize_t region, uintptr_t at) noexcept nogil:
    cdef uint32_t t = set.root, found = 0
    while t:
        if starts_above(&set.nodes[t].extent, region, at):
            found = t
            t = set.nodes[t].left
        else:
            t = set.nodes[t].right
    return &set.nodes[found].extent if found else NULL


cdef Extent* extents_first(Extents* set) noexcept nogil:
    cdef uint32_t t = set.root
    while t and set.nodes[t].left:
        t = set.nodes[t].left
    return &set.nodes[t].extent if t else NULL


cdef Extent* extents_last(Extents* set) noexcept nogil:
    cdef uint32_t t = set.root
    while t and set.nodes[t].right:
        t = set.nodes[t].right
    return &set.nodes[t].extent if t else NULL


cdef Extent* extents_from(Extents* set, Py_ssize_t region, uintptr_t at) noexcept nogil:
    cdef Extent* e = extents_below(set, region, at)
    if e != NULL and e.region == region and e.end > at:
        return e
    return extents_above(set, region, at)


cdef uint32_t next_of(
    Node* nodes, uint32_t t, size_t size, Py_ssize_t region, uintptr_t at
) noexcept nogil:
    """In the tree t: the first extent above (region, at) that has `size` bytes."""
    cdef uint32_t found
    if nodes[t].most < size:                 # also if t is none, as size > 0
        return 0
    if starts_above(&nodes[t].extent, region, at):
        found = next_of(nodes, nodes[t].left, size, region, at)
        if found:
            return found
        if size_of(&nodes[t].extent) >= size:
            return t
    return next_of(nodes, nodes[t].right, size, region, at)


cdef Extent* extents_fit(Extents* set, size_t size, size_t align) noexcept nogil:
    cdef uint32_t i, sure
    cdef int looks = 0
    cdef Extent* e
    cdef uintptr_t start
    if set.root == 0:
        return NULL
    i = next_of(set.nodes, set.root, size, -1, 0)
    while i:
        e = &set.nodes[i].extent
        start = (e.start + (align - 1)) & ~<uintptr_t>(align - 1)
        if start < e.end and size <= e.end - start:
            return e
        looks += 1
        if looks == ALIGN_LOOKS:               # of those that fit wherever they lie, if there are
            sure = next_of(set.nodes, set.root, size + align - 1, e.region, e.start)
            if sure:
                return &set.nodes[sure].extent
        i = next_of(set.nodes, set.root, size, e.region, e.start)
    return NULL


cdef size_t extents_most(Extents* set) noexcept nogil:
    return set.nodes[set.root].most if set.root else 0


# ---- changing ----------------------------------------------------------------------------

cdef void extents_insert(
    Extents* set, uintptr_t start, uintptr_t end, Py_ssize_t region
) noexcept nogil:
    """Add a range that is not in the set, and coalesce it."""
    cdef Extent* left
    cdef Extent* right
    cdef uint32_t new
    if start == end:
        return
    left = extents_below(set, region, start)
    right = extents_above(set, region, start)
    if left != NULL and (left.region != region or left.end != start):
        left = NULL
    if right != NULL and (right.region != region or right.start != end):
        right = NULL
    if left != NULL:
        if right != NULL:
            end = extents_take(set, right).end
        left.end = end
        renew_path(set.nodes, set.root, left)
    elif right != NULL:
        right.start = start
        renew_path(set.nodes, set.root, right)
    else:
        new = set.unused
        if new:
            set.unused = set.nodes[new].left
        else:
            set.fresh += 1
            new = set.fresh
        set.nodes[new] = Node(Extent(start, end, region), end - start, 0, 0)
        set.root = with_node(set.nodes, set.root, new)
        set.n += 1


cdef Extent extents_take(Extents* set, Extent* extent) noexcept nogil:
    cdef Node* node = <Node*>extent          # its first member
    cdef Extent was = extent[0]
    set.root = without(set.nodes, set.root, extent)
    node.left = set.unused
    set.unused = <uint32_t>(node - set.nodes)
    set.n -= 1
    return was


cdef void extents_carve(
    Extents* set, uintptr_t start, uintptr_t end, Py_ssize_t region
) noexcept nogil:
    """Take [start, end) out of the extent around it, which must be there."""
    cdef Extent* e = extents_below(set, region, start)
    cdef uintptr_t behind = e.end
    if e.start < start:
        e.end = start
        renew_path(set.nodes, set.root, e)
        extents_insert(set, end, behind, region)
    elif end < behind:
        e.start = end
        renew_path(set.nodes, set.root, e)
    else:
        extents_take(set, e)


# ---- check -------------------------------------------------------------------------------

cdef const char* tree_fault(Node* nodes, uint32_t t, Py_ssize_t* n) noexcept nogil:
    cdef Node* node = &nodes[t]
    cdef size_t most = size_of(&node.extent)
    cdef uint32_t[2] children
    cdef uint32_t child
    cdef const char* fault
    n[0] += 1
    if node.extent.start >= node.extent.end:
        return b"a free extent is empty"
    children[0], children[1] = node.left, node.right
    for child in children:
        if child == 0:
            continue
        if priority(child) > priority(t):
            return b"the free extents' tree is no heap"
        if starts_above(&nodes[child].extent, node.extent.region, node.extent.start) != (
                child == node.right):
            return b"the free extents' tree is out of order"
        fault = tree_fault(nodes, child, n)
        if fault != NULL:
            return fault
        most = max(most, nodes[child].most)
    if most != node.most:
        return b"the free extents' tree does not know its largest"
    return NULL


cdef const char* extents_fault(Extents* set) noexcept nogil:
    cdef Py_ssize_t n = 0
    cdef const char* fault = tree_fault(set.nodes, set.root, &n) if set.root else NULL
    if fault == NULL and n != set.n:
        return b"the free extents are not as many as counted"
    return fault
