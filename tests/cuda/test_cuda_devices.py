"""Several devices behind one object, and copies between them. On the simulated driver."""

import copy
import ctypes
import pickle
import random
import threading
from dataclasses import fields

import pytest
from cuda_support import (
    LEGACY,
    MIB,
    a_gpu,
    backwards,
    content,
    graph_of,
    new_stream,
    sample,
    slowly_fill,
)
from helpers import peek
from simulated_driver import OUT_OF_MEMORY, PEER_UNSUPPORTED, UNKNOWN

import arenapy
from arenapy import OutOfMemory, Pool, cuda
from arenapy.cuda.peers import trim_relays

NO_PEERS, N = set(), 3 * MIB
PIECES = 3  # of N bytes that go through the host
N_ROUND = 40 * MIB  # more than a relay's ring holds
PIECES_ROUND, SLOTS = 10, 4  # of N_ROUND bytes
TOO_MANY_PEERS = 711


@pytest.fixture
def gpus(gpu):
    """Of devices that cannot access each other's memory."""
    gpu.peers = NO_PEERS
    return cuda.Devices()


def blocks_on(gpus, nbytes=N):
    return [gpus.alloc(nbytes, device=device) for device in gpus.pools]


def queue(gpu, stream, call, block):
    """Work that whoever may do, on whichever device the memory is."""
    with gpu.exclusive():
        on = gpu.stream(getattr(stream, "handle", stream))
        gpu.submit(on, "work", call, [(block.address, block.nbytes)])


def writes(gpu, stream, block, byte):
    address, nbytes = block.address, block.nbytes
    queue(gpu, stream, lambda: ctypes.memset(address, byte, nbytes), block)


def reads(gpu, stream, block):
    """The list has a sample of what it saw once it has run."""
    seen, address, nbytes = [], block.address, block.nbytes
    queue(gpu, stream, lambda: seen.append(sample(peek(address, nbytes))), block)
    return seen


def in_any_order(gpu, rng):
    while gpu.step(rng.randrange(1, 1000)):
        pass
    gpu.drain()


# ---- one object ----


def test_there_is_a_pool_for_each(gpu):
    gpus = cuda.Devices()
    assert list(gpus) == [gpus[0], gpus[1]] and len(gpus) == 2
    for device in gpus.pools:
        block = gpus.alloc(4096, device=device)
        assert block.device_id == device and block.allocator is gpus[device]
    assert list(cuda.Devices([1]).pools) == [1]
    gpus.check()


def test_a_block_is_on_the_device_that_is_meant(gpu):
    gpus = cuda.Devices()
    assert gpus.alloc(64).device_id == 0
    with gpu.on(1):
        theirs = new_stream(gpu)
        assert gpus.alloc(64).device_id == 1
        assert gpus.alloc(64, device=0).device_id == 0
        assert gpus.alloc(64, stream=cuda.Stream(0)).device_id == 0
    assert gpus.alloc(64, stream=theirs).device_id == 1
    assert gpus.alloc(64, stream=cuda.Stream(1)).device_id == 1
    with pytest.raises(ValueError, match=r"current device is 0, and there are Pools of \[1\]"):
        cuda.Devices([1]).alloc(64)
    with pytest.raises(ValueError, match=r"is of device 0, and there are Pools of \[1\]"):
        cuda.Devices([1]).alloc(64, stream=cuda.Stream(0))


def test_from_a_thread_without_a_context(gpu):
    gpus, seen = cuda.Devices(), []

    def work():
        for device in (1, 0, 1):
            block = gpus.alloc(N, device=device)
            block.fill(device + 5)
            other = gpus.alloc(N, device=1 - device)
            other.copy_from(block)
            seen.append((other.device_id, set(content(other)), gpu.current))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [(0, {6}, []), (1, {5}, []), (0, {6}, [])]


def test_each_has_the_limit(gpu):
    gpus = cuda.Devices(max_bytes=4 * MIB)
    kept = gpus.alloc(4 * MIB, device=0)
    with pytest.raises(OutOfMemory):
        gpus.alloc(4 * MIB, device=0)
    assert gpus.alloc(4 * MIB, device=1).device_id == 1
    assert kept.device_id == 0


