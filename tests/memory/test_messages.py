"""`arenapy.send` and `arenapy.receive`: memory over Unix sockets, between any two programs.

The other side is a program of its own where it is killed or is to know nothing of this one. It is
killed at random moments; what has to be true afterwards is true whenever that was.
"""

import array
import contextlib
import gc
import multiprocessing as mp
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from multiprocessing.connection import Client, Listener
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace

import numpy as np
import pytest
from children import in_child
from numpy._core._rational_tests import rational

import arenapy
from arenapy import Bump, OutOfMemory, Pool, Shared, Slab
from arenapy.memory import messages

N = 16 << 10
STRUCTURED = np.dtype([("a", "<i2"), ("b", "<f8", (2,)), ("c", "S3")])
OVERLAPPING = {"names": ["a", "b"], "formats": ["i4", "i2"], "offsets": [0, 2], "itemsize": 16}
FIELDS = [
    STRUCTURED[["c", "a"]],
    np.dtype(OVERLAPPING | {"titles": [None, "title"]}),
    np.dtype([("a", "i1"), ("b", STRUCTURED, (2,))], align=True),
    np.dtype((np.record, [("a", "i4"), ("b", np.dtype((np.record, STRUCTURED)))])),
]


@pytest.fixture
def pair():
    here, there = socket.socketpair()
    with here, there:
        yield here, there


@pytest.fixture(params=[False, True], ids=["regions", "grow"])
def pool(request):
    return Pool(source=Shared(grow=request.param))


def whole(pool, dtype="f8"):
    x = pool.empty((6, 8), dtype)
    x.view("u1")[:] = np.arange(x.nbytes, dtype="u1").reshape(6, -1)
    return x


ARRAYS = {
    "whole": lambda x: x,
    "a row": lambda x: x[3],
    "transposed": lambda x: x.T,
    "steps": lambda x: x[1::2, ::3],
    "reversed": lambda x: x[::-1, ::-2],
    "one item": lambda x: x[2:3, 4:5],
    "no dimension": lambda x: x[2, 4, ...],
    "broadcast": lambda x: np.broadcast_to(x[0], (5, 8)),
    "of a memoryview": lambda x: np.asarray(memoryview(x)[1:3]),
    "of the Buffer": lambda x: np.frombuffer(x.base, x.dtype)[8:],
}


@pytest.mark.parametrize("name", ARRAYS)
@pytest.mark.parametrize("way", ["send", "multiprocessing"])
def test_an_array_arrives_as_the_view_it_is(name, way, pair, pool):
    x = ARRAYS[name](whole(pool))
    if way == "send":
        arenapy.send(pair[0], x)
        y = arenapy.receive(pair[1])
    else:
        ours, theirs = mp.Pipe()
        with ours, theirs:
            ours.send(x)
            y = theirs.recv()
    assert (y.shape, y.strides, y.dtype) == (x.shape, x.strides, x.dtype)
    assert y.flags.writeable == x.flags.writeable
    assert y.tobytes() == x.tobytes()
    assert y.__array_interface__["data"][0] != x.__array_interface__["data"][0]
    if x.flags.writeable:
        y[...] = -5
        assert (x == -5).all()
        x[...] = 6
        assert (y == 6).all()


@pytest.mark.parametrize(
    "dtype", ["?", ">i2", "c16", "S7", "U3", "V5", "M8[us]", "f2", "q", STRUCTURED]
)
def test_a_dtype_arrives(dtype, pair, pool):
    x = whole(pool, dtype) if dtype != "?" else pool.zeros(3, "?")
    arenapy.send(pair[0], x)
    y = arenapy.receive(pair[1])
    assert y.dtype == x.dtype and y.tobytes() == x.tobytes()


@pytest.mark.parametrize("dtype", FIELDS, ids=["order", "overlap", "aligned", "record"])
@pytest.mark.parametrize("typed", [False, True])
def test_a_dtype_with_fields_arrives_as_it_is(dtype, typed, pair, pool):
    x = pool.alloc(2 * dtype.itemsize)
    arenapy.send(pair[0], x.view(2, dtype) if typed else x.array(2, dtype))
    found = np.dtype(arenapy.receive(pair[1]).dtype)
    assert repr(found) == repr(dtype) and found.fields == dtype.fields
    assert found.isalignedstruct == dtype.isalignedstruct


