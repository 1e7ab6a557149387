# The C surface of children: what forked children see of this process's memory. No call needs the
# GIL, raises, or calls Python; each may be made under any lock.
from libc.stdint cimport uintptr_t

cdef struct Child

cdef struct Span:
    uintptr_t start, end     # start < end

# The part of a region that a child sees: the ranges in use there at the fork.
cdef struct Seen:
    Child* child
    Span* spans              # owned; ascending and disjoint
    Py_ssize_t n, room
    bint unsettled           # more than there was: the allocator is to say what was free
    Seen* next               # of the same region


# Forget the children that have ended. Each child is asked once after each call of children_ask.
cdef void children_ask() noexcept nogil
cdef void children_forget_ended(Seen** seens) noexcept nogil
# Is the next child's end going to be known? To be asked once or more.
cdef bint child_expected() noexcept nogil
# An empty record of what that child sees; NULL: no memory.
cdef Seen* seen_new() noexcept nogil
# From low to high.
cdef void seen_add(Seen* seen, uintptr_t start, uintptr_t end) noexcept nogil
# Into the list of a region, which owns it from here on.
cdef void seen_keep(Seen* seen, Seen** seens) noexcept nogil
# The last thing before a fork, and the first one after it: nobody else is in here meanwhile.
cdef void children_lock() noexcept nogil
cdef void children_unlock(bint child) noexcept nogil

# Does a child that has not ended see bytes of [start, end)? Then a part of them is in at, stop.
# The child is asked once after each call of children_ask.
cdef bint children_see(
    Seen** seens, uintptr_t start, uintptr_t end, uintptr_t* at, uintptr_t* stop) noexcept nogil
# The number of the last fork whose child was to see memory.
cdef long long children_forks() noexcept nogil
# Is there a record of a child that has not ended, from the forks after one number up to another?
cdef bint children_between(Seen** seens, long long after, long long until) noexcept nogil
# Is there a record that the allocator is to say more of?
cdef bint children_unsettled(Seen** seens) noexcept nogil
# Children forked before this call see these spans, where the record of them is unsettled.
cdef void children_settle(Seen** seens, Seen* spans) noexcept nogil
cdef void seen_drop(Seen* seen) noexcept nogil
# Forget the children that have ended. Was that all of them?
cdef bint children_ended(Seen** seens) noexcept nogil
# Bytes of the records.
cdef size_t children_nbytes(Seen** seens) noexcept nogil
cdef void children_forget(Seen** seens) noexcept nogil
