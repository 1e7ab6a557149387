"""`arenapy.interop.torch.collate`: workers of a DataLoader write batches into a Slab."""

import collections
import contextlib
import copy
import gc
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time
import types
import typing
import warnings
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

import arenapy
from arenapy.interop import torch as arenapy_torch
from arenapy.interop import torch_batches

torch = pytest.importorskip("torch")
from torch.utils.data import DataLoader, Dataset, default_collate  # noqa: E402
from torch_device import Device  # noqa: E402


def slab_of(count=12, nbytes=1 << 16, source=None):
    return arenapy.Slab(nbytes, count, arenapy.Shared() if source is None else source)


class Samples(Dataset):
    """A sample of each kind that torch can collate."""

    def __init__(self, n=64):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        return {
            "image": torch.full((3, 5), float(i)),
            "array": np.full(7, i, dtype="i4"),
            "both": (i, 0.5 * i, np.float32(i), f"name {i}"),
            "empty": torch.zeros(0),
            "mask": torch.tensor(i % 2 == 0),
        }


def words(collate):
    """Of the owners of the items, then of those that made the batches."""
    blocks = [*collate._items.buffers, *collate._items.makers]
    return [torch_batches.shared_words.load(one) for one in blocks]


def soon(condition):
    end = time.monotonic() + 10
    while not (done := condition()) and time.monotonic() < end:
        time.sleep(0.01)
    return done


def taken(collate):
    """An item that is taken, without a batch in it."""
    held = torch_batches._Held(collate)
    assert soon(lambda: collate._items.take(held))  # with CUDA, a thread frees the items
    return held


def all_can_be_taken(collate):
    items = range(len(collate._items.buffers))
    return {held.item for held in [taken(collate) for _ in items]} == set(items)


def nobody_has_any(collate):
    """Soon: a batch on its way may be dropped by another thread."""
    return soon(lambda: not any(words(collate)))


def same(ours, theirs):
    if isinstance(theirs, torch.Tensor):
        return ours.dtype == theirs.dtype and torch.equal(ours, theirs)
    if isinstance(theirs, dict):
        return ours.keys() == theirs.keys() and all(same(ours[key], theirs[key]) for key in theirs)
    if isinstance(theirs, (list, tuple)):
        return len(ours) == len(theirs) and all(map(same, ours, theirs))
    return ours == theirs


def tensors_of(batch):
    if isinstance(batch, torch.Tensor):
        yield batch
    elif isinstance(batch, (dict, list, tuple)):
        for one in batch.values() if isinstance(batch, dict) else batch:
            yield from tensors_of(one)


@pytest.mark.parametrize(
    ("workers", "method"),
    [(0, None), (2, "fork"), pytest.param(1, "spawn", marks=pytest.mark.full)],
)
def test_batches_are_those_of_torch_in_the_slab(workers, method):
    slab = slab_of()
    collate = arenapy_torch.collate(slab)
    ranges = [(b.address, b.address + b.nbytes) for b in collate._items.buffers]
    data = Samples()
    loader = DataLoader(
        data, batch_size=10, num_workers=workers, collate_fn=collate,
        multiprocessing_context=method,
    )  # fmt: skip
    for _ in range(2):
        for number, batch in enumerate(loader):
            wanted = default_collate(
                [data[i] for i in range(10 * number, min(64, 10 * number + 10))]
            )
            assert same(batch, wanted)
            for tensor in tensors_of(batch):
                if tensor.numel():
                    assert any(a <= tensor.data_ptr() < b for a, b in ranges)
            del tensor
            batch["image"] += 1  # the program's own
        del batch
        assert nobody_has_any(collate)


def test_a_tensor_keeps_its_batch():
    collate = arenapy_torch.collate(slab_of(6))
    loader = DataLoader(Samples(), batch_size=8, num_workers=1, collate_fn=collate)
    kept = []
    for batch in loader:
        if len(kept) < 2:
            kept.append(batch["image"][:, 1:])
    del batch
    for number, one in enumerate(kept):
        assert one[:, 0, 0].tolist() == [float(i) for i in range(8 * number, 8 * number + 8)]
    assert soon(lambda: sum(map(bool, words(collate))) == 2)  # with CUDA, a thread frees them
    del kept, one
    assert nobody_has_any(collate)