def test_figures_in_sum(gpu):
    gpus = cuda.Devices()
    kept = [gpus.alloc(MIB, device=0), gpus.alloc(2 * MIB, device=1)]
    gpus.alloc(64, device=1).release()
    each, total = [pool.stats() for pool in gpus], gpus.stats()
    for field in fields(total):
        if field.name == "classes":
            continue
        together = max if field.name == "largest_free_block" else sum
        values = [getattr(one, field.name) for one in each]
        assert getattr(total, field.name) == together(values), field.name
    assert [one.index for one in total.classes] == list(range(len(arenapy.SIZE_CLASSES)))
    assert total.classes[0].upper_bound == arenapy.SIZE_CLASSES[0]
    assert sum(one.allocated_bytes for one in total.classes) == total.allocated_bytes == 3 * MIB
    assert total.allocated_bytes + total.pending_bytes + total.idle_bytes == total.reserved_bytes
    assert str(total) and kept


def test_trim_gives_back_on_all(gpu):
    gpus = cuda.Devices()
    for device in gpus.pools:
        gpus.alloc(MIB, device=device).release()
    reserved = gpus.stats().reserved_bytes
    assert gpus.trim() == reserved > 0 == gpus.stats().reserved_bytes


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"devices": [0, 2]}, ValueError, "2 is not a CUDA device; there are 2"),
        ({"devices": [-1]}, ValueError, "-1 is not a CUDA device"),
        ({"devices": [1, 1]}, ValueError, "1 is given twice"),
        ({"devices": []}, ValueError, "devices is empty"),
        ({"devices": ["a"]}, TypeError, "devices='a'"),
        ({"devices": 2}, TypeError, r"devices=2: need ordinals, like \[0, 1\]"),
        ({"devices": "01"}, TypeError, "devices='01': need ordinals"),
        ({"peer_access": "auto"}, TypeError, "peer_access='auto': need True, False or None"),
        ({"peer_access": 0}, TypeError, "peer_access=0: need True, False or None"),
        ({"source": lambda i: cuda.Managed(i)}, ValueError, r"source\(0\) gives managed memory"),
        ({"source": lambda i: cuda.Device()}, ValueError, r"source\(1\) .* memory of device 0"),
        ({"max_bytes": -1}, ValueError, "max_bytes"),
    ],
)
def test_bad_input(gpu, arguments, error, text):
    before = gpu.memory.used.copy()
    with pytest.raises(error, match=text):
        cuda.Devices(**arguments)
    assert gpu.memory.used == before and not gpu.enabled


@pytest.mark.parametrize("act", [copy.copy, copy.deepcopy, pickle.dumps])
def test_it_is_not_copied(gpu, act):
    with pytest.raises(TypeError, match="Devices is not copied"):
        act(cuda.Devices())


def test_a_device_that_it_does_not_have(gpu):
    gpus = cuda.Devices([0])
    with pytest.raises(ValueError, match=r"device=1: there are Pools of \[0\] here"):
        gpus.alloc(64, device=1)
    with pytest.raises(TypeError, match="device='a'"):
        gpus["a"]


# ---- peer access ----


def test_access_is_asked_for_once(gpu):
    assert not cuda.Devices().refused
    assert gpu.enabled == {(0, 1), (1, 0)}
    gpus = cuda.Devices()
    a, b = blocks_on(gpus)
    a.copy_from(b)
    b.copy_from(a)
    assert gpu.calls["cuDeviceCanAccessPeer"] == gpu.calls["cuCtxEnablePeerAccess"] == 2
    assert gpu.calls["cuMemcpyPeerAsync"] == 2 and not gpu.calls["cuMemcpyAsync"]


def test_another_library_has_enabled_it(gpu):
    with gpu.on(1):
        gpu.call("cuCtxEnablePeerAccess", 0x1000, 0)
    assert not cuda.Devices().refused


