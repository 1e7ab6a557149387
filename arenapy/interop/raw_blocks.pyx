"""Blocks of device Pools for a library that allocates by C functions of size, device and stream.

What lives here: the C functions, and which Pool and which stream's blocks a call means. What does
not: whose functions a library calls (torch), what is free (pool), streams (cuda). RMM calls Python
functions, which are here so that they are compiled (`rmm_callbacks`).

The quick way has neither Buffers nor the GIL. A `Route` says whose blocks a stream of a device has:
those of the Pool's own stream come from the thread's cache, those of another one from its
StreamCache. A route is published once and never changes, so threads read it without a lock. It
exists if the stream is known to exist as long as the process, as torch's own streams do.

The other way takes the GIL and asks the Pool for a Buffer: without a route, if the cache has no
block, while a graph is captured, and if the Pool is off its fast path. A Buffer of a stream with a
route then gives its block up to the quick way. Any other Buffer is kept by address until the
library frees it (`special`).

The process keeps every Pool that was named here: a library frees blocks until it ends.
"""
cimport cython
from cpython.object cimport PyObject
from libc.stdint cimport uint64_t, uintptr_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy

from arenapy.allocator.allocator cimport raise_later
from arenapy.base.atomic cimport (
    arenapy_add, arenapy_count, arenapy_finalizing, arenapy_load, arenapy_load_ptr,
    arenapy_store_ptr, arenapy_sub, likely,
)
from arenapy.base.dicts cimport found_in
from arenapy.base.sizes cimport MAX_BYTES, SMALL_MOST
from arenapy.buffer.block cimport (
    CLOSED, GONE_FORKED, Block, Hold, MemoryOwner, note_use,
)
from arenapy.buffer.buffer cimport Buffer
from arenapy.cuda.fence cimport GraphFence, graph_fence_or_never
from arenapy.cuda.ordering cimport finished_uses
from arenapy.cuda.stream_ref cimport StreamRef
from arenapy.pool.core cimport PoolCore
from arenapy.pool.hot_path cimport cache_alloc
from arenapy.pool.page_heap cimport PAGE_BITS
from arenapy.pool.pool cimport Pool
from arenapy.pool.stream_cache cimport StreamCache

import sys
import threading

cdef extern from "Python.h":
    void PyErr_Fetch(PyObject**, PyObject**, PyObject**) noexcept
    void PyErr_Restore(PyObject*, PyObject*, PyObject*) noexcept
    void count_up "Py_INCREF" (PyObject* o) noexcept

