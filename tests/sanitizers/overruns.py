"""Programs that touch what they may not, each in a forked child; see run.py.

Each is a generator. It yields the address of the byte that it may not touch, and is not resumed:
what it did before that is all allowed.
"""

import errno
import tempfile

import numpy as np
import overrun
from common import MIB, Regions, owned, program

import arenapy
from arenapy import Bump, Pool, Slab, trace
from arenapy.linux import vm

# ---- Bump ----


@program
def bump_past_the_end():
    arena = Bump(MIB)
    yield owned(arena, 13) + 13


@program
def bump_before_the_first():
    arena = Bump(MIB)
    owned(arena, 64)
    yield owned(arena, 64, 4096) - 1


@program
def bump_padding_of_a_neighbour():
    arena = Bump(MIB)
    first, second = owned(arena, 24), owned(arena, 24)
    assert second == first + 64
    yield second - 16


@program
def bump_beyond_the_cursor():
    arena = Bump(MIB)
    owned(arena, 64)
    yield arena.regions[0].address + MIB - 1


@program
def bump_after_a_reset_in_c():
    arena = Bump(MIB)
    kept = owned(arena, 64)
    gone = overrun.turn(arena, 1000, 3)
    overrun.fill(kept, 64)
    yield gone + 999


@program
def bump_after_a_reset_over_many_runs():
    arena = Bump(MIB)
    kept = [arena.empty(300, "u1") for _ in range(8)]
    del kept[1::2]
    arena.reset()  # retires the others: what follows goes between them
    filler = [owned(arena, 200) for _ in range(3)]
    for array in kept:
        overrun.fill(array.ctypes.data, 300)
    arena.reset()
    for array in kept:
        overrun.fill(array.ctypes.data, 300)
    yield filler[-1]


@program
def bump_freed():
    arena = Bump(MIB)
    block = owned(arena, 100)
    overrun.free(arena, block, 100)
    yield block


@program
def bump_released_but_not_the_newest():
    arena = Bump(MIB)
    first, second = arena.alloc(64), arena.alloc(64)
    address = first.address
    overrun.fill(address, 64)
    first.release()
    overrun.fill(second.address, 64)
    yield address + 63


@program
def bump_array_dropped_but_not_the_newest():
    arena = Bump(MIB)
    first, second = arena.empty(64, "u1"), arena.zeros(64, "u1")
    address = first.ctypes.data
    overrun.fill(address, 64)
    del first
    arena.alloc(8)  # takes note
    overrun.fill(second.ctypes.data, 64)
    yield address


@program
def bump_retired_and_gone():
    arena = Bump(MIB)
    array = arena.empty(100, "u1")
    owned(arena, 100)
    address = array.ctypes.data
    arena.reset()
    overrun.fill(address, 100)
    assert arena.retired == 100
    del array
    assert arena.retired == 0
    yield address + 50


@program
def bump_retired_past_the_end():
    arena = Bump(MIB)
    array = arena.empty(100, "u1")
    arena.reset()
    overrun.fill(array.ctypes.data, 100)
    yield array.ctypes.data + 100


@program
def bump_grown_region():
    arena = Bump(4096, max_bytes=MIB)
    overrun.fill(overrun.alloc(arena, 4096), 4096)
    yield owned(arena, 5000) + 5000


@program
def bump_grown_block():
    arena = Bump(MIB)
    block = arena.grow(arena.alloc(10), 100)
    overrun.fill(block.address, 100)
    yield block.address + 100


# ---- Slab ----


@program
def slab_past_the_end():
    slab = Slab(40, count=16)
    owned(slab, 40)
    yield owned(slab, 40) + 40


@program
def slab_past_the_request():
    slab = Slab(64, count=16)
    item = slab.alloc(20)
    overrun.fill(item.address, 20)
    yield item.address + 20


@program
def slab_past_one_of_many():
    slab = Slab(64, count=16)
    items = slab.alloc_many([10, 64, 30])
    for item in items:
        overrun.fill(item.address, item.nbytes)
    yield items[2].address + 30


@program
def slab_free_neighbour():
    slab = Slab(64, count=16)
    yield owned(slab, 64) + 64


@program
def slab_before_the_first():
    slab = Slab(64, count=4, align=4096)
    owned(slab, 64)
    yield owned(slab, 64) - 1


@program
def slab_freed():
    slab = Slab(100, count=16)
    first, second = owned(slab, 100), owned(slab, 100)
    overrun.free(slab, first)
    overrun.fill(second, 100)
    yield first + 99


@program
def slab_released():
    slab = Slab(100, count=16)
    item = slab.alloc()
    address = item.address
    overrun.fill(address, 100)
    item.release()
    yield address


