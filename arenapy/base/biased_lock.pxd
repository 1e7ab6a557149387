# A lock for what one thread uses nearly always: to that thread, its owner, it costs no locked
# instruction (of which a pair costs 3 ns on some processors, and 10 on others).
#
# The owner stores `busy` and then reads `owner`; whoever takes the lock from its owner stores
# `owner` and then reads `busy`. At least one of them sees what the other stored, if neither
# processor moves its load before its store. The owner's may do so, until membarrier(2), which the
# other one calls in between, makes it not to. (Biased locking with an asymmetric fence: Dice, Moir
# and Scherer, "Quickly Reacquirable Locks", 2003.) Where there is no membarrier nobody owns a lock.
#
# Only a lock's first user ever owns it. (A thread that was its owner may have read that it is, be
# suspended, and store `busy` long after the lock has gone to others: never beside another owner.)
# If others come, it owns the lock again after PATIENCE acquisitions with nobody's between them,
# which pay for the call of membarrier.
#
# Threads are told apart by their numbers. The thread that gets a number next, along with what is
# kept under it, is then the owner.
from libc.stdint cimport uint64_t

from arenapy.base.assertion cimport ASSERTS
from arenapy.base.atomic cimport arenapy_spin, rank_of_spin, rank_spin
from arenapy.base.thread_slot cimport RANK_LAST, lock_released, lock_taken, thread_number