cdef extern from *:
    """
    #ifndef _GNU_SOURCE
    #define _GNU_SOURCE
    #endif
    #include <dlfcn.h>
    #include <stdint.h>
    #include <stdio.h>
    #include <stdlib.h>
    #include <string.h>
    #include <sys/types.h>

    /* Why there is no block: raises in the library, as it says; or returns, if it cannot. */
    typedef void (*arenapy_raiser)(const char *message, int out_of_memory);
    static arenapy_raiser arenapy_raise;
    static void *(*arenapy_raw_alloc)(size_t, int, void *, char **, int *);
    static void (*arenapy_raw_free)(void *, int, void *);
    static void (*arenapy_raw_record)(void *, void *);
    static void (*arenapy_raw_trim)(void);
    static uint64_t arenapy_captures;    /* atomic: graphs that are being captured */

    #define ARENAPY_EXPORT __attribute__((visibility("default"), used))
    ARENAPY_EXPORT void *arenapy_interop_alloc(ssize_t nbytes, int device, void *stream) {
        char *message = NULL, text[1024];
        int out_of_memory = 0;
        void *block;
        if (nbytes <= 0) return NULL;
        block = arenapy_raw_alloc((size_t)nbytes, device, stream, &message, &out_of_memory);
        if (block) return block;
        /* No frame of Cython's is between this and the caller: a C++ exception may pass. */
        snprintf(text, sizeof text, "%s", message ? message : "arenapy: no memory");
        free(message);
        if (arenapy_raise) arenapy_raise(text, out_of_memory);
        fprintf(stderr, "arenapy: %s\\n", text);
        return NULL;
    }
    ARENAPY_EXPORT void arenapy_interop_free(void *block, ssize_t nbytes, int device, void *stream)
    {
        (void)nbytes;
        if (block) arenapy_raw_free(block, device, stream);
    }
    ARENAPY_EXPORT void arenapy_interop_record_stream(void *block, void *stream) {
        if (block) arenapy_raw_record(block, stream);
    }
    ARENAPY_EXPORT void arenapy_interop_trim(void) { arenapy_raw_trim(); }
    /* torch passes what follows `device` by value, in registers; it is not looked at. */
    ARENAPY_EXPORT void arenapy_interop_capture_begins(int device) {
        (void)device;
        __atomic_fetch_add(&arenapy_captures, 1, __ATOMIC_ACQ_REL);
    }
    ARENAPY_EXPORT void arenapy_interop_capture_ends(int device) {
        (void)device;
        __atomic_fetch_sub(&arenapy_captures, 1, __ATOMIC_ACQ_REL);
    }

    static uintptr_t arenapy_exported(const char *name) {
        if (!strcmp(name, "alloc")) return (uintptr_t)arenapy_interop_alloc;
        if (!strcmp(name, "free")) return (uintptr_t)arenapy_interop_free;
        if (!strcmp(name, "record_stream")) return (uintptr_t)arenapy_interop_record_stream;
        if (!strcmp(name, "trim")) return (uintptr_t)arenapy_interop_trim;
        if (!strcmp(name, "capture_begins")) return (uintptr_t)arenapy_interop_capture_begins;
        if (!strcmp(name, "capture_ends")) return (uintptr_t)arenapy_interop_capture_ends;
        return 0;
    }

    /* torch's exceptions, thrown from C. Its library has the constructor of c10::Error, which takes
       a std::string, and the type OutOfMemoryError, which adds nothing to that. */
    struct arenapy_string { char *at; size_t n; union { char here[16]; size_t room; } small; };
    struct arenapy_place { const char *function, *file; uint32_t line; };
    static void (*arenapy_check_fail)(const char *, const char *, uint32_t, const char *);
    static void (*arenapy_error)(void *, struct arenapy_place, struct arenapy_string *);
    static void (*arenapy_error_end)(void *);
    static void *(*arenapy_new)(size_t);
    static void *(*arenapy_exception)(size_t);
    static void (*arenapy_throw)(void *, void *, void (*)(void *));
    static void *arenapy_oom_type;
    static char *arenapy_oom_table;
    static void arenapy_raise_in_torch(const char *message, int out_of_memory) {
        if (out_of_memory && arenapy_oom_type) {
            struct arenapy_place place = {"alloc", "arenapy", 0};
            struct arenapy_string text = {NULL, strlen(message), {{0}}};
            /* More than any c10::Error has had so far (about 200 bytes). */
            void **error = (void **)arenapy_exception(1024);
            text.at = (char *)arenapy_new(text.n + 1);
            text.small.room = text.n;
            memcpy(text.at, message, text.n + 1);
            arenapy_error(error, place, &text);  /* which has taken the text's memory over */
            error[0] = arenapy_oom_table + 2 * sizeof(void *);
            arenapy_throw(error, arenapy_oom_type, arenapy_error_end);
        }
        arenapy_check_fail("alloc", "arenapy", 0, message);
    }
    /* 0: torch's library has not what it takes. */
    static int arenapy_find_torch(const char *c10, const char *c10_cuda) {
        void *base = dlopen(c10, RTLD_NOLOAD | RTLD_LAZY);
        void *cuda = dlopen(c10_cuda, RTLD_NOLOAD | RTLD_LAZY);
        if (!base) return 0;
        *(void **)&arenapy_check_fail = dlsym(base, "_ZN3c106detail14torchCheckFailEPKcS2_jS2_");
        *(void **)&arenapy_error = dlsym(base,
            "_ZN3c105ErrorC1ENS_14SourceLocationENSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE");
        *(void **)&arenapy_new = dlsym(base, "_Znwm");
        *(void **)&arenapy_exception = dlsym(base, "__cxa_allocate_exception");
        *(void **)&arenapy_throw = dlsym(base, "__cxa_throw");
        if (cuda) {
            arenapy_oom_table = dlsym(cuda, "_ZTVN3c1016OutOfMemoryErrorE");
            arenapy_oom_type = dlsym(cuda, "_ZTIN3c1016OutOfMemoryErrorE");
        }
        if (arenapy_oom_table)           /* its complete destructor */
            *(void **)&arenapy_error_end = ((void **)arenapy_oom_table)[2];
        if (!arenapy_error || !arenapy_new || !arenapy_exception || !arenapy_throw
                || !arenapy_oom_table)
            arenapy_oom_type = NULL;
        if (!arenapy_check_fail) return 0;
        arenapy_raise = arenapy_raise_in_torch;
        return 1;
    }
    """
    void* (*arenapy_raw_alloc)(size_t, int, void*, char**, int*) noexcept nogil
    void (*arenapy_raw_free)(void*, int, void*) noexcept nogil
    void (*arenapy_raw_record)(void*, void*) noexcept nogil
    void (*arenapy_raw_trim)() noexcept nogil
    uint64_t arenapy_captures
    uintptr_t exported "arenapy_exported" (const char* name) noexcept
    bint arenapy_find_torch(const char* c10, const char* c10_cuda) noexcept