@program
def slab_freed_while_recorded():
    slab = Slab(100, count=16)
    # Which takes the long ways.
    with tempfile.TemporaryDirectory() as folder, trace.record(slab, f"{folder}/t"):
        item = slab.alloc(90)
        address = item.address
        overrun.fill(address, 90)
        del item
    yield address


@program
def slab_grown_part():
    slab = Slab(64, count=2, max_count=8)
    items = [owned(slab, 64) for _ in range(3)]
    yield items[-1] + 64


@program
def allowed_packed_items():
    slab = Slab(3, count=100, align=1)  # several in each unit: not poisoned
    items = [owned(slab, 3) for _ in range(100)]
    for item in items[::2]:
        overrun.free(slab, item)
    for item in items[1::2]:
        overrun.fill(item, 3)
    yield 0


# ---- Pool ----


@program
def pool_past_the_end():
    pool = Pool(MIB)
    owned(pool, 100)
    yield owned(pool, 100) + 100


@program
def pool_past_the_end_of_a_large_one():
    pool = Pool(16 * MIB)
    yield owned(pool, MIB + 5000) + MIB + 5000


@program
def pool_free_slot_beside():
    pool = Pool(MIB)
    yield owned(pool, 64) + 64


@program
def pool_freed():
    pool = Pool(MIB)
    first, second = owned(pool, 100), owned(pool, 100)
    overrun.free(pool, first)
    overrun.fill(second, 100)
    yield first


@program
def pool_freed_large():
    pool = Pool(16 * MIB)
    block = owned(pool, MIB)
    overrun.free(pool, block)
    yield block + MIB - 1


@program
def pool_freed_to_the_heap():
    pool = Pool(16 * MIB)
    block = owned(pool, 3000, 8192)  # no slot, and too small for the thread cache
    overrun.free(pool, block)
    yield block + 2999


@program
def pool_freed_to_a_full_cache():
    pool = Pool(64 * MIB)
    blocks = [overrun.alloc(pool, 40_000) for _ in range(300)]
    for block in blocks[:257]:
        overrun.free(pool, block)
    yield blocks[256]


@program
def pool_dropped_array():
    pool = Pool(MIB)
    array = pool.zeros(100, "u1")
    address = array.ctypes.data
    overrun.fill(address, 100)
    del array
    yield address


@program
def pool_of_many():
    pool = Pool(MIB)
    blocks = pool.alloc_many([10, 5000, 40_000])
    for block in blocks:
        overrun.fill(block.address, block.nbytes)
    yield blocks[2].address + 40_000


@program
def pool_before_a_skewed_one():
    pool = Pool(16 * MIB)
    blocks = [owned(pool, 38_000) for _ in range(4)]
    skewed = [block for block in blocks if block % 4096]
    assert skewed
    yield skewed[0] - 1


@program
def pool_reused_for_less():
    pool = Pool(MIB)
    block = owned(pool, 128)
    overrun.free(pool, block)
    again = owned(pool, 70)
    assert again == block
    yield again + 70


@program
def pool_of_regions():
    pool = Pool(4 * MIB, source=Regions(), initial_bytes=MIB)
    yield owned(pool, 3000) + 3000


@program
def pool_freed_while_timed():
    pool = Pool(MIB, trim_after=1000)
    block = owned(pool, 3000)
    overrun.free(pool, block)
    yield block


@program
def numpy_past_the_end():
    with arenapy.numpy_memory(Pool(16 * MIB)):
        array = np.empty(1000, "u1")
    overrun.fill(array.ctypes.data, 1000)
    yield array.ctypes.data + 1000


@program
def numpy_resized():
    with arenapy.numpy_memory(Pool(16 * MIB)):
        array = np.ones(1000, "u1")
        array.resize(1020, refcheck=False)  # in place
        overrun.fill(array.ctypes.data, 1020)
        array.resize(1010, refcheck=False)
        array.resize(5000, refcheck=False)  # moved
        assert array[:1010].all()
        overrun.fill(array.ctypes.data, 5000)
        array.resize(4990, refcheck=False)
    yield array.ctypes.data + 4990


@program
def allowed_usable_bytes():
    pool = Pool(MIB)
    block = owned(pool, 100)
    nbytes = overrun.usable(pool, block)
    assert nbytes > 100
    overrun.fill(block, nbytes)
    yield 0


@program
def allowed_trimmed_and_grown_again():
    pool = Pool(64 * MIB)
    block = owned(pool, 8 * MIB)
    overrun.free(pool, block)
    assert pool.trim() > 0
    vm.inject_populate_error(errno.EINVAL)  # an old kernel: what is grown is touched
    block = owned(pool, 16 * MIB)
    overrun.free(pool, block)
    pool.prewarm({1000: 50, MIB: 3})
    overrun.fill(owned(pool, 8 * MIB), 8 * MIB)
    yield 0