def test_a_type_of_another_package(pair, pool, monkeypatch):
    """Its name says what it is where the package has registered it, and nothing else does."""
    for x in pool.zeros(3, rational), pool.alloc(64).view(8, [("a", rational)]):
        with pytest.raises(ValueError, match=r"rational.* cannot be sent.*x.view"):
            arenapy.send(pair[0], x)
        with monkeypatch.context() as registered:
            registered.setitem(np.sctypeDict, "rational", rational)
            arenapy.send(pair[0], x)
            arenapy.send(pair[0], x)
            assert arenapy.receive(pair[1]).dtype == x.dtype
        with pytest.raises(ValueError, match=r"rational.*import that first"):
            arenapy.receive(pair[1])


def test_a_type_that_is_void_with_methods(pair, pool):
    class Own(np.void):
        pass

    own = np.dtype((Own, STRUCTURED))
    for dtype in own, np.dtype([("field", own, 2)]):
        with pytest.raises(ValueError, match="cannot be sent"):
            arenapy.send(pair[0], pool.zeros(2, dtype))


def test_buffers_arrive_as_what_they_are(pair, pool):
    block = pool.alloc(5000)
    block.fill(3)
    for sent in (block, block[100:200], block.view((10, 20), ">f4"), block.view((3,), STRUCTURED)):
        arenapy.send(pair[0], sent)
        y = arenapy.receive(pair[1])
        assert type(y) is type(sent) and y.nbytes == sent.nbytes
        assert y.allocator is None and y.kind == "shared"
        if sent is not block:
            assert (y.shape, y.dtype) == (sent.shape, sent.dtype)
        assert bytes(memoryview(y).cast("B")) == bytes([3]) * sent.nbytes


def test_what_is_read_only_stays_so(pair, pool):
    x = whole(pool)
    x.flags.writeable = False
    arenapy.send(pair[0], x)
    y = arenapy.receive(pair[1])
    with pytest.raises(ValueError, match="read-only"):
        y[0] = 1
    with pytest.raises(ValueError, match="WRITEABLE"):
        y.flags.writeable = True


def test_a_received_array_is_sent_on(pair, pool):
    x = whole(pool)
    arenapy.send(*pair[:1], x)
    y = arenapy.receive(pair[1])
    arenapy.send(pair[1], y[::2])
    z = arenapy.receive(pair[0])
    z[:] = 9
    assert (x[::2] == 9).all() and not (x[1::2] == 9).any()


@pytest.mark.parametrize("way", ["socketpair", "Pipe", "Listener", "path"])
def test_connections_that_carry_memory(way, pool, tmp_path):
    path = str(tmp_path / "s")
    with contextlib.ExitStack() as stack:
        if way == "socketpair":
            here, there = socket.socketpair()
        elif way == "Pipe":
            here, there = mp.Pipe()
        elif way == "Listener":
            listener = stack.enter_context(Listener(path, "AF_UNIX"))
            here = Client(path, "AF_UNIX")
            there = listener.accept()
        else:
            server = stack.enter_context(socket.socket(socket.AF_UNIX))
            server.bind(path)
            server.listen()
            here = socket.socket(socket.AF_UNIX)
            here.connect(path)
            there, _ = server.accept()
        stack.enter_context(here)
        stack.enter_context(there)
        x = pool.zeros(10)
        arenapy.send(here, x)
        arenapy.send(there, x[:2])
        arenapy.receive(there)[:] = 1
        assert x.sum() == 10 and arenapy.receive(here).shape == (2,)


def test_messages_of_multiprocessing_go_between(pool):
    here, there = mp.Pipe()
    with here, there:
        here.send("first")
        arenapy.send(here, pool.zeros(3))
        here.send("last")
        assert there.recv() == "first"
        assert arenapy.receive(there).shape == (3,)
        assert there.recv() == "last"


# ---- leases --------------------------------------------------------------------------------


