"""On a real GPU: memory that grows in place."""

import gc
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from real_gpu import Gpu, content, need_gpu

from arenapy import Bump, OutOfMemory, Pool, cuda
from arenapy.commands.replay.program import program

sys.path.append(str(Path(__file__).parents[2]))  # behind what is installed

from asv_benches.gpu.traces import growing_sequences

MIB = 1 << 20

pytestmark = pytest.mark.alone


@pytest.fixture(scope="module")
def gpu():
    need_gpu()
    with Gpu() as one:
        yield one


def free():
    return cuda.memory_info(0).free_bytes


def in_use_by_nvidia_smi(gpu):
    """MiB of the device, of all processes."""
    bus = gpu.driver.cuDeviceGetPCIBusId(32, gpu.ordinal)[1].partition(b"\0")[0].decode()
    ran = subprocess.run(
        ["nvidia-smi", f"--id={bus}", "--query-gpu=memory.used", "--format=csv,noheader,nounits"],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    return int(ran.stdout)


def filled(block, byte):
    block.fill(byte)
    return block


def has(block, byte):
    return set(bytes(content(block))) == {byte}


def test_trim_gives_back_what_lies_between_live_blocks(gpu):
    pool = Pool(source=cuda.Device(grow=True))
    blocks = [filled(pool.alloc(64 * MIB), i) for i in range(8)]
    assert len(pool.regions) == 1
    before = free()
    del blocks[1:7:2]
    assert pool.trim() == 3 * 64 * MIB
    assert free() == before + 3 * 64 * MIB
    assert all(has(block, i) for block, i in zip(blocks, (0, 2, 4, 6, 7), strict=True))
    again = [filled(pool.alloc(64 * MIB), 9) for _ in range(3)]
    assert all(has(block, 9) for block in again) and free() == before
    pool.check()


def test_nvidia_smi_shows_what_a_trim_gives_back(gpu):
    if not shutil.which("nvidia-smi"):
        pytest.skip("needs nvidia-smi")
    pool = Pool(source=cuda.Device(grow=True))
    blocks = [filled(pool.alloc(128 * MIB), i) for i in range(6)]
    before = in_use_by_nvidia_smi(gpu)
    del blocks[1:5]
    assert in_use_by_nvidia_smi(gpu) >= before - 16  # the pool keeps it
    assert pool.trim() == 512 * MIB
    assert abs(before - in_use_by_nvidia_smi(gpu) - 512) <= 16
    assert has(blocks[0], 0) and has(blocks[1], 5)


def test_all_of_it_comes_back(gpu):
    gc.collect()
    before = free()
    pool = Pool(source=cuda.Device(grow=True))
    blocks = [pool.alloc(100 * MIB) for _ in range(5)]
    assert free() <= before - 500 * MIB
    del blocks, pool
    gc.collect()
    assert free() == before


def test_free_memory_merges_across_growth(gpu):
    pool = Pool(source=cuda.Device(grow=True))
    blocks = [pool.alloc(20 * MIB) for _ in range(10)]
    at = blocks[0].address
    blocks.clear()
    large = filled(pool.alloc(200 * MIB), 3)
    assert large.address == at and pool.stats().reserved_bytes == 200 * MIB and has(large, 3)


def test_a_stream_is_done_before_its_memory_is_unmapped(gpu):
    """Else the copies fault, and every later call fails."""
    stream = cuda.Stream()
    pool = Pool(source=cuda.Device(grow=True), stream=stream)
    for _ in range(20):
        a, b = pool.alloc(256 * MIB), pool.alloc(256 * MIB)
        a.fill(1, stream=stream)
        for _ in range(20):
            b.copy_from(a, stream=stream)
        del a, b
        assert pool.trim() == 512 * MIB
    stream.synchronize()
    assert has(filled(pool.alloc(MIB), 4), 4)


def test_a_pool_that_ends_under_its_streams(gpu):
    for _ in range(10):
        pool, stream = Pool(source=cuda.Device(grow=True)), cuda.Stream()
        a, b = pool.alloc(256 * MIB), pool.alloc(256 * MIB, stream=stream)
        for _ in range(10):
            b.copy_from(a, stream=stream)
        del a, b, pool
        gc.collect()
        stream.synchronize()


def test_a_full_device_is_refused_and_comes_back(gpu):
    before = free()
    pool = Pool(source=cuda.Device(grow=True))
    blocks = []
    with pytest.raises(OutOfMemory, match="cuMemCreate"):
        while True:
            blocks.append(pool.alloc(1 << 30))
    pool.check()
    del blocks, pool
    gc.collect()
    assert free() >= before  # more, if a process that failed is only now at its end


def test_a_bump_grows_and_shrinks_in_place(gpu):
    arena = Bump(MIB, cuda.Device(grow=True), 1 << 30)
    block = filled(arena.alloc(MIB), 5)
    assert arena.grow(block, 700 * MIB) is block and len(arena.regions) == 1
    assert has(block[:MIB], 5)
    before = free()
    block.release()
    assert arena.trim() >= 699 * MIB and free() >= before + 690 * MIB
    arena.check()


def test_a_bump_gives_back_what_lies_between_blocks(gpu):
    arena = Bump(MIB, cuda.Device(grow=True), 1 << 30)
    blocks = [filled(arena.alloc(100 * MIB), i) for i in range(5)]
    held = [block.__dlpack__() for block in blocks[::2]]
    kept, before = blocks[::2], free()
    del blocks
    arena.reset()
    assert arena.trim() == 200 * MIB == free() - before
    again = filled(arena.alloc(70 * MIB), 9)
    assert arena.regions[0].address < again.address < kept[1].address and has(again, 9)
    assert all(has(block, i) for block, i in zip(kept, (0, 2, 4), strict=True))
    arena.check()
    del held


def test_other_devices_reach_it(gpu):
    if len(cuda.devices()) < 2:
        pytest.skip("it takes two devices")
    here = filled(Pool(source=cuda.Device(0, grow=True)).alloc(16 * MIB), 7)
    there = Pool(source=cuda.Device(1, grow=True)).alloc(16 * MIB)
    there.copy_from(here)
    assert has(there, 7)


def most_over_live(pool, steps):
    """Peaks over the peak of live bytes: what the pool says, and what the device has lost."""
    base, most, of_device = free(), 0, 0
    blocks = [None] * steps.count
    for slot, nbytes in zip(steps.slots.tolist(), steps.sizes.tolist(), strict=True):
        if slot >= 0:
            blocks[slot] = pool.alloc(nbytes)
            most = max(most, pool.stats().reserved_bytes)
            of_device = max(of_device, base - free())
        else:
            blocks[~slot] = None
    pool.check()
    peak = int(steps.live().max())
    return most / peak, of_device / peak


def test_growing_sequences_take_no_more_than_they_need(gpu):
    steps = program(growing_sequences())
    said, of_device = most_over_live(Pool(source=cuda.Device(grow=True)), steps)
    gc.collect()
    regions, _ = most_over_live(Pool(source=cuda.Device()), steps)
    assert max(said, of_device) <= 1.03 < 1.15 < regions