def test_items_that_are_all_in_use():
    """Batches are copied, and each worker says so once."""
    collate = arenapy_torch.collate(slab_of(2))
    with pytest.warns(
        RuntimeWarning, match=r"all 2 items .* num_workers \* prefetch_factor"
    ) as told:
        kept = list(DataLoader(Samples(), batch_size=8, collate_fn=collate))
    assert len(told) == 1
    assert len(kept) == 8
    for number, batch in enumerate(kept):
        assert batch["both"][0].tolist() == list(range(8 * number, 8 * number + 8))
    del kept, batch
    assert nobody_has_any(collate)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_batch_that_does_not_fit(workers):
    collate = arenapy_torch.collate(slab_of(4, nbytes=1024))
    loader = DataLoader(Samples(), batch_size=32, num_workers=workers, collate_fn=collate)
    with pytest.raises(ValueError, match=r"at least 1984 bytes does not fit into an item of 1024"):
        next(iter(loader))
    assert nobody_has_any(collate)


def test_samples_of_different_shapes():
    """torch's error, and the item is free again."""
    collate = arenapy_torch.collate(slab_of(4))
    with pytest.raises(RuntimeError, match="stack expects each tensor to be equal size"):
        collate([torch.zeros(2), torch.zeros(3)])
    assert nobody_has_any(collate)


@pytest.mark.parametrize(
    "samples",
    [
        [torch.ones(2, dtype=torch.float32), torch.full((2,), 1 / 3, dtype=torch.float64)],
        [torch.ones(2, dtype=torch.int64), torch.full((2,), 1 / 3)],
        [torch.ones(2, requires_grad=True), torch.ones(2)],
        [torch.nn.Parameter(torch.ones(2))] * 2,
    ],
    ids=["doubles", "integers", "gradients", "parameters"],
)
def test_torch_decides_what_different_samples_become(samples):
    made = arenapy_torch.collate(slab_of(4))(samples)
    usual = default_collate(samples)
    assert (made.dtype, made.requires_grad) == (usual.dtype, usual.requires_grad)
    assert torch.equal(made, usual)


def test_a_batch_without_tensors_keeps_no_item():
    collate = arenapy_torch.collate(slab_of(4))
    assert collate(["a", "b"]) == ["a", "b"]
    assert nobody_has_any(collate)


class Fatal:
    """A field of a sample that kills the worker which puts it into a batch."""

    def __init__(self, kills):
        self.kills = kills


def fatal(fields, *, collate_fn_map=None):
    if any(field.kills for field in fields):
        os.kill(os.getpid(), signal.SIGKILL)


class Killing(Samples):
    """A worker that reads a certain sample is killed: before its batch is made, or within that."""

    def __init__(self, n, at=-1, within=False):
        super().__init__(n)
        self.at, self.within = at, within

    def __getitem__(self, i):
        if i == self.at and not self.within:
            os.kill(os.getpid(), signal.SIGKILL)
        return {**super().__getitem__(i), "fatal": Fatal(i == self.at)}


def torchs_files():
    return {name for name in os.listdir("/dev/shm") if name.startswith("torch_")}


def resident():
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def epoch(loader):
    """The number of batches until a worker is killed."""
    n = 0
    try:
        for batch in loader:
            assert batch["image"].shape[1:] == (3, 5)
            n += 1
    except RuntimeError as error:
        assert "exited unexpectedly" in str(error) or "killed by signal" in str(error), error
    return n


