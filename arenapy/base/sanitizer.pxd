# Bytes that nobody may touch, said to AddressSanitizer or valgrind. In builds for neither, POISONS
# is 0 and all of this is nothing: docs/crashes.md says how to make the others.
#
# Soundness rests on `unpoison` alone: before a block is handed out, and before memory goes back to
# whoever had it. To poison less than one could finds less, and is never wrong. AddressSanitizer's
# unit is 8 bytes, of which the first k may be touched: it leaves the ends of a range that are no
# multiples of 8 as they are where a neighbour needs them. Two threads may not do this to the same
# unit at once, so what lies closer together than that is not poisoned.
from libc.stdint cimport uintptr_t

cdef enum:
    POISON_UNIT = 8

cdef extern from *:
    """
    #ifndef ARENAPY_POISON_H
    #define ARENAPY_POISON_H
    #include <stddef.h>
    #include <stdint.h>
    #if defined(__SANITIZE_ADDRESS__)
    #define ARENAPY_ASAN
    #elif defined(__has_feature)
    #if __has_feature(address_sanitizer)
    #define ARENAPY_ASAN
    #endif
    #endif
    #if defined(ARENAPY_ASAN)
    #include <sanitizer/asan_interface.h>
    #define ARENAPY_POISONS 1
    /* An eighth of a range is memory of its own as soon as that is written: so of a large one the
       beginning only, and what was never poisoned is only looked at. */
    #define ARENAPY_POISON_MOST ((size_t)256 << 20)
    static inline void arenapy_poison(uintptr_t at, size_t n) {
        __asan_poison_memory_region((void *)at, n < ARENAPY_POISON_MOST ? n : ARENAPY_POISON_MOST);
    }
    static inline void arenapy_unpoison(uintptr_t at, size_t n) {
        while (n > ARENAPY_POISON_MOST) {
            if (__asan_region_is_poisoned((void *)at, ARENAPY_POISON_MOST))
                __asan_unpoison_memory_region((void *)at, ARENAPY_POISON_MOST);
            at += ARENAPY_POISON_MOST;
            n -= ARENAPY_POISON_MOST;
        }
        __asan_unpoison_memory_region((void *)at, n);
    }
    #elif defined(ARENAPY_VALGRIND)
    #include <valgrind/memcheck.h>
    #define ARENAPY_POISONS 1
    static inline void arenapy_poison(uintptr_t at, size_t n) {
        (void)VALGRIND_MAKE_MEM_NOACCESS(at, n);
    }
    static inline void arenapy_unpoison(uintptr_t at, size_t n) {
        (void)VALGRIND_MAKE_MEM_DEFINED(at, n);
    }
    #else
    #define ARENAPY_POISONS 0
    #define arenapy_poison(at, n) ((void)(at), (void)(n))
    #define arenapy_unpoison(at, n) ((void)(at), (void)(n))
    #endif
    #endif
    """
    const bint POISONS "ARENAPY_POISONS"
    void poison "arenapy_poison" (uintptr_t at, size_t nbytes) noexcept nogil
    void unpoison "arenapy_unpoison" (uintptr_t at, size_t nbytes) noexcept nogil