def settled(arena):
    arena.check()
    return arena.stats().pending_bytes == 0 and arena.remaining == arena.capacity


def test_a_message_and_then_its_receiver_keep_the_bytes(pair):
    arena = Bump(1 << 16, Shared())
    x = arena.zeros(100, "u1")
    arenapy.send(pair[0], x)
    del x
    arena.reset()
    assert arena.stats().pending_bytes == 100
    y = arenapy.receive(pair[1])
    arena.reset()
    assert arena.stats().pending_bytes == 100
    del y
    arena.reset()
    assert settled(arena)


def test_a_socket_that_is_closed_gives_back_what_nobody_received(pair):
    arena = Bump(1 << 16, Shared())
    for _ in range(5):
        arenapy.send(pair[0], arena.zeros(100, "u1"))
    arena.reset()
    assert arena.stats().pending_bytes >= 500
    pair[1].close()
    arena.reset()
    assert settled(arena)


# One block at a time, or a batch; each asks for memory in a way of its own.
ONES = {
    "slab": lambda slab: [slab.alloc()],
    "slab, batches": lambda slab: slab.alloc_many(4),
    "pool": lambda pool: [pool.alloc(N)],
    "pool, batches": lambda pool: pool.alloc_many([N] * 4),
    "bump": lambda arena: [arena.alloc(N)],
}


@pytest.mark.parametrize("kept", [0, 20, 300])
@pytest.mark.parametrize("how", ONES)
def test_growth_ends_once_receivers_let_go(pair, how, kept):
    """What they keep was sent first, and is asked about first. The rest comes and goes."""
    here, there = pair
    most, source = 1 << 14, Shared()
    if how.startswith("slab"):
        arena = Slab(N, 16, source, max_count=most)
    elif how.startswith("pool"):
        arena = Pool(most * N, source)
    else:
        arena = Bump(16 * N, source, most * N)
    held = []
    for _ in range(1500):
        blocks = ONES[how](arena)
        for block in blocks:
            arenapy.send(here, block)
        received = [arenapy.receive(there) for _ in blocks]
        del blocks, block
        held += received[: kept - len(held)]
        del received
        if how == "bump":
            arena.reset()
    reserved = sum(region.nbytes for region in arena.regions)
    assert reserved <= max(4 << 20, 4 * kept * N), f"{reserved >> 20} MiB"
    arena.check()


def test_no_descriptor_is_leaked(pair, pool):
    def act():
        x = pool.zeros(100)
        for _ in range(20):
            arenapy.send(pair[0], x)
            arenapy.receive(pair[1])
        ours, theirs = mp.Pipe()
        with ours, theirs:
            arenapy.send(ours, x)
            arenapy.receive(theirs)

    act()
    before = len(os.listdir("/proc/self/fd"))
    act()
    assert len(os.listdir("/proc/self/fd")) == before


# ---- killed sides ---------------------------------------------------------------------------

SENDER = """
import socket, sys
import numpy as np, arenapy

sock = socket.socket(socket.AF_UNIX)
sock.connect(sys.argv[1])
pool = arenapy.Pool(source=arenapy.Shared(name=sys.argv[2]))
n = 0
while n < int(sys.argv[3]):
    x = pool.empty((100, n % 50 + 1), "i4")
    x[:] = n
    arenapy.send(sock, x)
    del x
    n += 1
sock.recv(1)
"""
RECEIVER = """
import collections, socket, sys
import arenapy

sock = socket.socket(socket.AF_UNIX)
sock.connect(sys.argv[1])
kept = collections.deque(maxlen=20)
while True:
    x = arenapy.receive(sock)
    x += 1
    kept.append(x)
"""


@contextlib.contextmanager
def another_program(code, *arguments):
    """A program that only knows the name of a socket, and its connection here."""
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as server:
        server.bind(f"{folder}/s")
        server.listen()
        process = subprocess.Popen([sys.executable, "-c", code, f"{folder}/s", *arguments])
        try:
            sock, _ = server.accept()
            with sock:
                yield process, sock
        finally:
            process.kill()
            process.wait()


