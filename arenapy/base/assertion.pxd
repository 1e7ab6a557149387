# What a struct's comments promise, said in code: each core checks it on entry and exit.
#
# Only assertion builds look (CFLAGS=-DARENAPY_ASSERT; docs/internals.md has the command). In all
# others the macro drops its arguments before the compiler sees them.
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
    #define arenapy_assert(condition, promise) ((void)0)
    #endif
    #endif
    """
    const bint ASSERTS "ARENAPY_ASSERTS"
    void arenapy_assert(bint condition, const char* promise) noexcept nogil
