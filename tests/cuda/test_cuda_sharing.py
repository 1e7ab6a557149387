"""Blocks of `cuda.Device(grow=True)` in other processes, on the simulated driver.

What it exports is a file with the bytes, so that a receiver, in this process or in another one with
a simulated driver of its own, sees the very bytes of the sender.
"""

import contextlib
import gc
import os
import pickle
import signal
import socket
import subprocess
import sys
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import numpy as np
import pytest
from cuda_acts import Acting
from cuda_machine import one_of, when_there
from cuda_support import (
    MIB,
    a_gpu,
    content,
    graph_of,
    new_stream,
    refused_in_a_child,
    slowly_fill,
    until,
)
from helpers import peek
from hypothesis import settings
from simulated_driver import DESCRIPTORS
from simulated_memory import INVALID_VALUE, OUT_OF_MEMORY

import arenapy
from arenapy import Bump, OutOfMemory, Pool, Slab, cuda
from arenapy.cuda import sharing
from arenapy.linux import vm
from arenapy.memory import messages, shared

GRANULE = 2 * MIB
ALLOCATORS = {
    "bump": lambda **options: Bump(MIB, cuda.Device(grow=True), 40 * MIB, **options),
    "pool": lambda **options: Pool(40 * MIB, cuda.Device(grow=True), **options),
}


@pytest.fixture
def gpu():
    with a_gpu() as driver:
        yield driver
        gc.collect()
        cuda.Stream().synchronize()  # it lets go of memory that outlived its allocator
        assert driver.errors == [] and driver.raised is None


@pytest.fixture
def pair():
    here, there = socket.socketpair()
    with here, there:
        yield here, there


both = pytest.mark.parametrize("kind", ALLOCATORS)


def sent(block, how="send"):
    """As the receiver gets it, here in the same process."""
    if how == "multiprocessing":
        return ForkingPickler.loads(ForkingPickler.dumps(block))
    here, there = socket.socketpair()
    with here, there:
        arenapy.send(here, block)
        return arenapy.receive(there)


def filled(block, byte, stream=None):
    block.fill(byte, stream=stream)
    return block


def settled(allocator):
    if isinstance(allocator, Bump):
        allocator.reset()
        return allocator.stats().pending_bytes == allocator.retired == 0
    return allocator.stats().pending_bytes == 0


def descriptors():
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("how", ["send", "multiprocessing"])
@pytest.mark.parametrize(("skip", "nbytes"), [(0, 100), (0, 3 * MIB), (2 * MIB - 512, 1024)])
@both
def test_the_receiver_has_the_same_bytes(gpu, how, skip, nbytes, kind):
    allocator = ALLOCATORS[kind]()
    before = allocator.alloc(skip or 256)
    data = np.random.default_rng(nbytes).bytes(nbytes)  # each page has other ones
    block = allocator.alloc(nbytes).copy_from(data)
    received = sent(block, how)
    assert (received.nbytes, received.kind, received.device_id) == (nbytes, "device", 0)
    assert received.allocator is None and not received.readonly
    assert received.address != block.address
    assert content(received) == data
    received.fill(9)
    assert content(block) == b"\t" * nbytes
    assert before.nbytes


@both
def test_slices_and_views_arrive_as_what_they_are(gpu, kind):
    allocator = ALLOCATORS[kind]()
    block = allocator.empty((64, 128), "f4")
    block.copy_from(np.arange(64 * 128, dtype="f4").reshape(64, 128))
    view = sent(block)
    assert (view.shape, view.dtype) == ((64, 128), np.dtype("f4"))
    assert content(view) == content(block)
    part = sent(block.view()[512:1024], "multiprocessing")
    assert content(part) == content(block)[512:1024]


# ---- what keeps the bytes -------------------------------------------------------------------