def has_memory(name):
    """The processes that have a memfd of this name open or mapped."""
    found = set()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # it ended, or is another user's
            with open(f"/proc/{pid}/maps", encoding="utf-8") as lines:
                texts = list(lines)
            for fd in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(FileNotFoundError):  # it was that of listdir
                    texts.append(os.readlink(f"/proc/{pid}/fd/{fd}"))
            if any(name in text for text in texts):
                found.add(int(pid))
    return found


def test_what_a_killed_sender_sent_is_received():
    name = f"killed sender {os.getpid()}"
    with another_program(SENDER, name, "30") as (process, sock):
        first = arenapy.receive(sock)
        time.sleep(0.05)  # so that some are under way; whether they are is not what is tested
        assert has_memory(name) == {process.pid, os.getpid()}
        process.kill()
        process.wait()
        got = [first]
        with contextlib.suppress(EOFError, ConnectionResetError):
            while True:
                got.append(arenapy.receive(sock))
        for n, x in enumerate(got):
            assert x.shape == (100, n % 50 + 1) and (x == n).all()
            x[:] = 7
        assert all((x == 7).all() for x in got)
        assert has_memory(name) == {os.getpid()}
        del got, x, first
        gc.collect()
        assert not has_memory(name)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.sampled
def test_a_sender_killed_at_a_random_moment(seed):
    name = f"random sender {os.getpid()}"
    moments = random.Random(seed)
    with another_program(SENDER, name, "1000000000") as (process, sock):
        kept, n = [], 0
        last = moments.randrange(200)
        with contextlib.suppress(EOFError, ConnectionResetError):
            while True:
                x = arenapy.receive(sock)
                assert x.shape == (100, n % 50 + 1) and (x == n).all()
                kept.append((n, x))
                del kept[:-20], x
                n += 1
                if n == last:
                    time.sleep(moments.random() / 500)
                    process.kill()
        assert n >= last
        assert all((x == n).all() for n, x in kept)
        kept.clear()
        gc.collect()
        assert not has_memory(name)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.sampled
def test_a_receiver_killed_at_a_random_moment(seed):
    name = f"random receiver {os.getpid()}"
    moments = random.Random(seed)
    pool = Pool(source=Shared(name=name))
    mine = pool.copy(np.arange(10_000))
    with another_program(RECEIVER) as (process, sock):
        last = moments.randrange(1, 200)
        sent = []
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            for n in range(1_000_000):
                x = pool.empty(500 + n % 700, "i8")
                x[:] = n
                arenapy.send(sock, x)
                sent.append((n, x))
                del sent[:-20], x
                if n == last:
                    time.sleep(moments.random() / 500)
                    process.kill()
        process.wait()
        assert all(((x == n) | (x == n + 1)).all() for n, x in sent)
        for n, x in sent:  # nobody else writes them any more
            x[:] = n
        assert all((x == n).all() for n, x in sent)
    del sent, x
    assert (mine == np.arange(10_000)).all()
    pool.check()
    assert pool.stats().pending_bytes == 0
    assert has_memory(name) == {os.getpid()}
    del pool, mine
    gc.collect()
    assert not has_memory(name)


# ---- bad input ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (lambda pool: np.zeros(5), BufferError, "40 bytes are not in memory that can be shared"),
        (lambda pool: Pool().zeros(5), BufferError, r"Pool\(source=Shared\(\)\).copy"),
        (lambda pool: Pool().alloc(5), BufferError, "5 bytes are not in memory"),
        (lambda pool: pool.zeros(0), BufferError, "no bytes"),
        (lambda pool: pool.alloc(0), BufferError, "no bytes"),
        (lambda pool: [1, 2], TypeError, "list cannot be sent: give a Buffer or an ndarray"),
        (lambda pool: b"abc", TypeError, "bytes cannot be sent"),
    ],
)
def test_what_cannot_be_sent(make, error, says, pair, pool):
    with pytest.raises(error, match=says):
        arenapy.send(pair[0], make(pool))
    with pytest.raises(BlockingIOError):  # nothing was sent
        pair[1].recv(1, socket.MSG_DONTWAIT)


