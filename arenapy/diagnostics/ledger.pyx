"""The ledger of debug mode: whose bytes are whose, where they were allocated and given back.

What lives here: stretches of addresses, each of one block, and looking whether what is free still
reads as it was filled. What does not: which bytes are free (allocators), sites as such
(call_sites), when an allocator writes into its ledger (allocator/allocator_core).

A stretch that is filled was free ever since: if a byte of it reads otherwise, somebody wrote to
it who had no right to, and the stretch says of which block that was. Memory that was never handed
out is not in here, so that nothing is filled that was not allocated before, such as a user's
file.

An ordered array, of which a loop that allocates and frees changes single entries. A pure C
structure under a lock of its own, because C calls that run without the GIL write into it too.
"""
cimport cython
from libc.stdint cimport uint32_t, uintptr_t
from libc.stdio cimport fprintf, snprintf, stderr
from libc.stdlib cimport free, malloc
from libc.string cimport memcmp, memcpy, memmove, memset
from posix.unistd cimport usleep

import os
import sys

from arenapy.base.atomic cimport arenapy_spin_acquire, arenapy_spin_release, rank_spin
from arenapy.base.interval_set cimport make_room
from arenapy.base.thread_slot cimport RANK_LEDGER
from arenapy.diagnostics.call_sites cimport NO_SITE, SITE_IN_C, call_site, site_text

cdef enum:
    TEXT = 4096              # bytes of a message, at most
    MOMENT = 20              # us


# Where it was closed when Python started, a file of the program's may have its number.
cdef bint has_stderr = getattr(sys, "__stderr__", None) is not None


cdef bint damaged(const Stretch* s, Damage* damage) noexcept nogil:
    """Does a filled stretch of at least a byte read otherwise? Then how."""
    cdef const unsigned char* bytes_ = <const unsigned char*>s.start
    cdef size_t n = s.end - s.start
    cdef size_t i = 0
    if bytes_[0] == FREED_BYTE and memcmp(bytes_, bytes_ + 1, n - 1) == 0:
        return False
    while i < n and bytes_[i] == FREED_BYTE:
        i += 1
    if i == n:                               # it is being put right this very moment
        return False
    damage.of = s[0]
    damage.first = s.start + i
    damage.reads = bytes_[i]
    damage.count = 0
    damage.told = False
    for i in range(i, n):
        damage.count += bytes_[i] != FREED_BYTE
    return True


cdef void describe(char* text, Ledger ledger, const Damage* d) noexcept nogil:
    snprintf(
        text, TEXT,
        b"write after free: byte %zd of the block of %zu bytes at %p of this %s is 0x%02x, and not "
        b"the 0x%02x that free memory is filled with (damaged bytes: %zu). The block was allocated "
        b"at %s, "
        b"and given back last at %s; look for an address that was used after that",
        <Py_ssize_t>(d.first - d.of.block), d.of.nbytes, <void*>d.of.block, ledger.name,
        <int>d.reads, <int>FREED_BYTE, d.count, site_text(d.of.born), site_text(d.of.gone))