@pytest.mark.parametrize(
    ("result", "text"),
    [
        (None, "device 0 cannot access the memory of device 1: the driver says that no link"),
        (PEER_UNSUPPORTED, "device 0 cannot access .*CUDA_ERROR_PEER_ACCESS_UNSUPPORTED"),
        (TOO_MANY_PEERS, "device 0 cannot access .*cuCtxEnablePeerAccess failed"),
    ],
)
def test_it_is_refused_with_the_reason(gpu, result, text):
    if result is None:
        gpu.peers = {(1, 0)}
    else:
        gpu.fail_at("cuCtxEnablePeerAccess", 1, result)
    with pytest.raises(cuda.CudaError, match=text):
        cuda.Devices(peer_access=True)
    assert not gpu.memory.used.total()
    calls = gpu.calls["cuDeviceCanAccessPeer"]
    gpus = cuda.Devices()
    ((pair, why),) = gpus.refused.items()
    assert pair == (0, 1) and why.startswith("device 0 cannot access")
    assert gpu.calls["cuDeviceCanAccessPeer"] == calls, "the answer was not remembered"


def test_a_driver_that_fails_is_no_answer(gpu):
    gpu.fail_at("cuDeviceCanAccessPeer", 1, UNKNOWN)
    with pytest.raises(cuda.CudaError, match="cuDeviceCanAccessPeer failed"):
        cuda.Devices()
    assert not cuda.Devices().refused


def test_access_is_enabled_while_another_stream_captures(gpu):
    """Which is not to make that capture invalid."""
    s = new_stream(gpu)
    gpu.begin_capture(s.handle_)
    cuda.Devices()
    gpu.destroy_graph(graph_of(gpu, s))


def test_access_may_be_left_unused(gpu):
    a, b = blocks_on(cuda.Devices(peer_access=False))
    a.copy_from(b)
    assert not gpu.enabled and not gpu.calls["cuDeviceCanAccessPeer"]
    assert gpu.calls["cuMemcpyAsync"] == 2 * PIECES and not gpu.calls["cuMemcpyPeerAsync"]
    cuda.Devices()  # the last one decides
    a.copy_from(b)
    assert gpu.calls["cuMemcpyPeerAsync"] == 1


# ---- copies ----


@pytest.mark.parametrize("access", [True, False])
@pytest.mark.parametrize("on", ["near", "far", "integer"])
def test_a_copy_is_in_the_order_of_its_stream(gpu, on, access):
    """After what the stream was given before, and before what it is given next."""
    if not access:
        gpu.peers = NO_PEERS
    near, far = blocks_on(cuda.Devices())
    stream = new_stream(gpu).handle_ if on == "integer" else cuda.Stream(int(on == "far"))
    for k in range(1, 4):
        writes(gpu, stream, near, k)
        far.copy_from(near, stream=stream)
        seen = reads(gpu, stream, far)
        writes(gpu, stream, near, 99)
        backwards(gpu)
        assert seen == [{k}]
    assert bool(gpu.calls["cuMemcpyPeerAsync"]) == access


def test_each_stream_is_asked_once_whether_it_captures(gpu):
    """A question costs as much as another call of the driver."""
    near, far = blocks_on(cuda.Devices())
    s = cuda.Stream(0)
    far.copy_from(near, stream=s)
    before = gpu.calls.copy()
    far.copy_from(near, stream=s)
    assert (gpu.calls - before)["cuStreamIsCapturing"] == 3  # `s`, and the owner of either block


@pytest.mark.parametrize("access", [True, False])
def test_without_a_stream_it_is_done_when_it_returns(gpu, access):
    if not access:
        gpu.peers = NO_PEERS
    near, far = blocks_on(cuda.Devices())
    slowly_fill(gpu, LEGACY, near, 4)
    far.copy_from(near)
    assert sample(content(far)) == {4}
    with gpu.on(1):
        slowly_fill(gpu, LEGACY, far, 5)
    far.copy_to(near)
    assert sample(content(near)) == {5}


