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

__device__ __forceinline__ u32 lane() {
    u32 lane;
    asm("mov.u32 %0, %%laneid;" : "=r"(lane));
    return lane;
}

// Lanes of `mask` before this one.
__device__ __forceinline__ u32 before(u32 mask) { return mask & ((1u << lane()) - 1); }

__device__ __forceinline__ u32 leader(u32 mask) { return __ffs(mask) - 1; }

// Adds how many threads of `mask` say so.
__device__ __forceinline__ void count(u32 mask, bool one, u64* counter) {
    u32 ones = __ballot_sync(mask, one);
    if (ones && lane() == leader(mask)) atomicAdd(counter, (u64)__popc(ones));
}

// The sum of `n` over the lanes of `mask` before this one, and over all of them.
__device__ __forceinline__ u64 sum_before(u32 mask, u64 n, u64* all) {
    int same;
    __match_all_sync(mask, n, &same);
    if (same) {
        *all = n * __popc(mask);
        return n * __popc(before(mask));
    }
    if (mask == 0xffffffff) {
        u64 sum = n;
        for (u32 step = 1; step < 32; step *= 2) {
            u64 theirs = __shfl_up_sync(mask, sum, step);
            if (lane() >= step) sum += theirs;
        }
        *all = __shfl_sync(mask, sum, 31);
        return sum - n;
    }
    u64 sum = 0, mine = 0;
    for (u32 left = mask; left; left &= left - 1) {
        u32 from = __ffs(left) - 1;
        if (from == lane()) mine = sum;
        sum += __shfl_sync(mask, n, from);
    }
    *all = sum;
    return mine;
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

}  // namespace detail

// `bytes` bytes at a multiple of `align`, a power of two; at least of 16. NULL: they do not fit. The
// memory is valid until the host resets the arena; there is no free.
__device__ __forceinline__ void* arena_alloc(arena* a, u64 bytes, u64 align = 16) {
    const u32 mask = __activemask();
    const u64 size = a->size;
    const bool bad = align == 0 || (align & (align - 1));
    u64 want = 0, all, at = 0;
    if (!bad && bytes <= size && align <= size) {
        want = (bytes + (bytes == 0) + 15) & ~15ull;
        if (align > 16) want += align - 16;    // wherever it begins, an aligned address is inside
        if (want > size) want = 0;
    }
    const u64 before = detail::sum_before(mask, want, &all);
    if (all && detail::lane() == detail::leader(mask)) {
        at = *(volatile u64*)&a->used;         // so that a full arena does not grow for ever
        if (at < size) at = atomicAdd(&a->used, all);
    }
    at = __shfl_sync(mask, at, detail::leader(mask)) + before;
    const bool fits = want && at <= size && want <= size - at;
    if (__any_sync(mask, !fits)) {
        detail::count(mask, !fits && !bad, &a->overflowed);
        detail::count(mask, bad, &a->misused);
        if (!fits) return nullptr;
    }
    u64 address = (u64)(a + 1) + at;
    if (align > 16) address = (address + align - 1) & ~(align - 1);
    return (void*)address;
}

// An item. NULL: all are in use. What was written to it before it was given back is over.
__device__ __forceinline__ void* slab_alloc(slab* s) {
    const u32 mask = __activemask();
    const u32 wanted = __popc(mask), rank = __popc(detail::before(mask));
    const bool leads = detail::lane() == detail::leader(mask);
    u32* const bitmap = (u32*)(s + 1);
    const u64 words = s->words;
    u32 granted = 0, done = 0;
    u64 index = ~0ull, at = 0;
    if (leads) {
        // First a promise, so that the search below ends: of as many as are promised, there are bits.
        if (*(volatile long long*)&s->vacant > 0) {
            long long left = (long long)atomicAdd((u64*)&s->vacant, (u64)0 - wanted);
            granted = left <= 0 ? 0 : left < wanted ? (u32)left : wanted;
            if (granted < wanted) atomicAdd((u64*)&s->vacant, (u64)(wanted - granted));
        }
        if (granted < wanted) atomicAdd(&s->overflowed, (u64)(wanted - granted));
        at = detail::spot(words);
    }
    granted = __shfl_sync(mask, granted, detail::leader(mask));
    at = __shfl_sync(mask, at, detail::leader(mask));
    while (done < granted) {                   // each lane looks at a word; few words are enough
        u64 word = (at + rank) % words, all;
        u32 vacant = rank < words ? ~*(volatile u32*)&bitmap[word] : 0, got = 0;
        u64 earlier = detail::sum_before(mask, __popc(vacant), &all);
        u32 needed = granted - done;
        if (vacant && earlier < needed) {
            u32 most = needed - (u32)earlier, have = __popc(vacant);
            u32 bits = detail::lowest_bits(vacant, most < have ? most : have);
            got = bits & ~atomicOr(&bitmap[word], bits);
        }
        for (u32 left = __ballot_sync(mask, got != 0); left; left &= left - 1) {
            u32 from = __ffs(left) - 1, bits = __shfl_sync(mask, got, from);
            u64 theirs = __shfl_sync(mask, word, from);
            u32 n = __popc(bits);
            if (rank >= done && rank - done < n)
                index = 32 * theirs + detail::nth_bit(bits, rank - done);
            done += n;
        }
        at = (at + wanted) % words;
    }
    if (rank >= granted) return nullptr;
    __threadfence();                           // after all that was written before slab_free
    return (char*)s + s->first + index * s->stride;
}

// Give an item back, which any thread may do, in the same kernel or a later one. NULL is ignored. A
// pointer that is not an item, or one that is not in use, is counted and ignored.
__device__ __forceinline__ void slab_free(slab* s, void* item) {
    if (item == nullptr) return;
    const u32 mask = __activemask();
    u32* const bitmap = (u32*)(s + 1);
    const u64 offset = (u64)item - ((u64)s + s->first);
    const u64 index = offset / s->stride;
    const bool bad = (u64)item < (u64)s + s->first || index >= s->count || offset % s->stride;
    const u64 word = bad ? ~0ull : index / 32;
    const u32 bit = bad ? 0 : 1u << index % 32;
    const u32 group = __match_any_sync(mask, word);
    u32 bits = 0, freed = 0;
    for (u32 left = group; left; left &= left - 1) bits |= __shfl_sync(group, bit, __ffs(left) - 1);
    __syncwarp(mask);
    __threadfence();                           // before another thread gets the item
    const bool leads = detail::lane() == detail::leader(group);
    if (leads && bits) freed = __popc(bits & atomicAnd(&bitmap[word], ~bits));
    u64 all, wrong;
    detail::sum_before(mask, freed, &all);
    detail::sum_before(mask, leads ? __popc(group) - freed : 0, &wrong);
    if (detail::lane() == detail::leader(mask)) {
        if (all) atomicAdd((u64*)&s->vacant, all);
        if (wrong) atomicAdd(&s->misused, wrong);
    }
}

}  // namespace arenapy