def test_a_closed_buffer_is_not_sent(pair, pool):
    block = pool.alloc(100)
    x = block.array()
    view = block[:50]
    del x
    block.release()
    for closed in (block, view):
        with pytest.raises(ValueError, match="released"):
            arenapy.send(pair[0], closed)


@pytest.mark.parametrize(
    "make",
    [lambda: Bump(1 << 16, Shared(), max_bytes=1 << 26), lambda: Pool(1 << 26, Shared(), 1 << 16)],
)
def test_a_closed_buffer_whose_region_is_gone_is_not_sent(make, pair):
    allocator = make()
    block = allocator.alloc(1 << 20)
    part = block[:50]
    block.release()
    assert allocator.trim() > 0
    for closed in (block, part):
        with pytest.raises(ValueError, match="released"):
            arenapy.send(pair[0], closed)
        with pytest.raises(ValueError, match="released"):
            ForkingPickler.dumps(closed)


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (lambda: [None], TypeError, "None is no connection"),
        (lambda: ["/run/path"], TypeError, "'/run/path' is no connection"),
        (lambda: mp.Pipe(duplex=False), ValueError, "not a socket.*Pipe"),
        (lambda: [socket.socket(socket.AF_INET)], ValueError, "not a Unix stream socket"),
        (lambda: [socket.socket(type=socket.SOCK_DGRAM)], ValueError, "not a Unix stream socket"),
        (lambda: socket.socketpair(type=socket.SOCK_DGRAM), ValueError, "not a Unix stream"),
    ],
)
def test_connections_that_carry_none(make, error, says, pool):
    x = pool.zeros(10)
    opened = make()
    connection = opened[0]
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(error, match=says):
        arenapy.send(connection, x)
    with pytest.raises(error, match=says):
        arenapy.receive(connection)
    assert len(os.listdir("/proc/self/fd")) == before
    for one in opened:
        with contextlib.suppress(AttributeError):
            one.close()


def test_the_other_side_is_gone(pair, pool):
    pair[1].close()
    with pytest.raises(BrokenPipeError):
        arenapy.send(pair[0], pool.zeros(3))
    with pytest.raises(EOFError, match="closed the connection"):
        arenapy.receive(pair[0])


@pytest.mark.parametrize("make", [np.ma.masked_array, lambda x: x.view(np.recarray)])
def test_a_subclass_is_refused(make, pair, pool):
    """Its class, and what it has beyond the bytes, would be lost."""
    x = make(pool.zeros(4))
    with pytest.raises(TypeError, match="cannot be sent"):
        arenapy.send(pair[0], x)
    arenapy.send(pair[0], pool.zeros(5))
    assert arenapy.receive(pair[1]).shape == (5,)


def test_a_dtype_that_is_too_long(pair, pool):
    x = pool.zeros(2, [(f"f{i:06}", "f8") for i in range(6000)])
    with pytest.raises(ValueError, match=r"is too long.*x.view"):
        arenapy.send(pair[0], x)
    arenapy.send(pair[0], x.view("u1"))
    assert len(arenapy.receive(pair[1])) == x.nbytes


def test_an_exception_from_elsewhere_is_not_the_messages(pair, pool, monkeypatch):
    """As a signal's handler raises it, while a dtype is read."""

    class Signalled(Exception):
        pass

    def interrupted(text):
        raise Signalled

    arenapy.send(pair[0], pool.zeros(2))
    monkeypatch.setattr(messages.np, "dtype", interrupted)
    with pytest.raises(Signalled):
        arenapy.receive(pair[1])


def test_a_timeout(pair):
    pair[0].settimeout(0.01)
    with pytest.raises(TimeoutError):
        arenapy.receive(pair[0])


def message(
    magic=messages.MAGIC,
    kind=messages.ARRAY,
    readonly=0,
    layout=(2, 8),
    dtype=b"<f8",
    offset=0,
    nbytes=4096,
    at=0,
    ndim=1,
):
    head = messages.HEAD.pack(magic, kind, readonly, ndim, len(dtype), offset, nbytes, at)
    return head + struct.pack(f"<{len(layout)}q", *layout) + dtype


def an_open_file():
    return os.open("/dev/null", os.O_RDWR)