@pytest.mark.parametrize("nbytes", [MIB - 1, MIB, N + 1, 18 * MIB - 3])
@pytest.mark.parametrize("seed", range(3))
def test_all_bytes_arrive(gpu, gpus, nbytes, seed):
    rng = random.Random(seed)
    near, far = blocks_on(gpus, nbytes)
    data = rng.randbytes(nbytes)
    near.copy_from(data)
    far.fill(0)
    s = cuda.Stream(0)
    far.copy_from(near, stream=s)
    in_any_order(gpu, rng)
    assert content(far) == data
    near.fill(0)
    near.copy_from(far)
    assert content(near) == data
    assert bool(gpu.calls["cuMemcpyPeerAsync"]) == (nbytes < MIB)


def test_the_host_waits_for_nothing(gpu, gpus):
    near, far = blocks_on(gpus)
    s = cuda.Stream(0)
    far.copy_from(near, stream=s)
    gpu.drain()
    before = gpu.calls.copy()
    far.copy_from(near, stream=s)
    made = gpu.calls - before
    assert made["cuMemcpyAsync"] == 2 * PIECES
    forbidden = {"cuStreamSynchronize", "cuEventSynchronize", "cuMemHostRegister", "cuStreamCreate"}
    assert not forbidden & made.keys()


def test_pieces_are_on_both_links_at_once(gpu, gpus):
    """The second one may be read before the first one is written."""
    near, far = blocks_on(gpus, N_ROUND)
    far.copy_from(near, stream=cuda.Stream(0))
    ran, device_of = [], {0: "near", 1: "far"}
    while True:
        ready = [one for one in gpu.queue if all(need.done for need in one.needs)]
        if not ready:
            break
        # The link out of the source first: it fills all slots, and none again before it is empty.
        one = min(ready, key=lambda one: (one.device, one.number))
        if one.what.startswith("a copy"):
            ran.append(device_of[one.device])
        gpu._execute(one)
    assert ran[: SLOTS + 1] == ["near"] * SLOTS + ["far"] and len(ran) == 2 * PIECES_ROUND
    filled = 0
    for one in ran:
        filled += 1 if one == "near" else -1
        assert 0 <= filled <= SLOTS


@pytest.mark.parametrize("access", [True, False])
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.full
def test_both_ends_are_held_until_it_is_done(gpu, access, seed):
    """Dropped while it is copied, and written by who gets the memory next: nothing is corrupted."""
    if not access:
        gpu.peers = NO_PEERS
    rng = random.Random(seed)
    pools = [Pool(2 * MIB, cuda.Device(i), 2 * MIB) for i in (0, 1)]
    streams = [cuda.Stream(i) for i in (0, 1)]
    checks = []
    for k in range(30):
        near = rng.randrange(2)
        s = rng.choice(streams)
        source = pools[near].alloc(2 * MIB, stream=s)
        target = pools[1 - near].alloc(2 * MIB, stream=s)
        writes(gpu, s, source, k)
        target.copy_from(source, stream=s)
        checks.append((k, reads(gpu, s, target)))
        del source, target
        for i in rng.sample((0, 1), 2):
            pools[i].alloc(2 * MIB, stream=streams[i]).fill(200, stream=streams[i])
        for _ in range(rng.randrange(30)):
            gpu.step(rng.randrange(1, 50))
        if rng.random() < 0.2:
            in_any_order(gpu, rng)
    in_any_order(gpu, rng)
    assert all(seen == [{k}] for k, seen in checks)


def test_a_copy_of_which_nobody_was_told_is_overwritten(gpu):
    """The twin of the test above: it can fail."""
    cuda.Devices()
    pool = Pool(4 * MIB, cuda.Device(0), 4 * MIB)
    target = cuda.Device(1).region(4 * MIB).buffer()
    s = cuda.Stream(1)
    block = pool.alloc(4 * MIB)
    block.fill(1)
    to, source = target.address, block.address
    gpu.call("cuMemcpyPeerAsync", to, 0x2000, source, 0x1000, 4 * MIB, s.handle)
    del block
    pool.alloc(4 * MIB).fill(200)
    gpu.drain()
    assert sample(content(target)) == {200}


# ---- relays ----