@pytest.mark.parametrize("batches", [1000, pytest.param(10_000, marks=pytest.mark.long)])
def test_killed_workers_leave_nothing(pytestconfig, monkeypatch, batches):
    """More workers are killed than there are items, and each item is used again.

    The workers kill themselves. If the program did, one might have a lock of torch's at the time,
    and the program would wait for that for ever.
    """
    from torch.utils.data._utils.collate import default_collate_fn_map

    monkeypatch.setitem(default_collate_fn_map, Fatal, fatal)
    collate = arenapy_torch.collate(slab_of(8))
    files = len(os.listdir("/proc/self/fd"))
    shared = torchs_files()
    quick = pytestconfig.getoption("--tier") == "quick"
    seen = kills = memory = 0
    while seen < batches and not (quick and kills == 12):
        i, kills = kills, kills + 1
        data = Killing(100, at=4 * (i % 20), within=i % 3 > 0)
        loader = DataLoader(data, batch_size=4, num_workers=2, collate_fn=collate)
        found = epoch(loader)
        assert found <= i % 20
        seen += found
        if kills == 100:
            gc.collect()
            memory = resident()
    loader = DataLoader(Killing(400), batch_size=4, num_workers=2, collate_fn=collate)
    assert epoch(loader) == 100
    assert soon(
        lambda: all(not one or torch_batches._has_ended(one >> 32) for one in words(collate))
    )
    assert all_can_be_taken(collate)
    gc.collect()  # torch's threads close their pipes
    assert soon(lambda: len(os.listdir("/proc/self/fd")) <= files + 2)
    assert soon(lambda: torchs_files() <= shared)
    assert kills < 200 or resident() < memory + (16 << 20)


def test_a_batch_of_a_worker_that_has_ended():
    """Its item went to another worker: an error, and not that one's bytes."""
    collate = arenapy_torch.collate(slab_of(1))
    child = os.fork()
    if child == 0:
        held = taken(collate)
        os._exit(held.item)
    assert os.waitpid(child, 0)[1] == 0
    lost = collate._number, 0, words(collate)[0]
    held = taken(collate)  # of the dead
    with pytest.raises(RuntimeError, match="worker that made this batch has ended"):
        torch_batches._received(*lost)
    receive, place = held.__reduce__()
    received = receive(*place)
    with pytest.raises(RuntimeError, match="worker that made this batch has ended"):
        torch_batches._received(*lost)
    del held
    assert words(collate)[0]
    del received
    assert nobody_has_any(collate)


def test_a_forked_child_frees_nothing():
    collate = arenapy_torch.collate(slab_of(2))
    batch = collate([torch.zeros(4), torch.ones(4)])
    before = words(collate)
    child = os.fork()
    if child == 0:
        del batch
        os._exit(words(collate) != before)
    assert os.waitpid(child, 0)[1] == 0
    assert words(collate) == before
    del batch
    assert nobody_has_any(collate)


def filled(value):
    return [torch.full((4,), float(value))] * 2


def test_a_forked_child_keeps_the_batches_that_it_inherited():
    """As long as it lives, whoever drops them; those of later are free at once."""
    collate = arenapy_torch.collate(slab_of(3))
    batch = collate(filled(1))
    ours, theirs = socket.socketpair()
    child = os.fork()
    if child == 0:
        ours.close()
        while theirs.recv(1):
            theirs.send(b"y" if bool((batch == 1).all()) else b"n")
        os._exit(0)
    theirs.close()
    with ours:
        del batch
        for value in range(2, 8):
            later = [collate(filled(value)) for _ in range(2)]
            with pytest.warns(RuntimeWarning) if value == 2 else contextlib.nullcontext():
                assert bool((collate(filled(value)) == value).all())  # torch's copy
            ours.send(b"?")
            assert ours.recv(1) == b"y"
            del later
    assert os.waitpid(child, 0)[1] == 0
    batches = [collate(filled(9)) for _ in range(3)]
    assert all(words(collate))
    del batches
    assert nobody_has_any(collate)


