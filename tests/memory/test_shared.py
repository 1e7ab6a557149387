"""Shared memory between processes: handles, leases, and what may not be handed out again.

The other processes are real ones, of every start method. They talk through pipes, so that each
step is known to have happened before the next; nothing here waits for a time to pass.
"""

import contextlib
import copyreg
import ctypes
import gc
import multiprocessing as mp
import os
import pickle
import resource
import signal
import sys
import time
import warnings
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import resource_sharer
from multiprocessing.context import set_spawning_popen
from multiprocessing.reduction import ForkingPickler

import numpy as np
import pytest
from numpy._core import multiarray

from arenapy import Buffer, Bump, Host, Pool, Shared, numpy_memory
from arenapy.linux import vm
from arenapy.memory import shared

pytestmark = pytest.mark.sampled

METHODS = ["spawn", "fork", "forkserver"]


def receiver(pipe):
    """Serve commands: keep what is sent, read it, write it, drop it."""
    kept = {}
    while True:
        command, *arguments = pipe.recv()
        if command == "keep":
            kept[arguments[0]] = arguments[1]
            buffer = arguments[1]
            pipe.send((buffer.nbytes, buffer.kind, buffer.allocator is None, buffer.readonly))
        elif command == "read":
            pipe.send(bytes(kept[arguments[0]]))
        elif command == "write":
            kept[arguments[0]].fill(arguments[1])
            pipe.send(None)
        elif command == "add":
            array, more = arguments
            array += more
            kept["array"] = array
            del array
            pipe.send(None)
        elif command == "return":
            pipe.send(kept["array"][::2])
        elif command == "faults":
            np.frombuffer(bytes(1 << 20), "u1")[::4096].sum()  # the code itself is faulted in
            start = vm.minor_faults()
            total = int(np.frombuffer(kept[arguments[0]], "u1")[::4096].sum())
            pipe.send((vm.minor_faults() - start, total))
        elif command == "region":
            kept["region"] = arguments[0]
            pipe.send(arguments[0].nbytes)
        elif command == "cut":
            kept[arguments[2]] = kept["region"].buffer(arguments[0], arguments[1])
            pipe.send(None)
        elif command == "drop":
            del kept[arguments[0]]
            buffer = None
            arguments.clear()
            gc.collect()
            pipe.send(None)
        elif command == "close":  # as daemons do; other files get the numbers
            for fd in set(range(3, 256)) - {pipe.fileno()}:
                with contextlib.suppress(OSError):
                    os.close(fd)
            kept["others"] = [os.open("/dev/null", os.O_RDONLY) for _ in range(20)]
            pipe.send(None)
        elif command == "exec":
            os.execv("/bin/sleep", ["sleep", "60"])
        elif command == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        else:
            return


class Other:
    """A receiver process."""

    def __init__(self, method):
        context = mp.get_context(method)
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=receiver, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()

    def __call__(self, *command):
        self.pipe.send(command)
        assert self.pipe.poll(60), "the other process does not answer"
        return self.pipe.recv()

    def kill(self):
        self.pipe.send(("die",))
        self.process.join(60)
        assert self.process.exitcode == -signal.SIGKILL

    def close(self):
        with contextlib.suppress(BrokenPipeError):  # it ends by itself
            if self.process.is_alive():
                self.pipe.send(("stop",))
        self.process.join(60)
        self.pipe.close()


@pytest.fixture(params=METHODS)
def other(request):
    process = Other(request.param)
    yield process
    process.close()


@pytest.fixture(params=[False, True], ids=["one piece", "grow"])
def arena(request):
    if not request.param:
        return Bump(1 << 20, source=Shared())
    arena = Bump(1 << 16, Shared(grow=True), 64 << 20)
    arena.alloc((1 << 20) - (1 << 16)).release()
    arena.trim(1 << 20)  # it has grown, and shrunk to what the other one has
    return arena


def account(arena):
    arena.check()
    s = arena.stats()
    total = s.live_bytes + s.free_bytes + s.retired_bytes + s.pending_bytes + s.padding_bytes
    assert total == s.capacity
    return s