def test_a_relay_is_used_anew(gpu, gpus):
    near, far = blocks_on(gpus)
    s = cuda.Stream(0)
    for _ in range(5):
        far.copy_from(near, stream=s)
    assert gpu.calls["cuMemHostRegister"] == 1
    gpu.drain()
    far.copy_from(near, stream=cuda.Stream(1))
    assert gpu.calls["cuMemHostRegister"] == 1


def test_streams_do_not_wait_for_each_other(gpu, gpus):
    """The second copy runs although what comes before the first one does not."""
    pairs = [blocks_on(gpus) for _ in range(6)]
    streams = [cuda.Stream(0) for _ in pairs]
    held = []
    for stream, (near, far) in zip(streams, pairs, strict=True):
        held.append(gpu.submit(gpu.stream(stream.handle), "what comes before"))
        near.fill(7, stream=stream)
        far.copy_from(near, stream=stream)
    for stream, one in zip(streams, held, strict=True):
        gpu.finish([gpu.stream(stream.handle).tail])
        assert one.done
        assert sum(not other.done for other in held) == len(held) - held.index(one) - 1
    assert gpu.calls["cuMemHostRegister"] == 4, "at most so many relays"
    assert gpu.calls["cuMemcpyPeerAsync"] == 2
    assert all(sample(content(far)) == {7} for _, far in pairs)


def test_pinned_memory_that_there_is_not(gpu, gpus):
    gpu.fails["cuMemHostRegister"] = OUT_OF_MEMORY
    near, far = blocks_on(gpus)
    near.fill(3)
    far.copy_from(near)
    assert sample(content(far)) == {3} and gpu.calls["cuMemcpyPeerAsync"] == 1


def test_in_a_capture_the_driver_copies(gpu, gpus):
    near, far = blocks_on(gpus)
    near.fill(3)
    s = cuda.Stream(0)
    gpu.begin_capture(s.handle)
    far.copy_from(near, stream=s)
    graph = gpu.end_capture(s.handle)
    gpu.replay(graph, s.handle)
    gpu.drain()
    assert sample(content(far)) == {3} and gpu.calls["cuMemcpyPeerAsync"] == 1
    gpu.destroy_graph(graph)