@cython.final
cdef class Ledger:
    """The blocks of an allocator in debug mode, by address. Internal."""

    def __cinit__(self, str what):
        self.what = what
        self.spelled = what.encode()
        self.name = self.spelled
        self.process = os.getpid()
        rank_spin(&self.lock, RANK_LEDGER)

    def __dealloc__(self):
        free(self.items)

    # -- stretches, the lock held

    cdef Py_ssize_t first(self, uintptr_t at) noexcept nogil:
        """Index of the first stretch that ends above an address."""
        cdef Py_ssize_t low = 0, high = self.n, middle
        while low < high:
            middle = (low + high) // 2
            if self.items[middle].end <= at:
                low = middle + 1
            else:
                high = middle
        return low

    cdef Py_ssize_t split(self, uintptr_t at) noexcept nogil:
        """Let no stretch lie on both sides of an address; index of the first one above it."""
        cdef Py_ssize_t i = self.first(at)
        cdef Stretch above
        if i == self.n or self.items[i].start >= at:
            return i
        above = self.items[i]
        above.start = at
        self.items[i].end = at
        self.insert(i + 1, above)            # without memory for it, it is forgotten
        return i + 1

    cdef void insert(self, Py_ssize_t i, Stretch stretch) noexcept nogil:
        if make_room(<void**>&self.items, &self.capacity, self.n + 1, sizeof(Stretch)):
            memmove(&self.items[i + 1], &self.items[i], (self.n - i) * sizeof(Stretch))
            self.items[i] = stretch
            self.n += 1

    cdef void remove(self, Py_ssize_t i, Py_ssize_t j) noexcept nogil:
        if j > i:
            memmove(&self.items[i], &self.items[j], (self.n - j) * sizeof(Stretch))
            self.n -= j - i

    cdef void note(self, Damage* damage) noexcept nogil:
        if self.n_found < MAX_DAMAGES:
            self.found[self.n_found] = damage[0]
            self.n_found += 1

    # -- the life of a block

    cdef void begin(
        self, uintptr_t start, uintptr_t end, size_t nbytes, uint32_t born
    ) noexcept nogil:
        cdef uintptr_t at = start
        cdef Py_ssize_t i, j
        cdef Stretch s
        cdef Damage damage
        # Nobody else has these bytes: they are looked at without the lock.
        cdef bint looks = self.look()
        while looks and at < end:
            arenapy_spin_acquire(&self.lock)
            i = self.first(at)
            s = Stretch(end, end, 0, 0, NO_SITE, NO_SITE, False)
            if i < self.n:
                s = self.items[i]
            arenapy_spin_release(&self.lock)
            s.start, s.end = max(s.start, start), min(s.end, end)
            at = s.end if s.start < end else end
            if s.filled and s.start < s.end and damaged(&s, &damage):
                arenapy_spin_acquire(&self.lock)
                self.note(&damage)
                arenapy_spin_release(&self.lock)
        if looks:
            self.have_looked()
        arenapy_spin_acquire(&self.lock)
        i = self.split(start)
        j = self.split(end)
        self.remove(i, j)
        self.insert(i, Stretch(start, end, start, nbytes, born, NO_SITE, False))
        arenapy_spin_release(&self.lock)

    cdef bint leave(self, uintptr_t block, uint32_t gone) noexcept nogil:
        cdef Py_ssize_t i
        cdef bint live
        arenapy_spin_acquire(&self.lock)
        i = self.first(block)
        live = i < self.n and self.items[i].start == block and self.items[i].gone == NO_SITE
        while live and i < self.n and self.items[i].block == block:
            self.items[i].gone = gone
            i += 1
        arenapy_spin_release(&self.lock)
        return live

    cdef void end(self, uintptr_t start, uintptr_t end, bint fill) noexcept nogil:
        cdef uint32_t gone = self.place if self.place else <uint32_t>SITE_IN_C
        cdef Py_ssize_t i, j
        fill = fill and self.look()
        if fill:                             # nobody else has these bytes
            memset(<void*>start, FREED_BYTE, end - start)
            self.have_looked()
        arenapy_spin_acquire(&self.lock)
        i = self.split(start)
        j = self.split(end)
        if i == j:                           # of C code alone, by calls that write nothing in here
            self.insert(i, Stretch(start, end, start, end - start, SITE_IN_C, gone, fill))
        for i in range(i, j):
            if self.items[i].gone == NO_SITE:
                self.items[i].gone = gone
            self.items[i].filled = fill
        arenapy_spin_release(&self.lock)

    cdef void forget(self, uintptr_t start, uintptr_t end) noexcept nogil:
        cdef Py_ssize_t i
        arenapy_spin_acquire(&self.lock)
        i = self.split(start)
        self.remove(i, self.split(end))
        arenapy_spin_release(&self.lock)

    cdef bint look(self) noexcept nogil:
        """False: there is nothing to look at. Else `have_looked` follows soon."""
        arenapy_spin_acquire(&self.lock)
        cdef bint may = not self.over
        self.n_looking += may
        arenapy_spin_release(&self.lock)
        return may

    cdef void have_looked(self) noexcept nogil:
        arenapy_spin_acquire(&self.lock)
        self.n_looking -= 1
        arenapy_spin_release(&self.lock)

    cdef void close(self) noexcept nogil:
        arenapy_spin_acquire(&self.lock)
        self.over = True
        self.remove(0, self.n)
        while self.n_looking:                # who looks takes no other lock meanwhile
            arenapy_spin_release(&self.lock)
            usleep(MOMENT)
            arenapy_spin_acquire(&self.lock)
        arenapy_spin_release(&self.lock)

    # -- what is wrong

    cdef void scan(self, uintptr_t start, uintptr_t end) noexcept nogil:
        cdef Py_ssize_t i
        cdef Stretch s
        cdef Damage damage
        arenapy_spin_acquire(&self.lock)     # all the while: others may take these bytes
        i = self.first(start)
        while i < self.n and self.items[i].start < end:
            s = self.items[i]
            s.start, s.end = max(s.start, start), min(s.end, end)
            if s.filled and s.start < s.end and damaged(&s, &damage):
                self.note(&damage)
                memset(<void*>s.start, FREED_BYTE, s.end - s.start)
            i += 1
        arenapy_spin_release(&self.lock)

    cdef uint32_t born_at(self, uintptr_t block) noexcept nogil:
        cdef Py_ssize_t i
        cdef uint32_t place = NO_SITE
        arenapy_spin_acquire(&self.lock)
        i = self.first(block)
        if i < self.n and self.items[i].start == block and self.items[i].gone == NO_SITE:
            place = self.items[i].born
        arenapy_spin_release(&self.lock)
        return place

    cdef void tell(self) noexcept nogil:
        cdef char[TEXT] text
        cdef Damage damage
        cdef Py_ssize_t i = 0
        cdef bint more = True
        while more:
            arenapy_spin_acquire(&self.lock)
            while i < self.n_found and self.found[i].told:
                i += 1
            more = i < self.n_found
            if more:
                self.found[i].told = True
                damage = self.found[i]
            arenapy_spin_release(&self.lock)
            if more:
                describe(text, self, &damage)
                if has_stderr:
                    fprintf(stderr, b"arenapy: %s\n", text)

    cdef str take_damage(self):
        cdef char[TEXT] text
        cdef Damage damage
        cdef bint found
        arenapy_spin_acquire(&self.lock)
        found = self.n_found > 0
        if found:
            damage = self.found[0]
            self.n_found -= 1
            memmove(&self.found[0], &self.found[1], self.n_found * sizeof(Damage))
        arenapy_spin_release(&self.lock)
        if not found:
            return None
        describe(text, self, &damage)
        return (<bytes>text).decode("utf-8", "replace")

    cdef void refuse(self, const char* call, uintptr_t at) noexcept nogil:
        cdef Stretch s = Stretch(0, 0, 0, 0, NO_SITE, NO_SITE, False)
        cdef Py_ssize_t i
        cdef uint32_t place = call_site()
        arenapy_spin_acquire(&self.lock)
        i = self.first(at)
        if i < self.n and self.items[i].start <= at:
            s = self.items[i]
        arenapy_spin_release(&self.lock)
        if not has_stderr:
            return
        if s.block == 0:
            fprintf(stderr, b"arenapy: %s(%p) at %s: no block begins there, and none did\n",
                    call, <void*>at, site_text(place))
        elif s.gone == NO_SITE:
            fprintf(stderr, b"arenapy: %s(%p) at %s: that is byte %zu of the live block of %zu "
                    b"bytes "
                    b"at %p, allocated at %s\n", call, <void*>at, site_text(place),
                    <size_t>(at - s.block), s.nbytes, <void*>s.block, site_text(s.born))
        else:
            fprintf(stderr, b"arenapy: %s(%p) at %s: a double free, or of no block: that is byte "
                    b"%zu "
                    b"of the block of %zu bytes at %p, allocated at %s and given back last at %s\n",
                    call, <void*>at, site_text(place), <size_t>(at - s.block), s.nbytes,
                    <void*>s.block, site_text(s.born), site_text(s.gone))

    # -- for Python

    def live(self):
        """Address, bytes asked for and place of each live block, by address."""
        cdef Stretch* copy
        cdef Py_ssize_t i, n = -1, capacity
        while n < 0:
            capacity = self.n + 64
            copy = <Stretch*>malloc(capacity * sizeof(Stretch))
            if copy == NULL:
                raise MemoryError("no memory for a list of live blocks")
            arenapy_spin_acquire(&self.lock)
            if self.n <= capacity:
                n = self.n
                if n:                        # else `items` may be NULL
                    memcpy(copy, self.items, n * sizeof(Stretch))
            arenapy_spin_release(&self.lock)
            if n < 0:
                free(copy)
        try:
            return [
                (copy[i].block, copy[i].nbytes, site_text(copy[i].born).decode("utf-8", "replace"))
                for i in range(n) if copy[i].gone == NO_SITE and copy[i].start == copy[i].block
            ]
        finally:
            free(copy)