cdef enum:
    ROUTES = 256             # of streams; others take the other way every time
    PER_THREAD = 2           # the handle of the default stream of each thread
    MANY_USES = 16           # of a block: each time it has so many more, those that are over go

cdef struct Route:
    void* stream
    int device
    PyObject* core           # the Pool's PoolCore, and the StreamCache or NULL: its own stream;
    PyObject* cache          # the process keeps both

cdef void* routes[ROUTES]    # Route*: by hash, then in order; NULL ends the search
cdef dict pools = {}         # by ordinal of the device
cdef dict special = {}       # Buffers of blocks that the library has, by address
cdef dict told = {}          # by address: what else uses such a block, as the hooks name it
cdef uint64_t n_special = 0  # atomic: in `special` and `told` together
cdef object stream_named = None      # (device, handle) -> what the handle names
cdef dict most_reserved = {}  # by ordinal: the peak of the Pool's reserved bytes
cdef dict refusals = {}      # by ordinal: requests that did not fit
adding = threading.Lock()    # held while a route is added
cdef object telling = []     # whose critical section guards these: no code of Python's runs in it


cdef inline uint64_t first_place(int device, void* stream) noexcept nogil:
    return (<uint64_t><uintptr_t>stream + <uint64_t>device) * 0x9E3779B97F4A7C15ULL >> 56


cdef inline Route* route_of(int device, void* stream) noexcept nogil:
    cdef uint64_t at = first_place(device, stream)
    cdef Route* route
    cdef int i
    for i in range(ROUTES):
        route = <Route*>arenapy_load_ptr(&routes[(at + <uint64_t>i) % ROUTES])
        if route == NULL or (route.stream == stream and route.device == device):
            return route
    return NULL


cdef int add_route(Pool pool, int device, void* stream, MemoryOwner owner) except -1:
    """The same one again if two threads add it at once."""
    cdef uint64_t at = first_place(device, stream)
    cdef Route* route
    cdef int i
    with adding:
        if route_of(device, stream) != NULL:
            return 0
        for i in range(ROUTES):
            if routes[(at + <uint64_t>i) % ROUTES] != NULL:
                continue
            route = <Route*>malloc(sizeof(Route))
            if route == NULL:
                raise MemoryError("no memory for the route of a stream")
            route.stream, route.device = stream, device
            route.core = <PyObject*>pool.core
            route.cache = NULL if owner is pool.core else <PyObject*>owner
            count_up(route.core)
            if route.cache != NULL:
                count_up(route.cache)
            arenapy_store_ptr(&routes[(at + <uint64_t>i) % ROUTES], route)
            return 0
    return 0


# -- allocation

