# The C surface of claims: which bytes the regions of this process have for themselves.
from cpython.object cimport PyObject
from libc.stdint cimport uint64_t

from arenapy.memory.children cimport Seen

cdef struct Holding

# One range of a space, in a tree. A space is a file, by its device and inode; or memory: device 0,
# and inode 0 for all addresses, else the number of the claim whose region's Buffers are meant.
# Regions that were received or unpickled may have the same bytes. What lies within them is in
# spaces for all of them: device 0 and inode WITHIN, and the file with WITHIN in its device.
cdef struct Range:
    uint64_t device, inode
    uint64_t start, end      # start < end
    uint64_t priority        # of a node's children: less
    Range* left              # what is before it
    Range* right
    Range* last              # of those in this subtree, the one with the greatest end
    int tree                 # OWNED, VIEWED, MAPPED; -1: in none
    Holding* holding         # that it is of

# The ranges of one region.
cdef struct Holding:
    Range* ranges            # owned; room for one more
    int n                    # of those that were put into trees
    char* label              # owned: what to call the region in messages
    bint outlived            # the region is gone, and others still see its bytes:
    Seen* seens              # owned: these children do; NULL: it cannot be known
    PyObject* view           # owned: so that the addresses stay that memory's; or NULL
    Holding* next            # in the list of those that outlived their region


# The claim of one region, from before anything is done to the bytes until it is unmapped.
cdef class Claim:
    cdef Holding* holding
    cdef readonly uint64_t number        # of the space that Buffers of its memory are
    cdef readonly object view            # of a user's object: what keeps its memory
    cdef readonly bint shared            # others may have a region of the same bytes
    cdef bint taken                      # a region has it, and ends it

    cdef void end(self) noexcept
    # The region's own mapping.
    cdef void place(self, uint64_t address, uint64_t nbytes) noexcept
    # The region goes, and these children still see its bytes. NULL: it cannot be known until when.
    cdef void outlive(self, Seen** seens) noexcept

# Let go of what outlived its region, if no child sees it any more.
cdef void settle_claims() noexcept
# Held around a fork.
cdef void claims_lock() noexcept nogil
cdef void claims_unlock() noexcept nogil
