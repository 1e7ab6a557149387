# The promises of a struct's comments, in code: each core checks them on entry and exit.
#
# Only assertion builds look (CFLAGS=-DARENAPY_ASSERT; docs/internals.md has the command). All
# others evaluate nothing.
#
# A promise is the text of the message. It is not made of the condition, whose C text is Cython's.

cdef extern from *:
    """
    #ifndef ARENAPY_ASSERTION_H
    #define ARENAPY_ASSERTION_H
    #if ARENAPY_ASSERT + 0
    #include <stdio.h>
    #include <stdlib.h>
    #define ARENAPY_ASSERTS 1
    static void __attribute__((noinline, cold, noreturn, unused))
    arenapy_broken(const char *file, int line, const char *function, const char *promise) {
        fprintf(stderr, "arenapy: broken promise: %s (in %s, %s:%d)\\n",
                promise, function, file, line);
        fflush(stderr);
        abort();
    }
    #define arenapy_assert(condition, promise) \\
        ((condition) ? (void)0 : arenapy_broken(__FILE__, __LINE__, __func__, promise))
    #else
    #define ARENAPY_ASSERTS 0
    /* Named, so that no compiler warns of what only assertions use; not evaluated. */
    #define arenapy_assert(condition, promise) ((void)sizeof(condition), (void)sizeof(promise))
    #endif
    #endif
    """
    const bint ASSERTS "ARENAPY_ASSERTS"
    void arenapy_assert(bint condition, const char* promise) noexcept nogil