cdef void* raw_alloc(
    size_t n, int device, void* stream, char** message, int* out_of_memory
) noexcept nogil:
    cdef Route* route = route_of(device, stream)
    cdef uint64_t block_id
    cdef char* ptr = NULL
    if likely(route != NULL and n <= MAX_BYTES and not arenapy_load(&arenapy_captures)
              and not (<PoolCore>route.core).fast_path_off):
        if route.cache == NULL:
            # Threads free each other's: a backward pass what the forward pass has made.
            if n > SMALL_MOST:
                ptr = (<PoolCore>route.core).uncached_alloc(n, &block_id)
            else:
                ptr = cache_alloc(<PoolCore>route.core, n, False, &block_id)
                if ptr == NULL:
                    ptr = (<PoolCore>route.core).alloc_block(
                        n, (<PoolCore>route.core).block_align, False, &block_id)
        else:
            ptr = (<StreamCache>route.cache).pop(
                n, (<PoolCore>route.core).block_align, &block_id)
        if likely(ptr != NULL):
            return ptr
    if arenapy_finalizing():
        return NULL
    return general_alloc(n, device, stream, message, out_of_memory)


cdef void* general_alloc(
    size_t n, int device, void* stream, char** message, int* out_of_memory
) noexcept with gil:
    cdef PyObject* pending[3]                # the library may be called amid an exception
    cdef void* ptr = NULL
    cdef bytes text
    PyErr_Fetch(&pending[0], &pending[1], &pending[2])
    try:
        ptr = block_of(n, device, stream)
    except BaseException as error:
        out_of_memory[0] = isinstance(error, MemoryError)
        if out_of_memory[0]:
            with cython.critical_section(telling):
                refusals[device] = (found_in(refusals, device) or 0) + 1
        text = (str(error) or repr(error)).encode(errors="replace")
        message[0] = <char*>malloc(len(text) + 1)
        if message[0] != NULL:
            memcpy(message[0], <const char*>text, len(text) + 1)
        also_raise(error)
    PyErr_Restore(pending[0], pending[1], pending[2])
    return ptr


cdef void* block_of(size_t n, int device, void* stream) except NULL:
    cdef Pool pool = found_in(pools, device)
    cdef Buffer block
    cdef MemoryOwner owner
    if pool is None:
        raise RuntimeError(
            f"no pool was given for device {device}, only for {sorted(pools)}; give one for each "
            "device that the program uses"
        )
    name = stream_named(device, <uintptr_t>stream)
    block = pool.alloc(n, stream=name)
    note_reserved(device, pool)              # a pool grows only here
    if route_of(device, stream) == NULL:
        user = pool.streams.owner_of(name)
        if <uintptr_t>stream != PER_THREAD and isinstance(user, MemoryOwner):
            add_route(pool, device, stream, <MemoryOwner>user)
    owner = owner_for(device, stream)
    ptr = block.ptr
    if owner is (<Block>block).owner and (<Block>block).hold == NULL:
        block.tag = 0                        # so that its end gives nothing back
        block.word |= CLOSED
    else:
        special[<uintptr_t>ptr] = block
        arenapy_add(&n_special, 1)
    return <void*>ptr


cdef int note_reserved(int device, Pool pool) except -1:
    cdef size_t now = pool.core.reserved_pages << PAGE_BITS
    with cython.critical_section(telling):
        if now > <size_t>(found_in(most_reserved, device) or 0):
            most_reserved[device] = now
    return 0


cdef MemoryOwner owner_for(int device, void* stream):
    """Whose blocks a stream has; None: it has no route."""
    cdef Route* route = route_of(device, stream)
    if route == NULL:
        return None
    return <MemoryOwner>(route.core if route.cache == NULL else route.cache)


# -- and back

