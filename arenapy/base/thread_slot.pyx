"""Threads: numbered, so that what is kept by thread has few owners and goes on to new threads.

The import of this module also prepares the process for threads that take locks from their owners
(biased_lock).

In a forked child only the thread that forked has a number. Data kept under the others is whole,
or is forgotten there: the locks that guard it are taken around a fork, and freelists emptied
after it.
"""
from libc.stdint cimport int64_t, uint64_t

from arenapy.base.assertion cimport ASSERTS, arenapy_assert

cdef extern from *:
    """
    #include <linux/membarrier.h>
    #include <pthread.h>
    #include <signal.h>
    #include <stdint.h>
    #include <sys/stat.h>
    #include <sys/syscall.h>
    #include <unistd.h>
    static uint64_t arenapy_taken;               /* bit i: a living thread has number 1 + i */
    static uint64_t arenapy_others;              /* threads that found all taken */
    static __thread uint64_t arenapy_number;     /* of this thread; 0: none yet */
    /* The same, but 0 above N_SLOTS. In static TLS, at one offset for all threads. */
    static __thread uint64_t arenapy_slot __attribute__((tls_model("initial-exec")));
    static pthread_key_t arenapy_key;
    static int arenapy_keyed;
    static pthread_once_t arenapy_once = PTHREAD_ONCE_INIT;

    static int64_t arenapy_slot_offset(void) {
    #ifdef __x86_64__
        char *pointer;
        __asm__("movq %%fs:0, %0" : "=r"(pointer));
        return (char *)&arenapy_slot - pointer;
    #else
        return (char *)&arenapy_slot - (char *)__builtin_thread_pointer();
    #endif
    }
    static void arenapy_thread_ends(void *number) {
        arenapy_number = arenapy_slot = 0;
        __atomic_fetch_and(&arenapy_taken, ~((uint64_t)1 << ((uintptr_t)number - 1)),
                           __ATOMIC_RELEASE);
    }
    static void arenapy_forget_threads(void) {
        arenapy_taken = arenapy_slot ? (uint64_t)1 << (arenapy_slot - 1) : 0;
    }
    static void arenapy_make_key(void) {
        pthread_atfork(NULL, NULL, arenapy_forget_threads);
        arenapy_keyed = pthread_key_create(&arenapy_key, arenapy_thread_ends) == 0;
    }
    static uint64_t __attribute__((noinline, cold)) arenapy_new_number(void) {
        uint64_t taken = __atomic_load_n(&arenapy_taken, __ATOMIC_RELAXED);
        int i;
        pthread_once(&arenapy_once, arenapy_make_key);
        do {
            if (!~taken)
                return arenapy_number =
                    1 + 64 + __atomic_fetch_add(&arenapy_others, 1, __ATOMIC_RELAXED);
            i = __builtin_ctzll(~taken);
        } while (!__atomic_compare_exchange_n(&arenapy_taken, &taken, taken | (uint64_t)1 << i, 0,
                                              __ATOMIC_ACQUIRE, __ATOMIC_RELAXED));
        /* Without the key the number is nobody else's for ever. */
        if (arenapy_keyed) pthread_setspecific(arenapy_key, (void *)(uintptr_t)(1 + i));
        return arenapy_number = arenapy_slot = 1 + i;
    }

    /* To register takes 10 to 20 ms in a process that has threads, and no time in another one.
       OpenBLAS starts some when NumPy is imported. */
    static void *arenapy_register(void *nothing) {
        syscall(SYS_membarrier, MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED, 0, 0);
        return nothing;
    }
    static void arenapy_register_soon(void) {
        static char begun;
        struct stat tasks;
        sigset_t all, before;
        pthread_t thread;
        if (__atomic_exchange_n(&begun, 1, __ATOMIC_RELAXED)) return;
        if (stat("/proc/self/task", &tasks) == 0 && tasks.st_nlink == 3) {    /* 2, and threads */
            arenapy_register(NULL);
            return;
        }
        sigfillset(&all);                        /* no signal's handler is to run in it */
        pthread_sigmask(SIG_SETMASK, &all, &before);
        if (pthread_create(&thread, NULL, arenapy_register, NULL) == 0) pthread_detach(thread);
        pthread_sigmask(SIG_SETMASK, &before, NULL);
    }

    /* Of this thread: how many locks of a rank it holds, and how many of those are other
       cores', which a fork took. */
    typedef struct {
        unsigned short held[16], others[16];
    } arenapy_locks;
    #if ARENAPY_ASSERT + 0
    static __thread arenapy_locks arenapy_mine;
    #define arenapy_my_locks() (&arenapy_mine)
    #else
    #define arenapy_my_locks() ((arenapy_locks *)0)
    #endif
    """
    ctypedef struct Locks "arenapy_locks":
        unsigned short[16] held
        unsigned short[16] others
    Locks* my_locks "arenapy_my_locks" () noexcept nogil
    uint64_t number "arenapy_number"
    uint64_t new_number "arenapy_new_number" () noexcept nogil
    int64_t offset_of_slot "arenapy_slot_offset" () noexcept nogil
    void register_soon "arenapy_register_soon" () noexcept nogil


cdef uint64_t thread_number() noexcept nogil:
    return number if number else new_number()


cdef int64_t slot_offset() noexcept nogil:
    return offset_of_slot()


# Now, so that a thread soon takes a biased lock from its owner without a wait.
register_soon()


# ---- the order of locks: in assertion builds only ------------------------------------------

cdef void lock_taken(int rank) noexcept nogil:
    cdef Locks* mine = my_locks()
    cdef int below
    if not ASSERTS:
        return
    for below in range(rank + 1, 16):
        arenapy_assert(
            mine.held[below] == mine.others[below],
            b"locks are taken in their order: none of a later rank is held")
    arenapy_assert(
        mine.held[rank] == mine.others[rank]
        or ((rank == RANK_CACHE or rank == RANK_DEPOT) and mine.held[RANK_BIRTHS]),
        b"locks are taken in their order: none of the same rank is held")
    mine.held[rank] += 1


cdef void lock_released(int rank) noexcept nogil:
    cdef Locks* mine = my_locks()
    if not ASSERTS:
        return
    arenapy_assert(mine.held[rank] > 0, b"a lock is released by the thread that took it")
    mine.held[rank] -= 1
    mine.others[rank] = min(mine.others[rank], mine.held[rank])


cdef void next_core_locks() noexcept nogil:
    cdef Locks* mine = my_locks()
    cdef int rank
    if not ASSERTS:
        return
    arenapy_assert(
        mine.held[RANK_REGISTRY] and mine.held[RANK_CLAIMS],
        b"only a fork takes the locks of several cores")
    for rank in range(RANK_OWNER, RANK_CHILDREN):    # no core's lock comes after these
        mine.others[rank] = mine.held[rank]


cdef void no_lock_is_held() noexcept nogil:
    cdef Locks* mine = my_locks()
    cdef int rank
    if not ASSERTS:
        return
    for rank in range(16):
        arenapy_assert(mine.held[rank] == 0, b"no lock is held where other code may run")