@pytest.mark.parametrize("kept", [1, 8])
def test_workers_of_later_epochs_get_the_items(kept):
    """The program keeps batches while it forks the workers of the next epoch, as a loop does."""
    collate = arenapy_torch.collate(slab_of(2 * kept + 4))
    loader = DataLoader(Samples(), batch_size=8, num_workers=1, collate_fn=collate)
    batches = []
    for _ in range(6):
        before, batches = batches, []
        for batch in loader:
            before.clear()
            batches = [*batches, batch][-kept:]
        del batch
    del batches
    collate._items.settle()
    assert nobody_has_any(collate)


@pytest.fixture
def device(monkeypatch):
    return Device(monkeypatch.setattr)


@contextlib.contextmanager
def living_child():
    """A forked child that ends with this."""
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(theirs)
        os.read(ours, 1)  # until the program closes it
        os._exit(0)
    yield
    os.close(theirs)
    os.close(ours)
    assert os.waitpid(child, 0)[1] == 0


def test_a_child_does_not_see_what_was_dropped_before_the_fork(device):
    """Also if a device still copies out of it."""
    collate = arenapy_torch.collate(slab_of(2))
    batch = collate(filled(1))
    device.copied.clear()
    del batch
    with living_child():
        assert any(words(collate))
        device.copied.set()
        assert nobody_has_any(collate)


def test_a_later_child_has_the_items_that_an_earlier_one_saw():
    """From its start: it may be a worker that the program waits for."""
    collate = arenapy_torch.collate(slab_of(2))
    batches = [collate(filled(1)), collate(filled(2))]
    with living_child():
        del batches
        assert all(words(collate))
    child = os.fork()
    if child == 0:
        os._exit(any(words(collate)))
    assert os.waitpid(child, 0)[1] == 0


def test_an_exception_of_a_signal_loses_no_batch_that_children_see():
    collate = arenapy_torch.collate(slab_of(1))
    at, more = 1, True
    while more:
        batch = collate(filled(1))
        with living_child():
            del batch
            more = stopped(collate._items.settle, at, interrupt)
        more |= stopped(collate._items.settle, at, interrupt)
        collate._items.settle()
        assert not any(words(collate)), at
        at += 1
    assert at > 5