def freed(arena):
    """Has everything come back? multiprocessing's helper thread closes its copies in its time."""
    deadline = time.monotonic() + 30
    while arena.remaining < arena.capacity and time.monotonic() < deadline:
        time.sleep(0.005)
    return account(arena).pending_bytes == 0 and arena.remaining == arena.capacity


def overlaps(arena, address, nbytes):
    """Can the arena hand out a byte of this range? Fills all of it with blocks to see."""
    blocks, found = [], False
    mark = arena.mark()
    while arena.remaining:
        block = arena.alloc(min(arena.stats().largest_free_extent, 4096), 1)
        found |= block.address < address + nbytes and address < block.address + block.nbytes
        blocks.append(block)
    arena.reset(mark)
    return found


def test_a_buffer_crosses_without_a_copy(arena, other):
    buffer = arena.alloc(5000)
    buffer.fill(3)
    assert other("keep", "a", buffer) == (5000, "shared", True, False)
    assert other("read", "a") == bytes([3]) * 5000
    buffer.fill(4)
    assert other("read", "a") == bytes([4]) * 5000
    other("write", "a", 5)
    assert bytes(buffer) == bytes([5]) * 5000


def test_slices_and_views_cross_as_what_they_are(arena, other):
    buffer = arena.alloc(4096)
    buffer.array((1024,), "f4")[:] = np.arange(1024)
    assert other("keep", "slice", buffer[100:164])[0] == 64
    assert other("read", "slice") == bytes(buffer[100:164])
    view = buffer.view((32, 32), "f4")
    assert other("keep", "view", view)[0] == 4096
    assert other("read", "view") == bytes(view)


def test_the_receiver_finds_the_pages_populated(arena, other):
    buffer = arena.alloc(900_000)
    buffer.fill(1)
    other("keep", "a", buffer)
    faults, total = other("faults", "a")
    assert total == len(range(0, 900_000, 4096))
    assert faults < 40, f"{faults} faults for 220 pages"


def test_sent_bytes_are_not_reused_until_the_receiver_lets_go(arena, other):
    buffer = arena.alloc(3000)
    address = buffer.address
    buffer.fill(7)
    other("keep", "a", buffer)
    assert buffer.held
    del buffer
    arena.reset()
    stats = account(arena)
    assert stats.pending_bytes == 3000
    assert not overlaps(arena, address, 3000)
    assert other("read", "a") == bytes([7]) * 3000
    other("drop", "a")
    assert freed(arena)
    assert overlaps(arena, address, 3000)


def test_a_killed_receiver_lets_go(arena, other):
    buffer = arena.alloc(3000)
    other("keep", "a", buffer)
    del buffer
    arena.reset()
    assert account(arena).pending_bytes == 3000
    other.kill()
    assert freed(arena)


@pytest.mark.parametrize("what", ["a Buffer", "a window of a Region"])
def test_a_receiver_that_closes_its_descriptors_keeps_its_lease(arena, other, what):
    buffer = arena.alloc(4096)
    address = buffer.address
    buffer.fill(7)
    if what == "a Buffer":
        other("keep", "a", buffer)
    else:
        other("region", arena.regions[0])
        other("cut", address - arena.regions[0].address, 4096, "a")
    other("close")
    del buffer
    arena.reset()
    assert account(arena).pending_bytes == 4096
    assert not overlaps(arena, address, 4096)
    assert other("read", "a") == bytes([7]) * 4096
    other("drop", "a")
    if what == "a Buffer":
        assert freed(arena)
    other.kill()
    assert freed(arena)


def test_a_receiver_that_executes_another_program_lets_go(arena, other):
    buffer = arena.alloc(4096)
    other("keep", "a", buffer)
    del buffer
    arena.reset()
    assert account(arena).pending_bytes == 4096
    other.pipe.send(("exec",))
    assert freed(arena)
    assert other.process.is_alive()
    other.process.kill()


def own(pipe):
    """Be the owner: send a block, and answer what is pending once it is dropped."""
    arena = Bump(1 << 20, source=Shared())
    block = arena.alloc(3000)
    block.fill(6)
    pipe.send(block)
    pipe.recv()
    del block
    arena.reset()
    pipe.send(arena.stats().pending_bytes)
    pipe.recv()


