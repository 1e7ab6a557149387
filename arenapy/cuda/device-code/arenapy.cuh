// Memory that kernels allocate from while they run: the device side of arenapy.cuda.KernelArena and
// arenapy.cuda.KernelSlab, whose `address` a kernel takes as arenapy::arena* and arenapy::slab*.
//
// For NVRTC and nvcc, compute capability 7.0 and newer. It includes nothing.
//
// Any threads may call any of these functions, in any control flow. The threads of a warp that call
// together share one atomic operation. (A. Adinetz, "CUDA Pro Tip: Optimized Filtering with
// Warp-Aggregated Atomics", 2014.)
#pragma once

namespace arenapy {

typedef unsigned int u32;
typedef unsigned long long u64;

// Counters that kernels write have a cache line of their own. The host writes the rest, and makes
// these structs in Python: see arenapy/cuda/kernel_memory.py.
struct arena {
    u64 size;          // bytes of the memory, which follows this struct
    u64 unused[15];
    u64 used;          // bytes; more than `size` once a request was refused
    u64 overflowed;    // requests that were refused, since they did not fit
    u64 misused;       // those with an alignment that is not a power of two
    u64 unused2[13];
};

struct slab {
    u64 stride;        // bytes from one item to the next
    u64 count;         // items
    u64 first;         // bytes from this struct to the first item
    u64 words;         // of the bitmap, which follows this struct: a bit is set while its item is in
    u64 unused[12];    // use, and for good where there is no item
    long long vacant;  // items that nobody has been promised; for a moment less than 0
    u64 overflowed;    // requests that were refused, since all items were in use
    u64 misused;       // items given back that were not in use, and pointers to no item
    u64 unused2[13];
};

namespace detail {

const u32 WARP = 0xffffffff;

__device__ __forceinline__ u32 lane() {
    u32 lane;
    asm("mov.u32 %0, %%laneid;" : "=r"(lane));
    return lane;
}

// The sum of `n` over the lanes of a warp before this one, and over all of them.
__device__ __forceinline__ u64 sum_before(u64 n, u64* all) {
    int same;
    __match_all_sync(WARP, n, &same);
    if (same) {
        *all = n * 32;
        return n * lane();
    }
    u64 sum = n;
    for (u32 step = 1; step < 32; step *= 2) {
        u64 theirs = __shfl_up_sync(WARP, sum, step);
        if (lane() >= step) sum += theirs;
    }
    *all = __shfl_sync(WARP, sum, 31);
    return sum - n;
}

// The k-th set bit of a word, from 0.
__device__ __forceinline__ u32 nth_bit(u32 word, u32 k) {
    for (; k; k--) word &= word - 1;
    return __ffs(word) - 1;
}

// The lowest k set bits of a word; it has as many.
__device__ __forceinline__ u32 lowest_bits(u32 word, u32 k) {
    u32 rest = word;
    for (; k; k--) rest &= rest - 1;
    return word & ~rest;
}

// A place to begin that differs from warp to warp.
__device__ __forceinline__ u64 spot(u64 words) {
    u64 block = blockIdx.x + (u64)gridDim.x * (blockIdx.y + (u64)gridDim.y * blockIdx.z);
    u64 thread = threadIdx.x + blockDim.x * (threadIdx.y + (u64)blockDim.y * threadIdx.z);
    u64 warp = (block * blockDim.x * blockDim.y * blockDim.z + thread) / 32;
    return warp * 0x9E3779B97F4A7C15ull % words;
}

// A promise of up to `wanted` items, so that the search for them ends: there are as many clear bits
// as items are promised.
__device__ __forceinline__ u32 promised(slab* s, u32 wanted) {
    u32 granted = 0;
    if (*(volatile long long*)&s->vacant > 0) {
        long long left = (long long)atomicAdd((u64*)&s->vacant, (u64)0 - wanted);
        granted = left <= 0 ? 0 : left < wanted ? (u32)left : wanted;
        if (granted < wanted) atomicAdd((u64*)&s->vacant, (u64)(wanted - granted));
    }
    if (granted < wanted) atomicAdd(&s->overflowed, (u64)(wanted - granted));
    return granted;
}

// An item for each of the first lanes of a warp, as many as are granted.
__device__ __forceinline__ u64 find_for_warp(slab* s, u32 granted) {
    u32* const bitmap = (u32*)(s + 1);
    const u64 words = s->words;
    u64 index = 0, at = spot(words);
    u32 done = 0;
    while (done < granted) {                   // each lane looks at a word; few words are enough
        u64 word = (at + lane()) % words, all;
        u32 vacant = lane() < words ? ~*(volatile u32*)&bitmap[word] : 0, got = 0;
        u64 earlier = sum_before(__popc(vacant), &all);
        u32 needed = granted - done;
        if (vacant && earlier < needed) {
            u32 most = needed - (u32)earlier, have = __popc(vacant);
            u32 bits = lowest_bits(vacant, most < have ? most : have);
            got = bits & ~atomicOr(&bitmap[word], bits);
        }
        for (u32 left = __ballot_sync(WARP, got != 0); left; left &= left - 1) {
            u32 from = __ffs(left) - 1, bits = __shfl_sync(WARP, got, from), n = __popc(bits);
            u64 theirs = __shfl_sync(WARP, word, from);
            if (lane() >= done && lane() - done < n)
                index = 32 * theirs + nth_bit(bits, lane() - done);
            done += n;
        }
        at = (at + 32) % words;
    }
    return index;
}

// An item, which is granted.
__device__ __forceinline__ u64 find_one(slab* s) {
    u32* const bitmap = (u32*)(s + 1);
    const u64 words = s->words;
    for (u64 word = (spot(words) + lane()) % words;; word = word + 1 == words ? 0 : word + 1) {
        u32 vacant = ~*(volatile u32*)&bitmap[word];
        if (vacant && (vacant & -vacant & ~atomicOr(&bitmap[word], vacant & -vacant)))
            return 32 * word + __ffs(vacant) - 1;
    }
}

}  // namespace detail

// Threads of a warp share an atomic operation if all 32 of them call together. Otherwise each makes
// its own: parts of a warp may be in one function at the same time, and a vote of one part counts
// the lanes of the other.

// `bytes` bytes at a multiple of `align`, a power of two; at least of 16. NULL: they do not fit. The
// memory is valid until the host resets the arena; there is no free.
__device__ __forceinline__ void* arena_alloc(arena* a, u64 bytes, u64 align = 16) {
    const u64 size = a->size;
    const bool bad = align == 0 || (align & (align - 1));
    u64 want = 0, all = 0, at = 0;
    if (!bad && bytes <= size && align <= size) {
        want = (bytes + (bytes == 0) + 15) & ~15ull;
        if (align > 16) want += align - 16;    // wherever it begins, an aligned address is inside
        if (want > size) want = 0;
    }
    if (__activemask() == detail::WARP) {
        const u64 before = detail::sum_before(want, &all);
        if (all && detail::lane() == 0) at = atomicAdd(&a->used, all);
        at = __shfl_sync(detail::WARP, at, 0);
        if (at > size && detail::lane() == 0) atomicMin(&a->used, size);
        at += before;
    } else if (want) {
        at = atomicAdd(&a->used, want);
        if (at > size) atomicMin(&a->used, size);    // still full, and it does not grow for ever
    }
    if (!want || at > size || want > size - at) {
        atomicAdd(bad ? &a->misused : &a->overflowed, 1);
        return nullptr;
    }
    u64 address = (u64)(a + 1) + at;
    if (align > 16) address = (address + align - 1) & ~(align - 1);
    return (void*)address;
}

// An item. NULL: all are in use. What was written to it before it was given back is over.
__device__ __forceinline__ void* slab_alloc(slab* s) {
    u64 index = 0;
    bool has;
    if (__activemask() == detail::WARP) {
        u32 granted = detail::lane() == 0 ? detail::promised(s, 32) : 0;
        granted = __shfl_sync(detail::WARP, granted, 0);
        has = detail::lane() < granted;
        index = detail::find_for_warp(s, granted);
    } else {
        has = detail::promised(s, 1);
        if (has) index = detail::find_one(s);
    }
    if (!has) return nullptr;
    __threadfence();                           // after all that was written before slab_free
    return (char*)s + s->first + index * s->stride;
}

// Give an item back, which any thread may do, in the same kernel or a later one. NULL is ignored. A
// pointer that is not an item, or one that is not in use, is counted and ignored.
__device__ __forceinline__ void slab_free(slab* s, void* item) {
    u32* const bitmap = (u32*)(s + 1);
    const u64 offset = (u64)item - ((u64)s + s->first);
    const u64 index = offset / s->stride;
    const bool bad = (u64)item < (u64)s + s->first || index >= s->count || offset % s->stride;
    const u32 bit = 1u << index % 32;
    u32 freed = 0;
    __threadfence();                           // before another thread gets the item
    if (!bad && item) freed = (atomicAnd(&bitmap[index / 32], ~bit) & bit) != 0;
    if (item && !freed) atomicAdd(&s->misused, 1);
    if (__activemask() == detail::WARP) {
        freed = __popc(__ballot_sync(detail::WARP, freed));
        if (detail::lane()) freed = 0;
    }
    if (freed) atomicAdd((u64*)&s->vacant, (u64)freed);
}

}  // namespace arenapy