def test_the_end_of_a_program_with_a_device():
    """The program waits for a thread that destroys an event, inside torch."""
    program = """
        import threading

        import torch
        from torch_device import Device, Event

        import arenapy
        from arenapy.interop import torch as arenapy_torch

        class Slow(Event):
            def __del__(self):
                begun.set()
                large = torch.ones(1000, 1000)
                for _ in range(8):
                    large @ large  # others run meanwhile, until torch comes back
                print("destroyed", flush=True)

        begun, Device.event = threading.Event(), Slow
        Device(setattr)
        collate = arenapy_torch.collate(arenapy.Slab(4096, 1, arenapy.Shared()))
        collate([torch.ones(4)])
        del collate
        begun.wait()
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], cwd=Path(__file__).parent,
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "destroyed\n", "")


def test_workers_do_not_free_what_the_program_has_dropped():
    collate = arenapy_torch.collate(slab_of(8))
    batch = collate(filled(1))
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(theirs)
        os.read(ours, 1)  # until the program closes it
        os._exit(not bool((batch == 1).all()))
    item = words(collate).index(max(words(collate)))
    del batch
    for _ in range(3):
        loader = DataLoader(Samples(), batch_size=8, num_workers=2, collate_fn=collate)
        for one in loader:
            assert one["image"].shape[1:] == (3, 5)
        del one, loader
        assert words(collate)[item]
    os.close(theirs)
    os.close(ours)
    assert os.waitpid(child, 0)[1] == 0
    collate._items.settle()
    assert nobody_has_any(collate)


def test_the_function_is_gone():
    """A batch that arrives later is refused."""
    collate = arenapy_torch.collate(slab_of(2))
    receive, place = taken(collate).__reduce__()
    del collate
    with pytest.raises(RuntimeError, match="is gone; keep it, or the DataLoader"):
        receive(*place)


@pytest.mark.parametrize("workers", [0, 1])
def test_arrays_need_their_room_once(workers):
    collate = arenapy_torch.collate(slab_of(4, nbytes=64 + 4 * 400))
    data = [np.full(100, i, "f4") for i in range(8)]
    loader = DataLoader(data, batch_size=4, num_workers=workers, collate_fn=collate)
    assert [batch[:, 99].tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7]]


class Fixed(collections.UserList):
    def __setitem__(self, index, item):
        raise TypeError("fixed")


class NoCopy(collections.UserDict):
    def __copy__(self):
        raise TypeError("no copy")


class Needs(Mapping):
    """An object of this class is not made from a mapping alone."""

    def __init__(self, items, more):
        self.items_of, self.more = items, more

    def __getitem__(self, key):
        return self.items_of[key]

    def __iter__(self):
        return iter(self.items_of)

    def __len__(self):
        return len(self.items_of)


class Noted(collections.UserDict):
    note = None


class Point(typing.NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


CONTAINERS = {
    "dict": lambda x, y: {"x": x, "y": y},
    "tuple": lambda x, y: (x, y),
    "list": lambda x, y: [x, [y]],
    "named": Point,
    "user's": lambda x, y: collections.UserDict(x=x, y=[y]),
    "fixed": lambda x, y: Fixed([x, y]),
    "no copy": lambda x, y: NoCopy(x=x, y=y),
    "needs more": lambda x, y: Needs({"x": x, "y": y}, 1),
    "read only": lambda x, y: types.MappingProxyType({"x": x, "y": y}),
}


@pytest.mark.parametrize("make", CONTAINERS.values(), ids=CONTAINERS.keys())
def test_containers_are_torchs_and_need_their_room_once(make):
    collate = arenapy_torch.collate(slab_of(1, nbytes=64 + 2 * 2 * 64))
    samples = [make(torch.full((16,), i + 0.0), torch.full((16,), i + 5.0)) for i in range(2)]
    ours, theirs = collate(samples), default_collate(samples)
    assert type(ours) is type(theirs)
    assert repr(ours) == repr(theirs)
    assert not isinstance(ours, Mapping) or all(same(ours[key], theirs[key]) for key in theirs)


def test_a_container_keeps_what_it_has_besides():
    samples = [Noted(x=torch.ones(2)), Noted(x=torch.zeros(2))]
    samples[0].note = "first"
    assert arenapy_torch.collate(slab_of(1))(samples).note == default_collate(samples).note


def test_containers_of_different_sizes():
    with pytest.raises(RuntimeError, match="should be of equal size"):
        arenapy_torch.collate(slab_of(1))([[torch.ones(2)], []])


class Pair:
    """A sample of the user's own, which torch collates by a function of the user's."""

    def __init__(self, first, second):
        self.first, self.second = first, second


def test_a_tensor_that_is_seen_after_an_error(monkeypatch):
    """It keeps the item."""
    from torch.utils.data._utils import collate as torchs

    seen = []

    def collated(pairs, *, collate_fn_map=None):
        for values in ([pair.first for pair in pairs], [pair.second for pair in pairs]):
            seen.append(torchs.collate(values, collate_fn_map=collate_fn_map))

    monkeypatch.setitem(torchs.default_collate_fn_map, Pair, collated)
    collate = arenapy_torch.collate(slab_of(2))
    with pytest.raises(RuntimeError, match="stack expects each tensor to be equal size"):
        collate([Pair(torch.ones(9), torch.zeros(2)), Pair(torch.ones(9), torch.zeros(3))])
    batch = collate(filled(2))
    with pytest.warns(RuntimeWarning, match="all 2 items"):
        collate(filled(3))
    assert seen[0].tolist() == [[1.0] * 9] * 2
    del seen[:], batch
    assert nobody_has_any(collate)


def test_a_function_for_tensors_of_the_users_own(monkeypatch):
    from torch.utils.data._utils import collate as torchs

    def padded(tensors, *, collate_fn_map=None):
        return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True)

    monkeypatch.setitem(torchs.default_collate_fn_map, torch.Tensor, padded)
    collate = arenapy_torch.collate(slab_of(1))
    batch = collate([torch.ones(1), torch.ones(2)])
    assert batch.tolist() == [[1, 0], [1, 1]]
    assert any(words(collate))


def stopped(call, at, stop, spared=()):
    """Call `stop` at this line of a call, such as one that makes a batch; False if it has fewer."""
    lines = 0

    def trace(frame, event, argument):
        nonlocal lines
        code = frame.f_code
        if code.co_filename != torch_batches.__file__ or code.co_name in spared:
            return None
        if event == "line":
            lines += 1
            if lines == at:
                stop()
        return trace

    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(None)
    return lines >= at


def interrupt():
    raise KeyboardInterrupt


def test_an_exception_of_a_signal_loses_no_item():
    collate = arenapy_torch.collate(slab_of(1))
    freeing = ("__del__", "_dropped", "drop", "settle", "give_back")  # Python ignores it there
    at = 1
    while stopped(lambda: collate(filled(1)), at, interrupt, freeing):
        assert nobody_has_any(collate), at
        at += 1
    assert at > 20


def test_a_process_that_is_killed_loses_no_item():
    collate = arenapy_torch.collate(slab_of(1))
    status, at = signal.SIGKILL, 1
    while status == signal.SIGKILL:
        child = os.fork()
        if child == 0:
            try:
                killed = lambda: os.kill(os.getpid(), signal.SIGKILL)  # noqa: E731
                os._exit(stopped(lambda: collate(filled(1)), at, killed))
            finally:
                os._exit(2)
        _, status = os.waitpid(child, 0)
        assert all_can_be_taken(collate), at
        # Else the next child waits for the item, for many lines: a device's thread drops it later.
        assert nobody_has_any(collate), at
        at += 1
    assert status == 0
    assert at > 40


class Changed:
    """A function around the collate function."""

    def __init__(self, collate):
        self.collate = collate

    def __call__(self, samples):
        batch = self.collate(samples)
        return {
            "scaled": batch["image"] / 255,
            "part": batch["image"][:, 1:],
            "turned": batch["image"].transpose(0, 2),
            "bits": batch["both"][0].view(torch.int32)[::2],
            "weight": torch.nn.Parameter(batch["both"][1]),
            "array": batch["array"].numpy()[0, 0],
        }


@pytest.mark.parametrize("workers", [0, 1])
def test_a_function_around_it_gets_tensors(workers):
    """Views of the batch are sent without a copy."""
    collate = arenapy_torch.collate(slab_of())
    ranges = [(b.address, b.address + b.nbytes) for b in collate._items.buffers]
    changed, data = Changed(collate), Samples()
    loader = DataLoader(data, batch_size=8, num_workers=workers, collate_fn=changed)
    for number, batch in enumerate(loader):
        wanted = Changed(default_collate)([data[8 * number + i] for i in range(8)])
        assert same(batch, wanted)
        for name in ("part", "turned", "bits"):
            assert batch[name].stride() == wanted[name].stride()
            assert any(a <= batch[name].data_ptr() < b for a, b in ranges)
    del batch
    assert nobody_has_any(collate)


def test_a_worker_sends_a_batch_that_it_inherited():
    """A copy: the program still has the batch."""
    collate = arenapy_torch.collate(slab_of(6))
    batch = collate(filled(7))
    before = [word for word in words(collate) if word]
    both = lambda _, inherited=batch: (collate(filled(1)), inherited)  # noqa: E731
    loader = DataLoader(range(8), num_workers=1, collate_fn=both)
    for one, same_batch in loader:
        assert bool((one == 1).all())
        assert same_batch.data_ptr() != batch.data_ptr()
        assert bool((same_batch == 7).all())
    del one, same_batch, loader, both
    assert soon(lambda: [word for word in words(collate) if word] == before)
    del batch
    collate._items.settle()
    assert nobody_has_any(collate)


def in_a_child(collate):
    """A process that is no worker makes batches, alone and with workers of its own."""
    ranges = [(b.address, b.address + b.nbytes) for b in collate._items.buffers]
    for workers in (0, 1):
        for batch in DataLoader(Samples(), batch_size=8, num_workers=workers, collate_fn=collate):
            assert any(a <= batch["image"].data_ptr() < b for a, b in ranges)
        assert batch["both"][0].tolist() == list(range(56, 64))
        del batch
        assert nobody_has_any(collate)


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.full)])
def test_a_child_makes_batches(method):
    collate = arenapy_torch.collate(slab_of(6))
    child = multiprocessing.get_context(method).Process(target=in_a_child, args=(collate,))
    child.start()
    child.join()
    assert child.exitcode == 0


def test_a_copy_is_the_same_function():
    collate = arenapy_torch.collate(slab_of(1))
    assert copy.copy(collate) is collate


def test_a_slab_that_was_in_use_before():
    slab = slab_of(2)
    for item in slab.alloc_many(2):
        item[:] = b"\xff" * item.nbytes
    del item
    collate = arenapy_torch.collate(slab)
    assert not any(words(collate))
    assert all_can_be_taken(collate)


def test_batches_that_a_worker_does_not_send():
    collate = arenapy_torch.collate(slab_of(4))
    some = lambda samples: (collate(samples), None)[samples[0]["both"][0] % 4 > 0]  # noqa: E731
    loader = DataLoader(
        Samples(), batch_size=2, num_workers=1, collate_fn=some, persistent_workers=True
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            assert [one is None for one in loader] == [False, True] * 16
            assert nobody_has_any(collate)  # and the worker lives


class Keeping:
    """A function whose batches come with a tensor of the batch before, and one of the first."""

    def __init__(self, collate):
        self.collate = collate
        self.first = self.before = None

    def __call__(self, samples):
        whole = self.collate(samples)
        self.first = whole if self.first is None else self.first
        sent = whole["image"], self.before, self.first["array"]
        self.before = whole["array"]
        return sent


def test_a_tensor_that_the_worker_keeps():
    """It may be sent later, and again. The program's end of the batch does not free its memory."""
    collate = arenapy_torch.collate(slab_of(6))
    loader = DataLoader(Samples(), batch_size=2, num_workers=1, collate_fn=Keeping(collate))
    n = 0
    for image, before, first in loader:
        assert image[:, 0, 0].tolist() == [n, n + 1]
        assert before is None or before[:, 6].tolist() == [n - 2, n - 1]
        assert first[:, 6].tolist() == [0, 1]
        n += 2
    assert n == 64
    del image, before, first
    assert all_can_be_taken(collate)  # those that the worker kept, too: it has ended


