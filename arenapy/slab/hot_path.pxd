# The quick way of a Slab, from the stack of free items and back to it.
#
# `cache_alloc` pops the item that was given back last; `cache_free` pushes it. If the stack has
# none, the general way refills it. The quick way asks no Python code and takes no lock but the
# stack's.
from libc.stdint cimport int64_t, uint64_t, uintptr_t

from arenapy.allocator.allocator_core cimport forbid, permit
from arenapy.base.assertion cimport arenapy_assert
from arenapy.base.atomic cimport is_no_null, likely
from arenapy.base.biased_lock cimport biased_enter, biased_leave
from arenapy.base.sanitizer cimport POISON_UNIT, POISONS
from arenapy.base.thread_slot cimport slot_at
from arenapy.slab.core cimport (
    STACK_DEPTH, Group, Items, Part, Stack, address_of, group_of, item_index, item_is_live,
    name_is_valid, names_of, note, nth_group, stack_is_valid,
)


# In builds that poison: what is free of items, and of one of which n bytes were asked for. Threads
# have neighbouring items at once, so not of those that share a unit.
cdef inline void forbid_from(Items c, char* at, size_t n, size_t end) noexcept nogil:
    if POISONS and c.align >= POISON_UNIT:
        forbid(c, <uintptr_t>at + n, <uintptr_t>at + end)


# From a stack that is not empty, its lock held: the item that was given back last.
cdef inline char* pop(Items c, Stack* s, uint64_t* name) noexcept nogil:
    cdef int64_t n = s.n - 1
    cdef uint64_t tick = s.tick + 1
    cdef uint64_t top = names_of(s)[n]
    cdef Group* group = group_of(c, top)
    cdef char* ptr = address_of(c, top)
    is_no_null(ptr)
    arenapy_assert(0 <= n, b"a stack that is popped is not empty")
    arenapy_assert(stack_is_valid(c, s), b"the stack is valid")
    arenapy_assert(name_is_valid(c, top), b"the name is valid")
    arenapy_assert(not item_is_live(c, top), b"an item in a stack is not live")
    s.n = n
    if n < s.least:
        s.least = n
    s.tick = tick
    group.live[top & 63] = 1
    note(&group.tick, tick)
    name[0] = top
    arenapy_assert(item_is_live(c, top), b"an item that is handed out is live")
    arenapy_assert(stack_is_valid(c, s), b"the stack is valid")
    permit(c, <uintptr_t>ptr, c.item_size)
    return ptr


# Onto a stack, its lock held: an item that is not live (any more), and its group.
cdef inline void stow(Items c, Stack* s, Group* group, uint64_t name) noexcept nogil:
    cdef int64_t n
    cdef uint64_t tick = s.tick + 1
    if s.n == STACK_DEPTH and s != c.depot:
        c.make_place(s)
    if POISONS:
        forbid_from(c, address_of(c, name), 0, c.stride)
    arenapy_assert(stack_is_valid(c, s), b"the stack is valid")
    arenapy_assert(name_is_valid(c, name), b"the name is valid")
    arenapy_assert(not item_is_live(c, name), b"an item that comes back is not live any more")
    n = s.n
    names_of(s)[n] = name
    s.n = n + 1
    s.tick = tick
    note(&group.tick, tick)
    arenapy_assert(
        names_of(s)[s.n - 1] == name, b"the item that came back last is the top of the stack")
    arenapy_assert(stack_is_valid(c, s), b"the stack is valid")


# The same for one that is live. False: it is not.
cdef inline bint push(Items c, Stack* s, Group* group, uint64_t name) noexcept nogil:
    if not likely(group.live[name & 63]):
        return False
    group.live[name & 63] = 0
    stow(c, s, group, name)
    return True


# The short ways. The owner of its stack's lock need not ask whether the slab is off the fast path:
# then `quick` has a stack that nobody owns.

# NULL: the stack is empty, or the slab is off the fast path.
cdef inline char* cache_alloc(Items c, uint64_t* name) noexcept nogil:
    cdef uint64_t me = slot_at(c.slot_offset)
    cdef Stack* s = c.quick[me]
    cdef char* ptr = NULL
    cdef uint64_t other = 0                  # so that a name which nobody reads stays in a register
    if not likely(biased_enter(&s.lock, me)):
        ptr = c.shared_alloc(&other)
        name[0] = other
        return ptr
    if likely(s.n > 0):
        ptr = pop(c, s, name)
    biased_leave(&s.lock)
    return ptr


# False: the item is not live, or the slab is off the fast path.
cdef inline bint cache_free(Items c, uint64_t name) noexcept nogil:
    cdef uint64_t me = slot_at(c.slot_offset)
    cdef Stack* s = c.quick[me]
    cdef bint was_live
    if not likely(biased_enter(&s.lock, me)):
        return c.shared_free(name)
    was_live = push(c, s, group_of(c, name), name)
    biased_leave(&s.lock)
    return was_live


# The same by address, a stack's lock held.
cdef inline bint push_at(Items c, Stack* s, char* at) noexcept nogil:
    cdef Part* p = &c.parts[s.guess]
    cdef uint64_t index = item_index(<uint64_t>(at - p.base), c.inverse, c.shift)
    cdef uint64_t name
    if likely(index < p.items):
        return push(c, s, nth_group(p, index >> 6), <uint64_t>s.guess << 32 | index)
    name = c.find(s, at)
    return name != 0 and push(c, s, group_of(c, name), name)


cdef inline bint cache_free_at(Items c, char* at) noexcept nogil:
    cdef uint64_t me = slot_at(c.slot_offset)
    cdef Stack* s = c.quick[me]
    cdef bint was_live
    if not likely(biased_enter(&s.lock, me)):
        return c.shared_free_at(at)
    was_live = push_at(c, s, at)
    biased_leave(&s.lock)
    return was_live
