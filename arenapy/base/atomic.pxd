# Atomics and the object lock, in one leaf that everything may cimport.
#
# The C11 atomics of <stdatomic.h> change the type of a field (`_Atomic`), which a Cython
# struct cannot say; the compiler's builtins work on plain integers, so they stand here.
#
# `arenapy_lock` guards one object's state against other Python threads. On builds with a
# GIL every Python-level call already holds it, so the lock is empty and costs nothing. On
# free-threaded builds it is a byte that is spun on: what it guards takes nanoseconds and calls
# no Python API, so a holder is never suspended. (A PyMutex can be handed to a thread that
# os.fork has stopped, for which our fork handler would then wait for ever.)
#
# `arenapy_spin` is the same byte on every build: for what C code without the GIL shares.
from libc.stdint cimport int64_t, uint32_t, uint64_t

from arenapy.base.assertion cimport ASSERTS
from arenapy.base.thread_slot cimport RANK_LAST, lock_released, lock_taken

cdef extern from *:
    """
    #ifndef ARENAPY_ATOMIC_H
    #define ARENAPY_ATOMIC_H
    #include <stdint.h>
    #include <string.h>
    #define arenapy_likely(x) __builtin_expect(!!(x), 1)
    /* So that a compiler does not ask later. */
    #define arenapy_is_no_null(p) do { if (!(p)) __builtin_unreachable(); } while (0)
    static inline uint64_t arenapy_load(uint64_t *p) {
        return __atomic_load_n(p, __ATOMIC_ACQUIRE);
    }
    static inline void arenapy_store(uint64_t *p, uint64_t v) {
        __atomic_store_n(p, v, __ATOMIC_RELEASE);
    }
    static inline int arenapy_cas(uint64_t *p, uint64_t *expected, uint64_t desired) {
        return __atomic_compare_exchange_n(p, expected, desired, 0,
                                           __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
    }
    static inline uint64_t arenapy_add(uint64_t *p, uint64_t v) {
        return __atomic_fetch_add(p, v, __ATOMIC_ACQ_REL);
    }
    static inline uint64_t arenapy_sub(uint64_t *p, uint64_t v) {
        return __atomic_fetch_sub(p, v, __ATOMIC_ACQ_REL);
    }
    /* What is changed under a lock, and looked at now and then without it. */
    static inline uint32_t arenapy_glance(uint32_t *p) {
        return __atomic_load_n(p, __ATOMIC_RELAXED);
    }
    static inline void arenapy_set_glanced(uint32_t *p, uint32_t v) {
        __atomic_store_n(p, v, __ATOMIC_RELAXED);
    }
    static inline void *arenapy_load_ptr(void **p) {
        return __atomic_load_n(p, __ATOMIC_RELAXED);
    }
    static inline void arenapy_store_ptr(void **p, void *v) {
        __atomic_store_n(p, v, __ATOMIC_RELEASE);
    }
    static inline void *arenapy_take_ptr(void **p) {
        return __atomic_exchange_n(p, (void *)0, __ATOMIC_ACQUIRE);
    }
    static inline int arenapy_cas_ptr(void **p, void **expected, void *desired) {
        return __atomic_compare_exchange_n(p, expected, desired, 0,
                                           __ATOMIC_RELEASE, __ATOMIC_RELAXED);
    }
    #include <sched.h>
    /* Bit 0: held. In assertion builds the other bits are the lock's rank. */
    typedef unsigned char arenapy_spin;
    #if ARENAPY_ASSERT + 0
    #define ARENAPY_RANK_OF(l) (__atomic_load_n(l, __ATOMIC_RELAXED) >> 1)
    #define arenapy_spin_rank(l, rank) ((void)(*(l) = (unsigned char)((rank) << 1)))
    #define arenapy_spin_try(l) (__atomic_fetch_or(l, 1, __ATOMIC_ACQUIRE) & 1)
    #define arenapy_spin_held(l) (__atomic_load_n(l, __ATOMIC_RELAXED) & 1)
    #define arenapy_spin_free(l) ((void)__atomic_fetch_and(l, 0xFE, __ATOMIC_RELEASE))
    #else
    #define ARENAPY_RANK_OF(l) 0
    #define arenapy_spin_rank(l, rank) ((void)(l))
    #define arenapy_spin_try(l) __atomic_exchange_n(l, 1, __ATOMIC_ACQUIRE)
    #define arenapy_spin_held(l) __atomic_load_n(l, __ATOMIC_RELAXED)
    #define arenapy_spin_free(l) __atomic_store_n(l, 0, __ATOMIC_RELEASE)
    #endif
    static void __attribute__((noinline, unused)) arenapy_spin_wait(arenapy_spin *l) {
        do {
            for (int i = 0; i < 64 && arenapy_spin_held(l); i++)
                __asm__ volatile("" ::: "memory");
            if (arenapy_spin_held(l)) sched_yield();
        } while (arenapy_spin_try(l));
    }
    static inline void arenapy_spin_acquire(arenapy_spin *l) {
        if (__builtin_expect(arenapy_spin_try(l), 0))
            arenapy_spin_wait(l);
    }
    static inline void arenapy_spin_release(arenapy_spin *l) {
        arenapy_spin_free(l);
    }
    typedef arenapy_spin arenapy_lock;
    #ifdef Py_GIL_DISABLED
    #define arenapy_lock_acquire arenapy_spin_acquire
    #define arenapy_lock_release arenapy_spin_release
    #define ARENAPY_GIL 0
    #else
    #define arenapy_lock_acquire(l) ((void)(l))
    #define arenapy_lock_release(l) ((void)(l))
    #define ARENAPY_GIL 1
    #endif
    #if PY_VERSION_HEX >= 0x030D0000
    #define arenapy_finalizing() Py_IsFinalizing()
    #else
    #define arenapy_finalizing() _Py_IsFinalizing()
    #endif
    /* A count that only threads with the GIL change, and others read: no locked instruction. */
    static inline void arenapy_count(uint64_t *p, int64_t n) {
    #ifdef Py_GIL_DISABLED
        __atomic_fetch_add(p, (uint64_t)n, __ATOMIC_ACQ_REL);
    #else
        arenapy_store(p, __atomic_load_n(p, __ATOMIC_RELAXED) + (uint64_t)n);
    #endif
    }
    #endif
    """
    ctypedef struct arenapy_lock:
        pass
    ctypedef struct arenapy_spin:
        pass
    const bint ARENAPY_GIL
    bint likely "arenapy_likely" (bint x) noexcept nogil
    void is_no_null "arenapy_is_no_null" (void* p) noexcept nogil
    uint64_t arenapy_load(uint64_t* p) noexcept nogil
    void arenapy_store(uint64_t* p, uint64_t v) noexcept nogil
    bint arenapy_cas(uint64_t* p, uint64_t* expected, uint64_t desired) noexcept nogil
    uint64_t arenapy_add(uint64_t* p, uint64_t v) noexcept nogil
    uint64_t arenapy_sub(uint64_t* p, uint64_t v) noexcept nogil
    void arenapy_count(uint64_t* p, int64_t n) noexcept nogil
    uint32_t arenapy_glance(uint32_t* p) noexcept nogil
    void arenapy_set_glanced(uint32_t* p, uint32_t v) noexcept nogil
    void* arenapy_load_ptr(void** p) noexcept nogil
    void arenapy_store_ptr(void** p, void* v) noexcept nogil
    void* arenapy_take_ptr(void** p) noexcept nogil
    bint arenapy_cas_ptr(void** p, void** expected, void* desired) noexcept nogil
    int rank_of_lock "ARENAPY_RANK_OF" (arenapy_lock* lock) noexcept nogil
    int rank_of_spin "ARENAPY_RANK_OF" (arenapy_spin* lock) noexcept nogil
    # Where a lock is made: its place in the order (thread_slot). For assertion builds; others have
    # zeroed locks.
    void rank_lock "arenapy_spin_rank" (arenapy_lock* lock, int rank) noexcept nogil
    void rank_spin "arenapy_spin_rank" (arenapy_spin* lock, int rank) noexcept nogil
    void lock_acquire "arenapy_lock_acquire" (arenapy_lock* lock) noexcept nogil
    void lock_release "arenapy_lock_release" (arenapy_lock* lock) noexcept nogil
    void spin_acquire "arenapy_spin_acquire" (arenapy_spin* lock) noexcept nogil
    void spin_release "arenapy_spin_release" (arenapy_spin* lock) noexcept nogil
    bint arenapy_finalizing() noexcept nogil


# A lock without a rank comes last in the order. (The lock of an object is checked on builds with
# a GIL, too, where it is empty.)

cdef inline void arenapy_lock_acquire(arenapy_lock* lock) noexcept nogil:
    if ASSERTS:
        lock_taken(rank_of_lock(lock) or RANK_LAST)
    lock_acquire(lock)


cdef inline void arenapy_lock_release(arenapy_lock* lock) noexcept nogil:
    if ASSERTS:
        lock_released(rank_of_lock(lock) or RANK_LAST)
    lock_release(lock)


cdef inline void arenapy_spin_acquire(arenapy_spin* lock) noexcept nogil:
    if ASSERTS:
        lock_taken(rank_of_spin(lock) or RANK_LAST)
    spin_acquire(lock)


cdef inline void arenapy_spin_release(arenapy_spin* lock) noexcept nogil:
    if ASSERTS:
        lock_released(rank_of_spin(lock) or RANK_LAST)
    spin_release(lock)