def overlaps(allocator, at, nbytes):
    """Is a byte of a range handed out, if the allocator hands out all that it can?"""
    blocks = []
    with contextlib.suppress(OutOfMemory):
        while True:
            blocks.append(allocator.alloc(MIB // 2))
    return any(one.address < at + nbytes and at < one.address + one.nbytes for one in blocks)


@pytest.mark.parametrize("stream", [False, True])
@both
def test_they_are_not_reused_while_a_message_or_a_receiver_has_them(gpu, pair, kind, stream):
    allocator = ALLOCATORS[kind]()
    use = new_stream(gpu) if stream else None
    block = filled(allocator.alloc(3 * MIB, stream=use), 5, use)
    at = block.address
    arenapy.send(pair[0], block)
    del block
    assert not settled(allocator) and not overlaps(allocator, at, 3 * MIB)
    allocator.trim()
    received = arenapy.receive(pair[1])
    assert not settled(allocator) and not overlaps(allocator, at, 3 * MIB)
    allocator.trim()
    assert content(received) == b"\5" * 3 * MIB == peek(at, 3 * MIB)
    allocator.check()
    del received
    assert settled(allocator) and overlaps(allocator, at, 3 * MIB)


@both
def test_a_message_that_nobody_receives_gives_them_back(gpu, pair, kind):
    allocator = ALLOCATORS[kind]()
    for _ in range(3):
        arenapy.send(pair[0], allocator.alloc(MIB))
    assert not settled(allocator)
    pair[1].close()
    until(lambda: settled(allocator))


@both
def test_a_block_that_was_sent_many_times(gpu, kind):
    allocator = ALLOCATORS[kind]()
    block = filled(allocator.alloc(MIB), 3)
    kept = [sent(block) for _ in range(40)]
    del block
    while kept:
        assert not settled(allocator) and content(kept[-1]) == b"\3" * MIB
        kept.pop()
    assert settled(allocator)


@both
def test_memory_outlives_its_allocator_for_the_receiver(gpu, kind):
    allocator = ALLOCATORS[kind]()
    received = sent(filled(allocator.alloc(3 * MIB), 4))
    del allocator
    gc.collect()
    assert content(received) == b"\4" * 3 * MIB
    assert gpu.memory.used[0] > 3 * MIB
    del received
    gc.collect()
    Pool(source=cuda.Device()).alloc(1)  # whoever looks for memory lets go of what is over
    cuda.Stream().synchronize()


def test_before_and_after_growth_and_trim(gpu):
    pool = ALLOCATORS["pool"]()
    first = filled(pool.alloc(MIB), 1)
    one = sent(first)
    large = filled(pool.alloc(20 * MIB), 2)
    two = sent(large[10 * MIB : 11 * MIB])
    del large
    assert pool.trim() < 20 * MIB  # a block is kept whole
    assert content(one) == b"\1" * MIB and content(two) == b"\2" * MIB
    grown = pool.grow(first, 4 * MIB)
    gpu.drain()
    assert content(grown)[:MIB] == content(one)
    del two, first
    assert pool.trim() >= 16 * MIB
    three = sent(grown)
    grown.fill(6)
    assert content(three) == b"\6" * 4 * MIB
    del one, three
    pool.check()


def test_a_receiver_waits_for_its_streams_before_it_lets_go(gpu):
    """The pages, and the lease, are there until its kernels are done."""
    pool = ALLOCATORS["pool"]()
    block = pool.alloc(MIB)
    received = sent(block)
    at = block.address
    del block
    stream = new_stream(gpu)
    slowly_fill(gpu, stream, received, 7)
    received.record_stream(stream)
    del received  # cuMemUnmap under a kernel would be an error of the driver
    gc.collect()
    gpu.drain()
    assert peek(at, MIB) == b"\7" * MIB
    until(lambda: settled(pool))


# ---- order ----------------------------------------------------------------------------------


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("how", ["send", "multiprocessing"])
def test_it_is_sent_when_its_streams_are_done(gpu, how, own):
    stream = new_stream(gpu)
    pool = ALLOCATORS["pool"](stream=stream if own else None)
    block = pool.alloc(MIB, stream=None if own else stream)
    slowly_fill(gpu, stream, block, 8)
    assert content(sent(block, how)) == b"\x08" * MIB
    other = new_stream(gpu)
    slowly_fill(gpu, other, block, 9)
    block.record_stream(other)
    assert content(sent(block, how)) == b"\t" * MIB


@pytest.mark.parametrize("named", ["record_stream", "fill"])
def test_a_block_that_a_running_capture_uses_is_not_sent(gpu, pair, named):
    stream, block = new_stream(gpu), ALLOCATORS["pool"]().alloc(MIB)
    gpu.begin_capture(stream.handle_)
    if named == "fill":
        block.fill(7, stream=stream)
    else:
        block.record_stream(stream)
    with pytest.raises(cuda.CudaError, match="captured into a graph"):
        arenapy.send(pair[0], block)
    graph = graph_of(gpu, stream)
    assert content(sent(block)) == content(block)
    gpu.destroy_graph(graph)
    gpu.drain()


def test_a_stream_that_is_captured_is_refused(gpu, pair):
    stream = new_stream(gpu)
    pool = ALLOCATORS["pool"]()
    block = pool.alloc(MIB, stream=stream)
    gpu.begin_capture(stream.handle_)
    inside = pool.alloc(MIB, stream=stream)
    with pytest.raises(cuda.CudaError, match="captured into a graph"):
        arenapy.send(pair[0], block)
    with pytest.raises(cuda.CudaError, match="the graph's"):
        ForkingPickler.dumps(inside)
    graph = graph_of(gpu, stream)
    assert content(sent(block)) == content(block)
    del inside
    gpu.destroy_graph(graph)
    gpu.drain()


# ---- what cannot be ---------------------------------------------------------------------------


@pytest.mark.parametrize("make", [
    lambda: Pool(8 * MIB, cuda.Device()).alloc(100),
    lambda: Bump(MIB, cuda.Device()).alloc(100),
    lambda: Slab(100, 4, cuda.Device(grow=True)).alloc(),
    lambda: Pool(8 * MIB, cuda.DriverPool()).alloc(100),
])  # fmt: skip
def test_memory_that_cannot_be_shared_names_the_remedy(gpu, pair, make):
    block = make()
    for send in (lambda: arenapy.send(pair[0], block), lambda: ForkingPickler.dumps(block)):
        with pytest.raises(BufferError, match=r"cuda\.Device\(grow=True\)"):
            send()
    with pytest.raises(BufferError, match=r"copy_to.*arenapy\.send.*cuda\.Device\(grow=True\)"):
        pickle.dumps(block)


def test_a_device_that_cannot_export(gpu, pair):
    gpu.attributes[DESCRIPTORS] = 0
    pool = ALLOCATORS["pool"]()
    block = pool.alloc(100)
    with pytest.raises(BufferError, match="that can export memory as a descriptor"):
        arenapy.send(pair[0], block)
    assert settled(pool)


@both
def test_what_was_received_is_not_sent_on(gpu, pair, kind):
    allocator = ALLOCATORS[kind]()
    received = sent(allocator.alloc(100))
    with pytest.raises(BufferError, match="were received from another process"):
        arenapy.send(pair[0], received)


@both
def test_nothing_and_closed_blocks_are_refused(gpu, pair, kind):
    allocator = ALLOCATORS[kind]()
    with pytest.raises(BufferError, match="there is nothing to share"):
        arenapy.send(pair[0], allocator.alloc(0))
    block = allocator.alloc(100)
    block.release()
    with pytest.raises(ValueError, match="closed"):
        arenapy.send(pair[0], block)


@both
def test_a_device_that_the_receiver_does_not_see(gpu, monkeypatch, kind):
    allocator = ALLOCATORS[kind]()
    message, place = sharing.lend(allocator.alloc(100))
    with pytest.raises(BufferError, match="CUDA_VISIBLE_DEVICES"):
        sharing.receive_buffer(message, b"x" * 16 + place[16:], 100, False, None)
    message.close()
    assert settled(allocator)


@pytest.mark.parametrize(("skip", "nbytes", "says"), [
    (GRANULE, 100, "at 2097152 of a page"),
    (0, 0, "0 bytes at 0"),
    (0, 1 << 62, "bytes at 0"),
    (0, GRANULE + 1, "2 descriptors, and 3 are needed"),
])  # fmt: skip
@both
def test_a_message_that_lies(gpu, skip, nbytes, says, kind):
    allocator = ALLOCATORS[kind]()
    message, place = sharing.lend(allocator.alloc(100))
    with message, pytest.raises(ValueError, match=says):
        sharing.receive_buffer(message, sharing.PLACE.pack(place[:16], skip), nbytes, False, None)
    assert settled(allocator)


@both
def test_a_message_with_other_descriptors(gpu, tmp_path, kind):
    allocator = ALLOCATORS[kind]()
    _, place = sharing.lend(allocator.alloc(100))
    with open(tmp_path / "x", "wb+") as file:
        with pytest.raises(ValueError, match="0 descriptors"):  # it is no socket
            sharing.receive_buffer(vm.reopen(file.fileno()), place, 100, False, None)
        bundle = vm.bundle([vm.reopen(file.fileno()), vm.reopen(file.fileno())])
        with pytest.raises(cuda.CudaError):  # the driver does not know it
            sharing.receive_buffer(bundle, place, 100, False, None)
    here, there = socket.socketpair()
    with here, there, pytest.raises(ValueError, match="0 descriptors"):  # and it does not wait
        sharing.receive_buffer(vm.bundle([]), place, 100, False, None)


def test_a_peer_that_lies_about_the_device(pair):
    head = messages.HEAD.pack(b"arenapy1", 6, 0, 0, 0, 0, 100, 0)  # an array there
    socket.send_fds(pair[0], [head], [pair[0].fileno()])
    with pytest.raises(ValueError, match="is not the head"):
        arenapy.receive(pair[1])


SENDING = ["cuMemRetainAllocationHandle", "cuMemExportToShareableHandle", "cuDeviceGetUuid"]
RECEIVING = [
    "cuDeviceGetUuid", "cuMemAddressReserve", "cuMemImportFromShareableHandle", "cuMemMap",
    "cuMemSetAccess", "cuMemAlloc", "cuMemGetAllocationGranularity",
]  # fmt: skip


@pytest.mark.parametrize("result", [INVALID_VALUE, OUT_OF_MEMORY])
@pytest.mark.parametrize("nth", [1, 2])
@pytest.mark.parametrize("name", SENDING)
@both
def test_a_call_that_fails_when_it_is_sent(gpu, pair, name, nth, result, kind):
    allocator = ALLOCATORS[kind]()
    block = allocator.alloc(3 * MIB)
    arenapy.send(pair[0], block)
    arenapy.receive(pair[1])
    before = descriptors(), dict(gpu.memory.used), len(gpu.allocations.things)
    gpu.fail_at(name, nth, result)
    with contextlib.suppress(cuda.CudaError, OutOfMemory):
        arenapy.send(pair[0], block)
        assert nth == 2 and name == "cuDeviceGetUuid"  # it is called once
        arenapy.receive(pair[1])
    gpu.plan.clear()
    gc.collect()
    assert (descriptors(), dict(gpu.memory.used), len(gpu.allocations.things)) == before
    del block
    assert settled(allocator)
    allocator.check()


@pytest.mark.parametrize("result", [INVALID_VALUE, OUT_OF_MEMORY])
@pytest.mark.parametrize("nth", [1, 2])
@pytest.mark.parametrize("name", RECEIVING)
@both
@pytest.mark.sampled
def test_a_call_that_fails_when_it_is_received(gpu, pair, name, nth, result, kind):
    allocator = ALLOCATORS[kind]()
    block = allocator.alloc(3 * MIB)
    arenapy.send(pair[0], block)
    arenapy.receive(pair[1])
    before = descriptors(), dict(gpu.memory.used), len(gpu.memory.reserved)
    arenapy.send(pair[0], block)
    gpu.fail_at(name, nth, result)
    with contextlib.suppress(cuda.CudaError, OutOfMemory):
        arenapy.receive(pair[1])
        assert nth == 2
    gpu.plan.clear()
    gc.collect()
    assert (descriptors(), dict(gpu.memory.used), len(gpu.memory.reserved)) == before
    del block
    assert settled(allocator)
    allocator.check()


@pytest.mark.parametrize("name", ["cuMemFree", "cuMemUnmap", "cuMemAddressFree"])
@both
def test_an_end_that_fails_is_tried_again_and_the_lease_waits_for_it(gpu, name, kind):
    allocator = ALLOCATORS[kind]()
    received = sent(allocator.alloc(MIB))
    gpu.fails[name] = INVALID_VALUE
    del received
    gc.collect()
    assert not settled(allocator)
    gpu.fails.clear()
    sent(allocator.alloc(MIB))
    assert settled(allocator)


@both
def test_no_descriptor_is_leaked(gpu, kind):
    allocator = ALLOCATORS[kind]()
    block = allocator.alloc(5 * MIB)
    kept = sent(block)
    sent(block, "multiprocessing")  # whose own server starts with the first
    before = descriptors()
    for how in ("send", "multiprocessing"):
        for _ in range(5):
            sent(block, how)
    gc.collect()
    assert descriptors() == before
    assert kept.nbytes


def test_memory_of_no_device_that_the_host_cannot_access(pair):
    memory = np.zeros(4096, "u1")
    region = arenapy.Region.from_address(
        memory.ctypes.data, 4096, owner=memory, kind="other", host_accessible=False
    )
    with pytest.raises(BufferError, match=r"cuda\.Device\(grow=True\)"):
        arenapy.send(pair[0], region.buffer())


@both
def test_a_forked_child_cannot_receive(gpu, kind):
    allocator = ALLOCATORS[kind]()
    message, place = sharing.lend(allocator.alloc(100))
    refused_in_a_child(gpu, lambda: sharing.receive_buffer(message, place, 100, False, None))


@pytest.mark.parametrize("nbytes", [1, 63, 64, 65, 200])
def test_a_bundle_of_many_descriptors(nbytes):
    before = descriptors()
    files = [vm.memfd(b"one", 4096) for _ in range(nbytes)]
    names = [vm.identity(one) for one in files]
    bundle = vm.bundle(files)
    del files
    assert descriptors() == before + 1
    found = vm.unbundled(bundle.fileno())
    assert [vm.identity(one) for one in found] == names
    assert not any(os.get_inheritable(one.fileno()) for one in found)
    assert vm.unbundled(bundle.fileno()) == []
    del found, bundle
    assert descriptors() == before


def test_a_socket_that_is_no_bundle_is_read_once(pair):
    """Its other end may write without end."""
    pair[1].setblocking(False)
    pair[0].send(b"many bytes")
    assert vm.unbundled(pair[1].fileno()) == []
    assert pair[1].recv(100) == b"any bytes"


# ---- real processes -----------------------------------------------------------------------------

CHILD = """
import os, socket, sys
sys.path[:0] = sys.argv[2:]
import arenapy
from cuda_support import content
from simulated_driver import simulated

with simulated() as driver, driver.on(0):
    sock = socket.socket(fileno=int(sys.argv[1]))
    received = arenapy.receive(sock)
    if sock.recv(1) == b"f":
        if os.fork():
            os._exit(0)
        sock.sendall(b"f")
        sock.recv(1)
        os._exit(0)
    assert content(received) == bytes([1]) * received.nbytes
    received.fill(2)
    driver.drain()
    sock.sendall(b"x")
    sock.recv(1)
    assert content(received) == bytes([2]) * received.nbytes
    received.release()
    del received
"""


@contextlib.contextmanager
def another():
    here, there = socket.socketpair()
    with here, there:
        support = [str(Path(__file__).parents[1] / "support"), str(Path(__file__).parent)]
        command = [sys.executable, "-c", CHILD, str(there.fileno()), *support]
        process = subprocess.Popen(command, pass_fds=[there.fileno()])
        there.close()
        try:
            yield process, here
        finally:
            process.kill()
            process.wait()


@pytest.mark.parametrize("end", ["exit", "kill"])
@pytest.mark.full
def test_another_process_has_the_same_bytes_until_it_ends(gpu, end):
    pool = ALLOCATORS["pool"]()
    block = filled(pool.alloc(3 * MIB), 1)
    at = block.address
    with another() as (process, sock):
        arenapy.send(sock, block)
        sock.sendall(b"g")
        assert sock.recv(1) == b"x"
        assert content(block) == b"\2" * 3 * MIB
        del block
        assert not settled(pool) and not overlaps(pool, at, 3 * MIB)
        if end == "exit":
            sock.sendall(b"g")
            assert process.wait(60) == 0
        else:
            os.kill(process.pid, signal.SIGKILL)
            process.wait(60)
        until(lambda: settled(pool))
        assert overlaps(pool, at, 3 * MIB)


def test_a_forked_child_of_the_receiver_keeps_the_lease(gpu):
    pool = ALLOCATORS["pool"]()
    with another() as (process, sock):
        arenapy.send(sock, pool.alloc(MIB))
        sock.sendall(b"f")
        assert sock.recv(1) == b"f"
        assert process.wait(60) == 0
        assert not settled(pool)
        sock.sendall(b"g")
        until(lambda: settled(pool))


def test_the_descriptor_of_leases_is_closed_by_other_code(run_script):
    support = [str(Path(__file__).parents[1] / "support")]
    run_script(f"""
        import os, socket, sys
        sys.path[:0] = {support!r}
        import arenapy
        from arenapy import Pool, cuda
        from simulated_driver import simulated

        with simulated() as driver, driver.on(0):
            pool = Pool(8 << 20, cuda.Device(grow=True))
            here, there = socket.socketpair()
            arenapy.send(here, pool.alloc(100))
            arenapy.receive(there)
            for fd in set(range(3, 64)) - {{here.fileno(), there.fileno()}}:
                try:
                    os.close(fd)
                except OSError:
                    pass
            others = [os.open("/dev/null", os.O_RDWR) for _ in range(30)]
            assert pool.stats().pending_bytes, pool.stats()
            try:
                arenapy.send(here, pool.alloc(100))
            except OSError as error:
                assert "do not close descriptors" in str(error), error
            else:
                raise AssertionError("it was sent")
            os._exit(0)
    """)


# ---- any order of all that happens -----------------------------------------------------------


class Sharing(Acting):
    """As other suites, with blocks that other processes have."""

    def __init__(self):
        super().__init__()
        self.received = []

    @when_there(block=one_of(lambda self: self.blocks))
    def send(self, block):
        self.note("send", block.address)
        if block.writer not in (None, 1):
            block.buffer.record_stream(self.objects[block.writer])
        try:
            got = sent(block.buffer)
        except OutOfMemory:
            return
        self.received.append((got, block.pattern))

    @when_there(one=one_of(lambda self: self.received))
    def stop_receiving(self, one):
        self.note("stop receiving", one[0].address)
        self.received.remove(one)

    def nothing_is_overwritten(self):
        super().nothing_is_overwritten()
        for got, pattern in getattr(self, "received", ()):
            assert content(got) == pattern

    def end(self):
        self.driver.drain()
        self.received.clear()
        super().end()


@both
@pytest.mark.sampled(full=1)
def test_streams_and_receivers(kind):
    case = type(f"SharingOf{kind.title()}", (Sharing,), {
        "make": lambda self: ALLOCATORS[kind](),
    }).TestCase  # fmt: skip
    case.settings = settings(
        case.settings, max_examples=max(10, settings.default.max_examples // 4)
    )
    case("runTest").runTest()


def test_the_door_is_open_without_an_import(run_script):
    """A receiver that has not imported arenapy.cuda gets it."""
    run_script("""
        import sys
        import arenapy
        from arenapy.memory import shared
        assert "arenapy.cuda.sharing" not in sys.modules
        try:
            shared.receive_of_device(None, b"", 0, False, None)
        except TypeError:
            pass
        assert "arenapy.cuda.sharing" in sys.modules
    """)
    assert shared.is_on_device is not None