def an_unsealed_memfd():
    fd = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.truncate(fd, 1 << 16)
    return fd


HOSTILE = {
    "nothing of ours": ({"magic": b"GET / HT"}, None, "not the head of a message"),
    "another version": ({"magic": b"arenapy2"}, None, "not the head of a message"),
    "another kind": ({"kind": 3}, None, "not the head of a message"),
    "dimensions": ({"ndim": 65, "layout": (1,) * 130}, None, "not the head of a message"),
    "no bytes": ({"nbytes": 0}, None, "not the head of a message"),
    "too far": ({"offset": 1 << 63}, None, "not the head of a message"),
    "first item": ({"at": 4096}, None, "not the head of a message"),
    "an open file": ({}, an_open_file, "not shared memory of fixed size"),
    "an unsealed memfd": ({}, an_unsealed_memfd, "not shared memory of fixed size"),
    "beyond": ({"offset": 1 << 20, "nbytes": 1 << 40}, None, "names 1099511627776 bytes"),
    "shape": ({"layout": (513, 8)}, None, "not inside"),
    "a negative shape": ({"layout": (-1, 8)}, None, "not inside"),
    "an overflow": ({"layout": (1 << 62, 8)}, None, "not inside"),
    "strides": ({"layout": (2, 4096)}, None, "not inside"),
    "negative strides": ({"layout": (2, -8)}, None, "not inside"),
    "a stride that overflows": ({"layout": (5, 1 << 62)}, None, "not inside"),
    "a span that overflows": ({"layout": ((1 << 52) + 1, 4096)}, None, "not inside"),
    "a negative one": ({"layout": (3, -(1 << 63))}, None, "not inside"),
    "two that overflow": (
        {"ndim": 2, "layout": (2, 2, (1 << 63) - 1, (1 << 63) - 1)},
        None,
        "not inside",
    ),
    "many without bytes": ({"layout": (1 << 62, 0)}, None, "too big|too large|size"),
    "objects": ({"dtype": b"O"}, None, "references to Python objects"),
    "objects in a field": ({"dtype": b"[('a', '|O')]"}, None, "references to Python objects"),
    "code": ({"dtype": b"[__import__('os')]"}, None, "cannot be understood"),
    "no fields": ({"dtype": b"{'record': 1}"}, None, "cannot be understood"),
    "odd fields": (
        {"dtype": b"{'record': 1, 'names': ['a'], 'formats': ['i4'], 'offsets': [-1]}"},
        None,
        "cannot be understood",
    ),
    "fields whose sum overflows": (
        {
            "dtype": b"{'record': 0, 'names': ['a', 'b', 'c'],"
            b" 'formats': ['V2147483647', 'V2147483647', 'V10']}"
        },
        None,
        "fields that lie outside",
    ),
    "fields of negative size": (
        {"dtype": b"{'record': 0, 'names': ['a', 'b'], 'formats': ['V2147483647', 'V2147482647']}"},
        None,
        "fields that lie outside",
    ),
    "no dtype": ({"dtype": b""}, None, "cannot be understood"),
    "deep": ({"dtype": b"[" * 5000}, None, "cannot be understood"),
    "a view": ({"kind": messages.TYPED, "layout": (513,)}, None, "4104|bytes"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_peer_that_lies(name, pair, pool):
    fields, make, says = HOSTILE[name]
    x = pool.zeros(512)
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    fd = make() if make else os.dup(int(owned(x)))
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))]
    pair[0].sendmsg([message(**fields)], rights)
    os.close(fd)
    with pytest.raises(ValueError, match=says):
        arenapy.receive(pair[1])
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


def owned(x):
    """The descriptor of an array's memory."""
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{fd}").startswith("/memfd:arenapy ("):
                return fd
    raise AssertionError("no memory")


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (message(), "no descriptor"),
        (message()[:1], "no descriptor"),
        (b"done", "b'done' is not the head of a message"),
        (b"\0\0\0\5hello", "is not the head of a message"),
    ],
)
def test_a_message_without_a_descriptor(data, says, pair):
    """Nor is more of it waited for: the other side may wait for an answer."""
    pair[1].settimeout(10)
    pair[0].sendall(data)
    with pytest.raises(ValueError, match=says):
        arenapy.receive(pair[1])