CALLS = ["cuMemcpyAsync", "cuEventRecord", "cuStreamWaitEvent", "cuEventCreate", "cuStreamCreate"]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.full
def test_a_copy_that_fails_leaves_nothing_behind(call):
    """Whichever of its calls it is: nothing goes on, and the next copy is whole."""
    failures = 0
    for nth in range(1, 100):
        with a_gpu() as gpu:
            gpu.peers = NO_PEERS
            gpus, s = cuda.Devices(), cuda.Stream(0)
            near, far = blocks_on(gpus, 5 * MIB // 4)
            near.fill(1)
            gpu.fail_at(call, nth, UNKNOWN)
            try:
                far.copy_from(near, stream=s)
                failed = not gpu.plan
            except cuda.CudaError:
                failed = True
                assert not any("a copy" in one.what for one in gpu.queue)
            gpu.plan.clear()
            near.fill(2, stream=s)
            far.copy_from(near, stream=s)
            gpu.drain()
            assert sample(content(far)) == {2}
            del near, far, s
            gpus.trim()
            del gpus
        if not failed:
            break
        failures += 1
    assert failures >= 2, "what is there to fail?"


def test_trim_gives_the_pinned_memory_back(gpu, gpus):
    near, far = blocks_on(gpus)
    s = cuda.Stream(0)
    far.copy_from(near, stream=s)
    gpus.trim()
    assert gpu.memory.registered, "it is in use"
    gpu.drain()
    gpus.trim()
    assert not gpu.memory.registered


def test_trim_of_a_bad_size_changes_nothing(gpu, gpus):
    near, far = blocks_on(gpus)
    far.copy_from(near)
    with pytest.raises(ValueError, match="keep_bytes"):
        gpus.trim(-1)
    assert gpu.memory.registered


@pytest.mark.parametrize("point", range(1, 9))
def test_trim_drops_no_relay_that_another_thread_has_begun_to_use(gpu, gpus, point):
    """The other one copies between two calls of the driver by which a trim asks for the relay."""
    near, far = blocks_on(gpus)
    s = cuda.Stream(0)
    far.copy_from(near, stream=s)
    gpu.drain()
    for pool in gpus:
        pool.trim()
    left = point

    def other(name):
        nonlocal left
        left -= 1
        if left == 0:
            far.copy_from(near, stream=s)

    near.fill(5)
    gpu.before_call = other
    trim_relays()
    gpu.before_call = None
    assert left > 0 or gpu.memory.registered, "it is in use"
    gpu.drain()
    assert left > 0 or sample(content(far)) == {5}
    trim_relays()
    assert not gpu.memory.registered


# ---- a device that fails ----


@pytest.mark.parametrize("amid", [False, True])
@pytest.mark.parametrize("on", [0, 1])
@pytest.mark.parametrize("fails", [0, 1])
def test_a_device_that_fails_during_a_relayed_copy(fails, on, amid):
    """What the other device still does with its block and with the relay counts."""
    with a_gpu(leaks=True) as gpu, gpu.on(1 - fails):
        gpu.peers = NO_PEERS
        gpus = cuda.Devices(source=lambda device: cuda.Device(device, grow=True))
        blocks, s = blocks_on(gpus, 8 * MIB), cuda.Stream(on)
        blocks[1].copy_from(blocks[0], stream=s)
        gpu.drain()
        before = gpu.calls["cuMemcpyAsync"]

        def lose(name):
            if gpu.calls["cuMemcpyAsync"] == before + 6:
                gpu.before_call = None
                gpu.lose(fails)

        if amid:
            gpu.before_call = lose
        try:
            blocks[1].copy_from(blocks[0], stream=s)
        except cuda.CudaError:
            assert amid
        assert gpu.before_call is None
        if not amid:
            gpu.lose(fails)
        blocks.pop(1 - fails).release(s)
        gpus[1 - fails].trim()
        trim_relays()
        new, stream = gpus.alloc(8 * MIB, device=1 - fails), cuda.Stream(1 - fails)
        new.fill(7, stream=stream)
        stream.synchronize()
        gpu.drain()
        assert sample(content(new)) == {7}
        assert gpus[1 - fails].stats().pending_bytes == 0


def test_a_device_that_fails_takes_down_its_own_pool_alone(gpu):
    gpus = cuda.Devices()
    here, there = cuda.Stream(0), cuda.Stream(1)
    blocks = [gpus.alloc(4 * MIB, device=0) for _ in range(4)]
    kept = gpus.alloc(4 * MIB, device=1)
    kept.copy_from(blocks[0], stream=there)  # device 1 reads and writes what is device 0's
    blocks[1].copy_from(kept, stream=there)
    blocks[2].copy_from(kept, stream=here)
    blocks[3].fill(9, stream=here)
    gpu.lose(1)
    with pytest.raises(cuda.CudaError, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
        kept.fill(1)
    with pytest.raises(cuda.CudaError, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
        gpus.alloc(8 * MIB, device=1)
    assert set(content(blocks[3])) <= {9, 0xA5}
    del kept, blocks
    gpu.drain()
    assert gpus[0].stats().pending_bytes == 0, "device 0 has not all of its memory back"
    block = gpus.alloc(4 * MIB, device=0)
    block.fill(5)
    block.copy_from(b"\6" * 4 * MIB)
    assert sample(content(block)) == {6}
    gpus.check()
    assert gpus.stats().allocated_bytes == 4 * MIB
    with pytest.raises(cuda.CudaError, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
        gpus.alloc(64, device=1).copy_from(block[:64])
    del block
    assert gpus.trim() > 0 == gpus[0].stats().reserved_bytes
    for _ in range(3):
        assert gpus.alloc(MIB, device=0).device_id == 0


def test_the_stream_names_of_both_devices(gpu):
    """A stream of any library; the handle 1 is the default stream of the device that is current."""
    gpus = cuda.Devices()
    with gpu.on(1):
        assert gpus.alloc(64, stream=1).device_id == 1
        handle = gpu.got("cuStreamCreate", ctypes.c_void_p, 1)
    assert gpus.alloc(64, stream=1).device_id == 0
    assert gpus.alloc(64, stream=handle).device_id == 1
