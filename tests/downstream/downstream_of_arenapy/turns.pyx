# cython: language_level=3, freethreading_compatible=True
"""A lock with an owner, and counters that are right only if nobody enters beside another."""
from libc.stdint cimport uint64_t
from libc.string cimport memset

from arenapy.base.biased_lock cimport (
    BiasedLock, biased_acquire, biased_enter, biased_leave, biased_release,
)
from arenapy.base.thread_slot cimport thread_number

cdef extern from *:
    """
    #include <time.h>
    static int turns_stop(int *p) { return __atomic_load_n(p, __ATOMIC_RELAXED); }
    static void turns_sleep(long nanoseconds) {
        struct timespec t = {0, nanoseconds};
        nanosleep(&t, 0);
    }
    """
    bint load "turns_stop" (bint* p) noexcept nogil
    void sleep "turns_sleep" (long nanoseconds) noexcept nogil

cdef enum:
    WORDS = 8
    INSIDE = 50_000          # nanoseconds


cdef class Turns:
    """What one lock guards: words that are all equal."""

    cdef BiasedLock lock
    cdef uint64_t[WORDS] words
    cdef bint stopped
    cdef readonly uint64_t broken      # times that they were not

    def __cinit__(self):
        memset(&self.lock, 0, sizeof(self.lock))
        memset(self.words, 0, sizeof(self.words))

    @property
    def count(self):
        """How often somebody counted up."""
        return self.words[0]

    cdef void up(self, bint slowly) noexcept nogil:
        cdef int i
        cdef uint64_t before = self.words[0]
        if slowly:                         # so that whoever enters beside this thread is noticed
            sleep(INSIDE)
            self.broken += self.words[0] != before
        for i in range(1, WORDS):
            self.broken += self.words[i] != self.words[0]
        for i in range(WORDS):
            self.words[i] += 1

    def take_turns(self, long pause):
        """Until `stop`: count up as any thread may, with a pause of so many nanoseconds after it
        if that is not 0 (and each time slowly). How often, and how often as the lock's owner."""
        cdef uint64_t n = 0, owned = 0
        cdef bint slowly = pause != 0
        with nogil:
            while not load(&self.stopped):
                if biased_enter(&self.lock, thread_number()):
                    self.up(slowly)
                    biased_leave(&self.lock)
                    owned += 1
                else:
                    biased_acquire(&self.lock)
                    self.up(slowly)
                    biased_release(&self.lock)
                n += 1
                if pause:
                    sleep(pause)
        return n, owned

    def stop(self):
        """End all loops of `take_turns`."""
        self.stopped = True