def test_two_descriptors_in_a_message(pair, pool):
    x = pool.zeros(512)
    before = len(os.listdir("/proc/self/fd"))
    fds = [os.dup(int(owned(x))), an_open_file()]
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
    pair[0].sendmsg([message()], rights)
    for fd in fds:
        os.close(fd)
    assert arenapy.receive(pair[1]).shape == (2,)
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("n", [1, messages.HEAD.size, messages.HEAD.size + 3])
def test_a_message_that_ends_early(n, pair, pool):
    x = pool.zeros(512)
    fd = os.dup(int(owned(x)))
    before = len(os.listdir("/proc/self/fd"))
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))]
    pair[0].sendmsg([message()[:n]], rights)
    os.close(fd)
    pair[0].close()
    with pytest.raises(EOFError, match="in the middle"):
        arenapy.receive(pair[1])
    assert len(os.listdir("/proc/self/fd")) == before - 2


def test_a_message_in_parts(pair, pool):
    x = pool.zeros(512)
    with open(f"/proc/self/fd/{owned(x)}", "r+b") as file:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [file.fileno()]))]
        data = message()
        pair[0].sendmsg([data[:5]], rights)
        pair[0].sendall(data[5:50])
        child = os.fork()
        if not child:
            time.sleep(0.05)
            pair[0].sendall(data[50:])
            os._exit(0)
        assert arenapy.receive(pair[1]).shape == (2,)
        os.waitpid(child, 0)


def test_a_receiver_without_a_free_descriptor(run_script):
    run_script("""
        import os, resource, socket
        import arenapy
        pool = arenapy.Pool(source=arenapy.Shared())
        here, there = socket.socketpair()
        x = pool.zeros(10)
        arenapy.send(here, x)
        held = os.listdir("/proc/self/fd")
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(held) - 1, 100))
        try:
            arenapy.receive(there)
        except OSError as error:
            assert "RLIMIT_NOFILE" in str(error), error
        else:
            raise AssertionError("received")
        here.close()
        there.close()
    """)


@pytest.mark.full
def test_too_many_messages_under_way(run_script):
    run_script("""
        import errno, resource, socket
        import arenapy
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        pool = arenapy.Pool(source=arenapy.Shared())
        here, there = socket.socketpair()
        here.settimeout(5)
        x = pool.zeros(10)
        sent = 0
        try:
            for sent in range(1000):
                arenapy.send(here, x)
        except OSError as error:
            assert error.errno in (errno.ETOOMANYREFS, errno.EAGAIN) or isinstance(
                error, TimeoutError), error
        for _ in range(sent):
            arenapy.receive(there)[:] = 1
        assert x.all()
        arenapy.send(here, x)
        arenapy.receive(there)
        here.close()
        there.close()
    """)


def test_an_interrupted_receive_goes_on(pair, pool):
    """A signal whose handler returns does not lose the message (PEP 475)."""
    x = pool.zeros(5)
    hits = []

    def handler(*_):
        hits.append(1)
        arenapy.send(pair[0], x)

    before = signal.signal(signal.SIGALRM, handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.02)
        assert arenapy.receive(pair[1]).shape == (5,)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert hits


@pytest.mark.parametrize("make", [Bump, Pool, lambda n, source: Slab(64, n // 64, source)])
def test_what_a_child_sent_is_not_handed_out_after_the_child(pair, make):
    """By an allocator over the region that the parent makes then."""
    region = Shared(huge_pages=None).region(1 << 16)

    def send():
        buffer = region.buffer()
        buffer.fill(7)
        arenapy.send(pair[0], buffer)

    assert in_child(send) == 0
    received = arenapy.receive(pair[1])
    with contextlib.suppress(ValueError, OutOfMemory):
        allocator = make(1 << 15, SimpleNamespace(region=lambda _: region))
        (allocator.alloc() if isinstance(allocator, Slab) else allocator.alloc(64)).fill(1)
    assert bytes(received) == bytes([7]) * (1 << 16)
