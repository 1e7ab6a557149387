# cython: language_level=3, freethreading_compatible=True
"""glibc's malloc keeps the memory that is freed, as long as somebody wants that.

By itself it maps blocks of up to 32 MiB until it has learned otherwise, and larger ones always, and
unmaps them when they are freed; it also gives back what lies at the end of its heap. All of that is
faulted in anew. `mallopt` ends it:

- M_MMAP_MAX 0: all blocks come from a heap. (M_MMAP_THRESHOLD has a limit of 32 MiB in older
  versions, and an int's everywhere.) The heap of a thread ends at 64 MiB: what does not fit is
  mapped still.
- M_TRIM_THRESHOLD -1: no heap is cut.
- M_TOP_PAD 64 MiB: the heap grows rarely; and because no heap of a thread is larger, none that is
  free is unmapped.

Any of these calls ends, for good, that glibc adapts its thresholds, and none tells what was in
force before. So the end is the state that glibc comes to by itself when a block of 32 MiB was
freed, the largest that it learns from. Memory kept until then goes back as glibc finds it at the
end of a heap, or by `malloc_trim`, which is not called here: it would also give back what any
program keeps.

mallopt cannot ask for huge pages; GLIBC_TUNABLES does (commands/run/command.py).

Thread-safety: every function may be called from any thread.
"""
cimport cython

cdef extern from * nogil:
    """
    #include <dlfcn.h>
    #include <link.h>

    enum {                              /* of glibc's <malloc.h>, which others do not have */
        ARENAPY_TRIM_THRESHOLD = -1, ARENAPY_TOP_PAD = -2,
        ARENAPY_MMAP_THRESHOLD = -3, ARENAPY_MMAP_MAX = -4
    };
    typedef int (*arenapy_mallopt_type)(int, int);

    /* Says in which object a function is; 0: nobody knows. An executable at a fixed address, as
       Debian's python3 is, has a stub of each function whose address it takes. dlsym finds that. */
    static int arenapy_whereabouts(const char *name, Dl_info *info) {
        void *at = dlsym(RTLD_DEFAULT, name);
        if (at == NULL) return 0;
    #ifdef __GLIBC__
        ElfW(Sym) *symbol = NULL;
        return dladdr1(at, info, (void **)&symbol, RTLD_DL_SYMENT) != 0
            && symbol != NULL && symbol->st_shndx != SHN_UNDEF;
    #else
        return dladdr(at, info);
    #endif
    }

    /* glibc's mallopt, if malloc is glibc's own: another one may be linked or preloaded. `*file` is
       where what is not glibc's is, or NULL. Where malloc has a stub, its companions are asked. */
    static arenapy_mallopt_type arenapy_find_mallopt(const char **file) {
        static const char *const names[] = {
            "mallopt", "malloc", "malloc_usable_size", "calloc", "realloc", "free"
        };
        Dl_info found, of_glibc;
        int i, known = 0;
        *file = NULL;
        if (!arenapy_whereabouts("gnu_get_libc_version", &of_glibc)) return NULL;
        for (i = 0; i < 6; i++) {
            if (!arenapy_whereabouts(names[i], &found)) continue;
            *file = found.dli_fname;
            if (found.dli_fbase != of_glibc.dli_fbase) return NULL;
            known |= i > 0;
            if (i == 1) break;              /* it is malloc itself */
        }
        return known ? (arenapy_mallopt_type)dlsym(RTLD_DEFAULT, "mallopt") : NULL;
    }
    """
    ctypedef int (*mallopt_type "arenapy_mallopt_type")(int, int)
    const int TRIM_THRESHOLD "ARENAPY_TRIM_THRESHOLD"
    const int TOP_PAD "ARENAPY_TOP_PAD"
    const int MMAP_THRESHOLD "ARENAPY_MMAP_THRESHOLD"
    const int MMAP_MAX "ARENAPY_MMAP_MAX"
    mallopt_type find_mallopt "arenapy_find_mallopt" (const char** file)

cdef enum:
    MIB = 1 << 20

cdef const char* file = NULL
cdef mallopt_type mallopt = find_mallopt(&file)
cdef Py_ssize_t count = 0        # of those who want it kept
cdef object guard = object()     # of `count` and what it stands for, where there is no GIL


def foreign_malloc():
    """The file that malloc is in; None if it is glibc's own, so that `keep` has an effect."""
    if mallopt != NULL:
        return None
    return "unknown" if file == NULL else (<bytes>file).decode(errors="replace")


def keepers():
    """How many want memory kept."""
    return count


cdef int keep() except -1:
    global count
    with cython.critical_section(guard):
        count += 1
        if count == 1 and mallopt != NULL:
            mallopt(MMAP_MAX, 0)
            mallopt(TRIM_THRESHOLD, -1)
            mallopt(TOP_PAD, 64 * MIB)
    return 0


cdef int keep_no_more() except -1:
    global count
    with cython.critical_section(guard):
        count -= 1
        if count == 0 and mallopt != NULL:
            mallopt(MMAP_MAX, 65536)             # glibc's default
            mallopt(MMAP_THRESHOLD, 32 * MIB)    # what it adapts to at most
            mallopt(TRIM_THRESHOLD, 64 * MIB)    # and with it
            mallopt(TOP_PAD, 128 * 1024)         # its default
    return 0