cdef extern from *:
    """
    #ifndef ARENAPY_BIASED_H
    #define ARENAPY_BIASED_H
    #include <errno.h>
    #include <sched.h>
    #include <stdint.h>
    #include <time.h>
    #include <unistd.h>
    #include <linux/membarrier.h>
    #include <sys/syscall.h>
    #define ARENAPY_PATIENCE 4096
    #define ARENAPY_TAKEN ((uint64_t)1 << 63)
    typedef struct {
        uint64_t owner;          /* `first`; | TAKEN: another thread takes the lock from it; or 0 */
        uint64_t first;          /* the number of who may own it; 0: nobody had it */
        uint32_t run;            /* acquisitions by `first` since another thread's */
        unsigned char busy;      /* the owner holds it */
        arenapy_spin lock;       /* another thread does, or waits for the owner */
    } arenapy_biased;
    static int arenapy_membarrier(int command) {
        return syscall(SYS_membarrier, command, 0, 0) == 0;
    }
    /* Asks only. thread_slot registers when it is imported. A thread that takes a lock from its
       owner before that is done registers itself. */
    static int arenapy_may_own(void) {
        static int may = -1;
        int known = __atomic_load_n(&may, __ATOMIC_RELAXED);
        if (known < 0) {
            long commands = syscall(SYS_membarrier, MEMBARRIER_CMD_QUERY, 0, 0);
            known = commands > 0 && (commands & MEMBARRIER_CMD_PRIVATE_EXPEDITED) != 0;
            __atomic_store_n(&may, known, __ATOMIC_RELAXED);
        }
        return known;
    }
    static void arenapy_fence_all(void) {
        while (!arenapy_membarrier(MEMBARRIER_CMD_PRIVATE_EXPEDITED))
            if (!arenapy_membarrier(MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED)) {
                /* Forbidden meanwhile. No processor keeps a store to itself for so long. */
                struct timespec t = {0, 10000000};
                nanosleep(&t, 0);
                return;
            }
    }
    static void __attribute__((noinline, cold, unused))
    arenapy_biased_slow(arenapy_biased *l, uint64_t me) {
        uint64_t owner;
        int kept = errno;        /* it may be a malloc's */
        arenapy_spin_acquire(&l->lock);
        owner = __atomic_load_n(&l->owner, __ATOMIC_RELAXED);
        if (owner) {
            __atomic_store_n(&l->owner, owner | ARENAPY_TAKEN, __ATOMIC_RELAXED);
            arenapy_fence_all();
            while (__atomic_load_n(&l->busy, __ATOMIC_ACQUIRE)) sched_yield();
            __atomic_store_n(&l->owner, 0, __ATOMIC_RELAXED);
        }
        if (l->first == 0) {
            l->first = me;
            l->run = ARENAPY_PATIENCE;
        }
        if (l->first != me) {
            l->run = 0;
        } else if (l->run < ARENAPY_PATIENCE) {
            l->run++;
        } else if (arenapy_may_own()) {
            __atomic_store_n(&l->busy, 1, __ATOMIC_RELAXED);
            __atomic_store_n(&l->owner, me, __ATOMIC_RELAXED);
            arenapy_spin_release(&l->lock);
        }
        errno = kept;
    }
    static inline int arenapy_biased_to(arenapy_biased *l, uint64_t thread) {
    #ifdef __x86_64__
        int so;                  /* in one instruction, which compilers do not make of a load */
        __asm__ volatile("cmpq %2, %1" : "=@cce"(so) : "m"(l->owner), "r"(thread));
        return so;
    #else
        return __atomic_load_n(&l->owner, __ATOMIC_RELAXED) == thread;
    #endif
    }
    static inline int arenapy_biased_enter(arenapy_biased *l, uint64_t me) {
    #ifdef ARENAPY_UNLOCKED      /* asv_benches/instructions/counts.py: what is all this worth? */
        return 1;
    #endif
        if (__builtin_expect(!arenapy_biased_to(l, me), 0)) return 0;
        __atomic_store_n(&l->busy, 1, __ATOMIC_RELAXED);
        __atomic_signal_fence(__ATOMIC_SEQ_CST);
        if (__builtin_expect(arenapy_biased_to(l, me), 1)) return 1;
        __atomic_store_n(&l->busy, 0, __ATOMIC_RELEASE);
        return 0;
    }
    static inline void arenapy_biased_leave(arenapy_biased *l) {
    #ifdef ARENAPY_UNLOCKED
        return;
    #endif
        __atomic_store_n(&l->busy, 0, __ATOMIC_RELEASE);
    }
    static inline void arenapy_biased_acquire(arenapy_biased *l, uint64_t me) {
        if (!arenapy_biased_enter(l, me)) arenapy_biased_slow(l, me);
    }
    static inline void arenapy_biased_release(arenapy_biased *l, uint64_t me) {
        /* Who holds it as its owner stays that until it leaves. */
        if ((__atomic_load_n(&l->owner, __ATOMIC_RELAXED) & ~ARENAPY_TAKEN) == me)
            arenapy_biased_leave(l);
        else
            arenapy_spin_release(&l->lock);
    }
    static inline void arenapy_biased_alone(arenapy_biased *l) {
        l->owner = 0;
        l->busy = 0;
        (void)arenapy_spin_try(&l->lock);
    }
    #endif
    """
    # The owner of a lock that no thread can enter.
    const uint64_t NOBODY "(~(uint64_t)0)"
    ctypedef struct BiasedLock "arenapy_biased":
        uint64_t owner
        arenapy_spin lock
    bint enter_as "arenapy_biased_enter" (BiasedLock* l, uint64_t me) noexcept nogil
    void acquire_as "arenapy_biased_acquire" (BiasedLock* l, uint64_t me) noexcept nogil
    void release_as "arenapy_biased_release" (BiasedLock* l, uint64_t me) noexcept nogil
    void leave_as_owner "arenapy_biased_leave" (BiasedLock* l) noexcept nogil
    # In a forked child, which holds it: another thread may have waited for it in the parent, and
    # have said so in here. It is released as ever.
    void biased_alone "arenapy_biased_alone" (BiasedLock* l) noexcept nogil


cdef inline void rank_biased(BiasedLock* l, int rank) noexcept nogil:
    rank_spin(&l.lock, rank)


# For the owner alone, which leaves it by biased_leave; False: this is another thread. `me`: the
# number of this thread, or its slot if no lock that it enters so has the owner 0.
cdef inline bint biased_enter(BiasedLock* l, uint64_t me) noexcept nogil:
    if not enter_as(l, me):
        return False
    if ASSERTS:
        lock_taken(rank_of_spin(&l.lock) or RANK_LAST)
    return True


cdef inline void biased_leave(BiasedLock* l) noexcept nogil:
    if ASSERTS:
        lock_released(rank_of_spin(&l.lock) or RANK_LAST)
    leave_as_owner(l)


# For any thread.
cdef inline void biased_acquire(BiasedLock* l) noexcept nogil:
    if ASSERTS:
        lock_taken(rank_of_spin(&l.lock) or RANK_LAST)
    acquire_as(l, thread_number())


cdef inline void biased_release(BiasedLock* l) noexcept nogil:
    if ASSERTS:
        lock_released(rank_of_spin(&l.lock) or RANK_LAST)
    release_as(l, thread_number())