cdef void raw_free(void* block, int device, void* stream) noexcept nogil:
    cdef Route* route
    cdef PyObject* core
    cdef uint64_t block_id
    if arenapy_load(&n_special):
        if arenapy_finalizing():
            return
        if free_special(block, device, stream):
            return
    route = route_of(device, stream)
    if route == NULL:
        refuse(block, NULL)
        return
    core = route.core
    if route.cache == NULL:
        if not (likely(not (<PoolCore>core).fast_path_off)
                and (<PoolCore>core).uncached_free_at(<char*>block)
                or (<PoolCore>core).free_block_at(<char*>block)):
            refuse(block, core)
        return
    block_id = (<PoolCore>core).find(<char*>block)
    if block_id == 0:
        refuse(block, core)
        return
    (<StreamCache>route.cache).take_back(<char*>block, block_id)


cdef void refuse(void* block, PyObject* core) noexcept nogil:
    # In a forked child, an inherited block is the parent's. Dropping it there is no mistake.
    cdef bint parents = core != NULL and (<PoolCore>core).gone == GONE_FORKED
    if not parents and not arenapy_finalizing():
        say_refused(<uintptr_t>block)


cdef void say_refused(uintptr_t block) noexcept with gil:
    print(f"arenapy: {block:#x} is not a live block of a pool in use; it was not freed",
          file=sys.stderr)


cdef bint free_special(void* block, int device, void* stream) noexcept with gil:
    """False: nothing is to be known of this block but what its route says."""
    cdef PyObject* pending[3]                # the library may be called amid an exception
    cdef bint done = True
    PyErr_Fetch(&pending[0], &pending[1], &pending[2])
    try:
        done = freed_special(<uintptr_t>block, device, stream)
    except BaseException as error:
        # It is never free again, which is safe.
        print(f"arenapy: the block at {<uintptr_t>block:#x} stays allocated: {error!r}",
              file=sys.stderr)
        also_raise(error)
    PyErr_Restore(pending[0], pending[1], pending[2])
    return done


cdef bint freed_special(uintptr_t at, int device, void* stream) except -1:
    cdef MemoryOwner owner
    cdef PoolCore core
    cdef Hold* hold
    cdef list uses
    if at in special:
        block = special.pop(at)
        arenapy_sub(&n_special, 1)
        block.release()                      # it knows its stream
        return True
    if at not in told:
        return False
    owner = owner_for(device, stream)
    core = <PoolCore>(route_of(device, stream).core)
    hold = <Hold*>malloc(sizeof(Hold))
    if hold == NULL:
        raise MemoryError("no memory for the record of a stream's block")
    with cython.critical_section(telling):
        uses = told.pop(at)                  # and its own stream's order is enough
    arenapy_sub(&n_special, 1)
    hold.start = at
    hold.tag = core.find(<char*>at)
    hold.end = at + core.size_of(hold.tag)
    hold.pad = hold.flags = 0
    hold.uses = <PyObject*>uses
    count_up(hold.uses)
    if owner.defer_free(hold):
        owner.hooks.defer_hold(<PyObject*>owner, hold)
    return True


cdef void raw_record(void* block, void* stream) noexcept nogil:
    if not arenapy_finalizing():
        record_use(<uintptr_t>block, stream)


cdef void record_use(uintptr_t at, void* stream) noexcept with gil:
    cdef PyObject* pending[3]                # the library may be called amid an exception
    cdef Pool pool
    PyErr_Fetch(&pending[0], &pending[1], &pending[2])
    try:
        for device, pool in pools.items():
            if not pool.core.find(<char*>at):
                continue
            name = stream_named(device, <uintptr_t>stream)
            if at in special:
                special[at].record_stream(name)
                break
            use = pool.core.hooks.named(name)
            # As `Ordering.use`, without a Block. A graph that cannot be followed is for ever.
            uses = [graph_fence_or_never(<StreamRef>use)] if (<StreamRef>use).captures() else []
            uses.append(use)
            add_uses(at, uses)
            break
    except BaseException as error:
        # Nobody knows who uses it, so it is never free again.
        if at in special:
            note_use(<Block>special[at], GraphFence.__new__(GraphFence))
        else:
            add_uses(at, [GraphFence.__new__(GraphFence)])
        print(f"arenapy: record_stream of the block at {at:#x} failed: {error!r}",
              file=sys.stderr)
        also_raise(error)
    PyErr_Restore(pending[0], pending[1], pending[2])