def test_the_owner_is_killed():
    context = mp.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=own, args=(theirs,), daemon=True)
    process.start()
    block = pipe.recv()
    pipe.send("go on")
    assert pipe.recv() == 3000
    process.kill()
    process.join(60)
    assert bytes(block) == bytes([6]) * 3000
    block.fill(1)
    again = pickle.loads(pickle.dumps(block))
    ours, mine = mp.Pipe()
    ours.send(block)  # it goes on being shared
    received = mine.recv()
    received.fill(2)
    assert bytes(block) == bytes([2]) * 3000 and bytes(again) == bytes([1]) * 3000


def test_a_sender_that_closes_its_descriptors_is_told(run_script):
    run_script("""
        import os
        from multiprocessing.reduction import ForkingPickler
        from arenapy import Bump, Shared
        arena = Bump(1 << 16, Shared())
        block = arena.alloc(100)
        os.closerange(3, 100)
        other = [os.open("/dev/null", os.O_RDWR) for _ in range(20)]
        for sent in (block, arena.regions[0]):
            try:
                ForkingPickler.dumps(sent)
            except OSError as error:
                assert "closed by other code" in str(error), error
            else:
                raise AssertionError("sent what is not ours")
        del arena, block, sent
        for fd in other:
            os.fstat(fd)
    """)


def test_a_message_under_way_is_a_lease(arena):
    """Between the sender's pickling and the receiver's unpickling the bytes are safe."""
    ours, theirs = mp.Pipe()
    buffer = arena.alloc(3000)
    address = buffer.address
    buffer.fill(9)
    ours.send(buffer)
    del buffer
    arena.reset()
    assert account(arena).pending_bytes == 3000
    assert not overlaps(arena, address, 3000)
    received = theirs.recv()
    assert bytes(received) == bytes([9]) * 3000 and received.address != address
    arena.reset()
    assert account(arena).pending_bytes == 3000
    del received
    assert freed(arena)
    ours.close()
    theirs.close()


def test_a_scope_ends_without_python_code_when_a_message_has_arrived():
    """In which a signal's exception would leave the scope as it is."""

    class Child:
        pid = None

        def duplicate_for_child(self, fd):
            return fd

        DupFd = duplicate_for_child  # which pickles it

    arena, came = Bump(1 << 20, Shared()), []
    message, before = arena.alloc(1000), arena.used
    child = Child()
    set_spawning_popen(child)
    try:
        ForkingPickler.dumps(message)
    finally:
        set_spawning_popen(None)
    with arena.scope():
        arena.alloc(5000)
        child.pid = 1
        sys.setprofile(lambda frame, event, _: came.append(frame.f_code) if event == "call" else 0)
    sys.setprofile(None)
    assert came == [] and arena.used == before


def test_unread_messages_of_a_killed_receiver(arena, other):
    """multiprocessing in the sender has the descriptor of each until it is told to let go."""
    os.kill(other.process.pid, signal.SIGSTOP)
    for _ in range(20):
        other.pipe.send(arena.alloc(4096))
    other.process.kill()
    other.process.join(60)
    arena.reset()
    assert account(arena).pending_bytes == 20 * 4096
    resource_sharer.stop()
    assert freed(arena)


def test_newest_block_is_not_moved_back_over_while_leased(arena, other):
    buffer = arena.alloc(100)
    other("keep", "a", buffer)
    used = arena.used
    buffer.release()
    del buffer
    assert arena.used == used
    assert arena.alloc(100).address != arena.regions[0].address
    account(arena)


def test_the_sender_outlived_by_its_buffer(other):
    arena = Bump(1 << 16, source=Shared())
    buffer = arena.alloc(1000)
    buffer.fill(1)
    other("keep", "a", buffer)
    del arena, buffer
    gc.collect()
    assert other("read", "a") == bytes([1]) * 1000


