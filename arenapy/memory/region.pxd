# The C surface of Region: one contiguous address range.
from arenapy.base.abi cimport ARENAPY_ABI
from cpython.object cimport PyObject
from libc.stdint cimport uint64_t, uintptr_t
from posix.types cimport pid_t

from arenapy.buffer.block cimport Block, MemoryOwner
from arenapy.linux.vm cimport Descriptor, OpenFile
from arenapy.memory.children cimport Seen

cdef enum:
    FORK_INHERIT = 0     # a forked child has its own copy
    FORK_SKIP = 1        # not mapped in a forked child
    FORK_CLOSED = 2      # mapped in both: allocators over it are closed in the child


# Memory that is not a mapping of ours, such as a device's: gone when its last reference is. An
# owner like this reaches no user's object.
cdef class Backing:
    pass


cdef class Region(MemoryOwner):
    cdef char* ptr
    cdef size_t size
    cdef readonly Py_ssize_t page_size
    cdef int fork
    cdef OpenFile file                    # owned, unless there is a `file_owner`
    cdef object file_owner                # keeps it open for several regions, or None
    cdef readonly long long file_offset   # of the first byte, in that file
    cdef size_t map_ptr                   # [map_ptr, map_ptr + map_size) is unmapped at the end
    cdef size_t map_size
    cdef object owner                     # keeps memory that is not ours to unmap, or None
    cdef bint borrowed                    # of a user's object: nothing says if a child has it
    cdef bint shared                      # others may see its bytes, and write them: only to view
    cdef bint received                    # came from another process: its Buffers take leases
    cdef bint sent                        # in a message: other processes may see bytes of it
    cdef bint viewed                      # it had Buffers of its own
    cdef bint partial                     # its allocator alone knows where there is memory
    cdef bint spent                       # its allocator is gone, and it cannot be used again
    cdef bint newborn                     # nobody had it but the source that made it
    cdef uint64_t number                  # in the order in which they were made
    cdef Region parent                    # the region that this is a window of, or None
    cdef uint64_t holds                   # atomic: held Buffers whose owner this region is
    cdef uint64_t pinned_by               # the thread that changes its memory just now, or 0
    cdef PyObject* user                   # the allocator's core over it, which keeps this alive
    cdef object user_ref                  # a weak reference to it, under `lock`
    cdef bint messages                    # carry `file`, where receivers have their leases
    cdef Seen* seens                      # what forked children see
    cdef bint lease_lost                  # a fork could not be recorded: every byte is leased
    cdef bint inherited                   # by fork: only the parent's allocator hands bytes out
    cdef PyObject* next                   # the registry of live regions, in no order
    cdef PyObject* prev

    cdef int _unmap(self) noexcept
    cdef int _end_claim(self) noexcept
    # Would touching it be a SIGBUS? Also if that cannot be known.
    cdef bint shrunk(self) noexcept nogil
    # Before an allocator takes it: may other processes see its bytes?
    cdef bint seen_elsewhere(self) noexcept nogil
    cdef int attach(self, MemoryOwner core) except -1
    # The allocator's core, or None: there is none, or it is ending.
    cdef MemoryOwner living_user(self)
    # The allocator is gone, or (`streams`) its stream may still be at work there.
    cdef void detach(self, bint streams) noexcept
    # The file, with an open file description of its own.
    cdef Descriptor reopened(self)
    # Does another process still see bytes of [start, end)? 1, with a part in at, stop. The second
    # one goes by what the last call of children_ask found of forked children.
    cdef int leases(
        self, uintptr_t start, uintptr_t end, uintptr_t* at, uintptr_t* stop) noexcept nogil
    cdef int leases_by_now(
        self, uintptr_t start, uintptr_t end, uintptr_t* at, uintptr_t* stop) noexcept nogil
    # Raise ValueError if it is closed, or spent; also if no allocator can take it.
    cdef int check_usable(self) except -1
    cdef int check_unused(self) except -1
    # Between these two nobody closes it, but for a child that was forked meanwhile.
    cdef int pin(self) except -1
    cdef int pin_unused(self) except -1
    cdef void unpin(self) noexcept

# The result of source.region(nbytes), which should be a Region and is not checked here.
cdef object ask_source(object source, object nbytes)
# The region that a Buffer's bytes are in, or None.
cdef Region region_behind(Block block)
# An allocator's core enters the registry of those whose locks a fork takes, and leaves it.
cdef void register_core(MemoryOwner core) noexcept
cdef void unregister_core(MemoryOwner core) noexcept