cdef int add_uses(uintptr_t at, list uses) except -1:
    cdef list known, now, over = [], instead = []
    # Nobody changes a list that is in `told`: other threads name streams of the block, too.
    with cython.critical_section(telling):
        known = found_in(told, at)
        if known is None:
            known = []
            arenapy_add(&n_special, 1)
        now = known + [one for one in uses if one not in known]
        told[at] = now
    if len(now) // MANY_USES > len(known) // MANY_USES:
        finished_uses(now, len(now), over, instead)
        with cython.critical_section(telling):
            known = found_in(told, at)
            if known is not None:
                told[at] = [one for one in known if one not in over] + [
                    one for one in instead if one not in known]
    return 0


cdef void raw_trim() noexcept nogil:
    if not arenapy_finalizing():
        trim_all()


cdef void trim_all() noexcept with gil:
    for pool in pools.copy().values():
        try:
            pool.trim()
        except BaseException as error:
            print(f"arenapy: a pool could not give memory back: {error!r}", file=sys.stderr)
            also_raise(error)


cdef void also_raise(object error) noexcept:
    """The library cannot raise it: what a signal's handler raises, Python will have."""
    if not isinstance(error, Exception):
        raise_later(error)


arenapy_raw_alloc, arenapy_raw_free = raw_alloc, raw_free
arenapy_raw_record, arenapy_raw_trim = raw_record, raw_trim


# -- for the modules of each library

def pools_in_use():
    """The Pools that C functions allocate from, by ordinal of the device."""
    return dict(pools)


def counts(int device):
    """The peak of a Pool's reserved bytes, as far as it was seen, and requests that did not fit."""
    cdef Pool pool = found_in(pools, device)
    if pool is not None:
        note_reserved(device, pool)
    return found_in(most_reserved, device) or 0, found_in(refusals, device) or 0


def restart_peak(int device):
    """Let the peak of the reserved bytes begin anew."""
    most_reserved.pop(device, None)


def serve(dict by_device not None, named):
    """Allocate from these Pools. `named` is (device, handle) -> what names the stream."""
    global stream_named
    stream_named = named
    for device, pool in by_device.items():
        # Regions stay open, whatever happens to the Pool: nobody counts the blocks.
        arenapy_count(&(<Pool?>pool).core.n_held, 1)
        count_up(<PyObject*>pool)
        pools[device] = pool


def withdraw(dict by_device not None):
    """Undo `serve`. No block may be out, and no other thread may be in a call."""
    cdef int i
    for device, pool in by_device.items():
        arenapy_count(&(<Pool?>pool).core.n_held, -1)
        del pools[device]
    for i in range(ROUTES):
        free(routes[i])                      # what it kept is kept
        arenapy_store_ptr(&routes[i], NULL)


def rmm_callbacks(Pool pool not None, int default):
    """What allocates and what frees for RMM, by objects that name a stream, or 0 for `default`.

    Compiled: no signal's exception comes between taking a block out of what is kept and freeing it,
    which would free it in the order of the stream that it was allocated for.
    """
    cdef dict blocks = {}                    # the live ones, by address

    def allocate(nbytes, stream):
        cdef Buffer block = pool.alloc(nbytes, stream=stream.__cuda_stream__()[1] or default)
        blocks[<uintptr_t>block.ptr] = block
        return <uintptr_t>block.ptr

    def deallocate(address, nbytes, stream):
        block = blocks.pop(address)          # before others can be given its address
        try:
            block.release(stream.__cuda_stream__()[1] or default)
        except BaseException:
            blocks[address] = block          # it was not released, and may be in use
            raise

    return allocate, deallocate


def raise_as_torch(c10, c10_cuda):
    """Raise torch's exceptions; False: this torch does not have what that takes."""
    return arenapy_find_torch(c10.encode(), c10_cuda.encode())


def device_of(Pool pool not None):
    """The ordinal of the device that a Pool's memory is on."""
    return pool.core.device_id


def address(str name not None):
    """The address of one of the C functions."""
    return exported(name.encode())