def test_a_region_crosses_and_its_buffers_there_are_leases(arena, other):
    block = arena.alloc(4096)
    offset = block.address - arena.regions[0].address
    block.fill(6)
    assert other("region", arena.regions[0]) == 1 << 20
    other("cut", offset, 4096, "part")
    assert other("read", "part") == bytes([6]) * 4096
    address = block.address
    del block
    arena.reset()
    assert account(arena).pending_bytes == 4096
    assert not overlaps(arena, address, 4096)
    other("drop", "part")
    assert freed(arena)


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_buffer_as_an_argument_of_a_process(arena, method):
    context = mp.get_context(method)
    ours, theirs = context.Pipe()
    buffer = arena.alloc(2000)
    process = context.Process(target=fill_and_say, args=(buffer, theirs))
    process.start()
    assert ours.poll(60) and ours.recv() == "filled"
    assert bytes(buffer) == bytes([8]) * 2000
    del buffer
    arena.reset()
    assert account(arena).pending_bytes == 2000
    ours.send("go")
    process.join(60)
    assert process.exitcode == 0
    assert freed(arena)


def fill_and_say(buffer, pipe):
    buffer.fill(8)
    pipe.send("filled")
    assert pipe.recv() == "go"


def test_no_descriptor_is_leaked(arena):
    ours, theirs = mp.Pipe()
    ours.send(arena.alloc(10))  # multiprocessing starts its helper thread and sockets
    del_ = theirs.recv()
    del del_
    arena.reset()
    assert freed(arena)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        ours.send(arena.alloc(100))
        received = theirs.recv()
        received.fill(1)
        del received
        arena.reset()
    assert freed(arena)
    assert len(os.listdir("/proc/self/fd")) <= before + 1


def test_plain_pickle_of_what_has_no_copy(arena):
    with pytest.raises(TypeError, match="multiprocessing"):
        pickle.dumps(arena.regions[0])
    with pytest.raises(TypeError, match="process that made it"):
        pickle.dumps(arena)


def test_buffers_of_other_kinds_cross_as_copies():
    ours, theirs = mp.Pipe()
    buffer = Bump(1 << 16, source=Host()).alloc(100)
    buffer.fill(3)
    ours.send(buffer)
    ours.send(Bump(1 << 16, source=Shared()).alloc(0))
    assert bytes(theirs.recv()) == bytes([3]) * 100
    assert theirs.recv().nbytes == 0


def test_debug_filling_spares_what_another_process_sees(other):
    arena = Bump(1 << 16, source=Shared(), debug=True)
    with arena.scope():
        buffer = arena.alloc(500)
        buffer.fill(5)
        other("keep", "a", buffer)
        del buffer
    assert other("read", "a") == bytes([5]) * 500
    account(arena)