@pytest.mark.parametrize(
    ("slab", "error", "text"),
    [
        (lambda: object(), TypeError, "is not a Slab; give arenapy.Slab"),
        (lambda: arenapy.Pool(1 << 20), TypeError, "is not a Slab"),
        (lambda: slab_of(source=arenapy.Host()), ValueError, r"host memory.*give a Slab over"),
    ],
)
def test_what_is_no_slab_of_shared_memory(slab, error, text):
    with pytest.raises(error, match=text):
        arenapy_torch.collate(slab())


def test_a_slab_without_free_items():
    slab = slab_of(1)
    item = slab.alloc()
    with pytest.raises(ValueError, match="has no free item"):
        arenapy_torch.collate(slab)
    item.release()


def test_no_warnings_in_an_ordinary_program():
    collate = arenapy_torch.collate(slab_of(12))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert epoch(DataLoader(Samples(), batch_size=8, num_workers=1, collate_fn=collate)) == 8


def test_the_guides_program():
    guide = (Path(__file__).parents[2] / "docs/ecosystem.md").read_text()
    programs = re.findall(r"^```python\n(.*?)^```", guide, re.DOTALL | re.MULTILINE)
    (program,) = [one for one in programs if "DataLoader" in one]
    done = subprocess.run(
        [sys.executable, "-W", "error::RuntimeWarning", "-c", program],
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