def receive_many(pipe):
    """Keep more Buffers than there may be descriptors, and send the last one back."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    kept = [pipe.recv() for _ in range(pipe.recv())]
    pipe.send(sum(bytes(block)[0] for block in kept))
    pipe.send(kept[-1])
    while (dropped := pipe.recv()) is not None:
        del kept[:dropped]
        gc.collect()
        pipe.send(len(os.listdir("/proc/self/fd")))


def test_a_receiver_of_more_buffers_than_descriptors(arena):
    context = mp.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=receive_many, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    blocks = [arena.alloc(64) for _ in range(100)]
    pipe.send(len(blocks))
    for block in blocks:
        block.fill(1)
        pipe.send(block)
    assert pipe.recv() == 100
    back = pipe.recv()
    assert bytes(back) == bytes([1]) * 64
    del back, block
    blocks.clear()
    arena.reset()
    assert account(arena).pending_bytes == 6400
    pipe.send(99)
    few = pipe.recv()
    deadline = time.monotonic() + 30
    while arena.stats().pending_bytes > 64 and time.monotonic() < deadline:
        arena.reset()
    assert account(arena).pending_bytes == 64  # no descriptor keeps the first one's lease
    pipe.send(1)
    assert pipe.recv() == few - 1  # of the file
    assert freed(arena)
    pipe.send(None)
    process.join(60)


# ---- arrays --------------------------------------------------------------------------------


def test_what_a_worker_writes_to_an_array_is_seen(arena, other):
    x = arena.zeros((10, 10))
    other("add", x, 1)
    assert (x == 1).all()
    other("add", x[2:4, ::-3], 2)
    assert x.sum() == 100 + 2 * 8 and (x[2, ::-3] == 3).all()
    back = other("return")
    back[:] = 50
    assert x.sum() == 100 + 2 * 8 - 4 * 3 + 4 * 50
    del back
    address = x.__array_interface__["data"][0]
    del x
    arena.reset()
    # From the first byte of the view to its last.
    assert account(arena).pending_bytes == 8 + (80 + 72)
    assert not overlaps(arena, address + 160, 8 + 80 + 72)
    other.kill()
    assert freed(arena)


def add_one(x):
    x += 1
    return x[:1]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.full
def test_arrays_as_arguments_and_results(method):
    pool = Pool(source=Shared())
    arrays = [pool.zeros(100) for _ in range(8)]
    with ProcessPoolExecutor(2, mp.get_context(method)) as executor:
        for result, x in zip(executor.map(add_one, arrays), arrays, strict=True):
            assert (x == 1).all()
            result[:] = 5
            assert x[0] == 5


def test_arrays_that_are_not_shared_cross_as_copies(arena):
    ours, theirs = mp.Pipe()
    for x in (np.arange(10), Pool().zeros(10), arena.zeros(0), np.array([None, "a"])):
        ours.send(x)
        y = theirs.recv()
        assert (x == y).all() and y.dtype == x.dtype and not np.shares_memory(x, y)
        assert not isinstance(y.base, Buffer)
    x = arena.zeros(10)
    for y in (pickle.loads(pickle.dumps(x)), pickle.loads(pickle.dumps(x, 5)), x.copy()):
        y += 1
        assert not x.any()


def test_an_array_that_a_buffer_does_not_have_crosses_as_a_copy(arena):
    """C code may give an array any base, to keep it alive."""
    capsule = ctypes.pythonapi.PyCapsule_GetPointer
    capsule.restype, capsule.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    functions = ctypes.cast(capsule(multiarray._ARRAY_API, None), ctypes.POINTER(ctypes.c_void_p))
    set_base = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.py_object)(functions[282])
    x, block = np.arange(10), arena.alloc(100)
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(block))  # which it takes
    assert set_base(x, block) == 0 and x.base is block
    ours, theirs = mp.Pipe()
    ours.send(x)
    y = theirs.recv()
    assert (x == y).all() and y.base is None


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_other_arrays_cross_with_every_protocol(arena, protocol):
    for x in (np.arange(10), np.asfortranarray(np.ones((2, 3)))[:, ::2], np.array([None])):
        y = pickle.loads(ForkingPickler.dumps(x, protocol))
        assert (x == y).all()
    x = np.array([None])
    x[0] = x  # it contains itself
    y = pickle.loads(ForkingPickler.dumps(x, protocol))
    assert y[0] is y


@pytest.fixture
def not_warned(monkeypatch):
    monkeypatch.setattr(shared, "_warned", False)


def of_numpy(pool):
    with numpy_memory(pool):
        return np.ones(1000)


def of_another_library(pool):
    return np.from_dlpack(pool.zeros(1000))


def of_a_closed_buffer(pool):
    block = pool.alloc(800)
    x = block.array()
    block.release()
    return x


def of_stride_tricks(pool):
    return np.lib.stride_tricks.sliding_window_view(pool.zeros(100), 10)  # its base is no array


def send_and_be_told(connection, x, says):
    with pytest.warns(RuntimeWarning, match=says) as said:
        connection.send(x)
    assert said[0].filename == __file__


@pytest.mark.parametrize(
    "make", [of_numpy, of_another_library, of_a_closed_buffer, of_stride_tricks]
)
def test_an_array_of_shared_memory_that_is_copied_is_told_of_once(make, not_warned):
    pool = Pool(source=Shared())
    x = make(pool)
    ours, theirs = mp.Pipe()
    says = rf"an array of {x.nbytes} bytes in Shared .* copied.*empty\(\)"
    send_and_be_told(ours, x, says)
    assert (theirs.recv() == x).all()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours.send(x)
        ours.send(pool.copy(x))


def a_matrix(pool):
    return pool.zeros((4, 4)).view(np.matrix)


def a_recarray(pool):
    return pool.zeros(10, "i4,f4").view(np.recarray)


def a_masked_array(pool):
    return np.ma.masked_array(pool.zeros((4, 4)))


@pytest.mark.parametrize("make", [a_matrix, a_recarray, a_masked_array])
def test_an_array_of_a_subclass_is_copied_and_told_of_once(make, not_warned):
    assert np.ma, "it has to be imported before"
    pool = Pool(source=Shared())
    x = make(pool)
    ours, theirs = mp.Pipe()
    says = rf"a {type(x).__name__} of {x.nbytes} bytes in Shared .* copied.*view\(numpy.ndarray\)"
    send_and_be_told(ours, x, says)
    received = theirs.recv()
    assert type(received) is type(x) and received.tolist() == x.tolist()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours.send(x)


def frozen(dtype):
    return np.frombuffer(bytes(range(16)), dtype)


ELSEWHERE = [
    frozen(">i4"), frozen("<f8"), np.asfortranarray(np.ones((2, 3))), np.ones(6)[::2], np.ones(0),
    np.zeros(3, "i4,f8"), np.array(["a", None], object), np.ones((2, 2)).view(np.matrix),
    np.rec.array([(1, 2.0)]), np.ma.masked_array([1, 2], [0, 1]), np.float64(3.5),
]  # fmt: skip


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("array", ELSEWHERE, ids=lambda x: type(x).__name__)
def test_an_array_elsewhere_is_pickled_as_without_us(array, protocol):
    shared.install()
    received = pickle.loads(ForkingPickler.dumps([array, array], protocol))
    expected = pickle.loads(pickle.dumps([array, array], protocol))[0]
    assert received[0] is received[1]
    assert (type(received[0]), received[0].dtype) == (type(array), expected.dtype)
    assert received[0].tolist() == array.tolist()
    assert received[0].strides == expected.strides
    assert received[0].flags.writeable == expected.flags.writeable


def test_what_the_program_registered_with_copyreg_is_asked(monkeypatch):
    asked = []

    def mine(array):
        asked.append(type(array))
        return array.__reduce_ex__(2)

    pool = Pool(source=Shared())
    for kind in (np.ndarray, np.matrix, np.recarray):
        monkeypatch.setitem(copyreg.dispatch_table, kind, mine)
        ForkingPickler.dumps(np.zeros((2, 2)).view(kind))
    assert asked == [np.ndarray, np.matrix, np.recarray]
    handle = ForkingPickler.dumps(pool.zeros(10))
    assert asked[3:] == [], "an array of Shared memory goes as a handle"
    pickle.loads(handle)


@pytest.mark.parametrize("kind", [np.ndarray, np.matrix, np.recarray, np.ma.MaskedArray])
def test_what_the_program_registered_with_multiprocessing_stays(kind, monkeypatch):
    def mine(array):
        raise AssertionError

    monkeypatch.setitem(ForkingPickler._extra_reducers, kind, mine)
    pool = Pool(source=Shared())
    pool.zeros(10)
    assert ForkingPickler._extra_reducers[kind] is mine


def test_nothing_is_said_of_arrays_elsewhere(not_warned):
    pool = Pool(source=Shared())
    host = Pool()
    ours, _theirs = mp.Pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with numpy_memory(host):
            ours.send(np.ones(1000))
        ours.send(np.ones(1000))
        ours.send(pool.zeros(10))
        ours.send(pool.zeros(0))
        ours.send(np.ones((4, 4)).view(np.matrix))


def put_and_end(pipe):
    pipe.send(Pool(source=Shared()).zeros(100))


def test_the_sender_of_an_array_has_ended():
    context = mp.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=put_and_end, args=(theirs,))
    process.start()
    process.join()
    with pytest.raises(ConnectionError, match=r"800 bytes.*sender has ended.*arenapy.send\(\)"):
        ours.recv()


def test_a_forked_child_returns_what_it_inherited(arena):
    x = arena.zeros(100)
    ours, theirs = mp.Pipe()
    process = mp.get_context("fork").Process(target=return_inherited, args=(theirs, x))
    process.start()
    y = ours.recv()
    y += 1
    assert (x == 1).all()
    ours.send("end")
    process.join()
    assert process.exitcode == 0


def return_inherited(pipe, x):
    pipe.send(x)
    pipe.recv()


def test_a_limit_on_files_is_named(run_script):
    run_script("""
        import resource
        from arenapy import OutOfMemory, Shared

        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
        try:
            Shared().region(1 << 20)
        except OutOfMemory as error:
            assert "97.66 KiB (RLIMIT_FSIZE)" in str(error), error
        else:
            raise AssertionError("it was made")
    """)
