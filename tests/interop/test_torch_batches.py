"""`arenapy.interop.torch.collate`: workers of a DataLoader write batches into a Slab."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import pytest

import arenapy
from arenapy.interop import torch as arenapy_torch
from arenapy.interop import torch_batches

torch = pytest.importorskip("torch")
from torch.utils.data import DataLoader, Dataset, default_collate  # noqa: E402


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
    return [torch_batches.shared_words.load(one) for one in collate._items.buffers]


def nobody_has_any(collate):
    """Soon: a batch on its way may be dropped by another thread."""
    end = time.monotonic() + 10
    while any(words(collate)) and time.monotonic() < end:
        time.sleep(0.01)
    return not any(words(collate))


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
    end = time.monotonic() + 10
    while sum(map(bool, words(collate))) != 2:  # with CUDA, a thread gives them back
        assert time.monotonic() < end
        time.sleep(0.01)
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


def test_a_batch_without_tensors_keeps_no_item():
    collate = arenapy_torch.collate(slab_of(4))
    assert collate(["a", "b"]) == ["a", "b"]
    assert not any(words(collate))


def epoch(loader, killed=None):
    """Batches until a worker is killed after so many, or all of them."""
    n = 0
    batches = iter(loader)
    try:
        for batch in batches:
            assert batch["image"].shape[1:] == (3, 5)
            if n == killed:
                os.kill(batches._workers[n % 2].pid, signal.SIGKILL)
            n += 1
    except RuntimeError as error:
        assert "exited unexpectedly" in str(error) or "killed by signal" in str(error), error
    return n


def test_killed_workers_leave_nothing(pytestconfig):
    """More workers are killed than there are items, and each item is used again."""
    collate = arenapy_torch.collate(slab_of(8))
    files = len(os.listdir("/proc/self/fd"))
    wanted, kills = 300, 12
    if pytestconfig.getoption("--tier") != "quick":
        wanted, kills = 10_000, 100
    n = 0
    for i in range(kills):
        loader = DataLoader(
            Samples(4 * wanted // kills), batch_size=4, num_workers=2, collate_fn=collate
        )
        n += epoch(loader, killed=i % 20)
    n += epoch(
        DataLoader(Samples(4 * (wanted - n)), batch_size=4, num_workers=2, collate_fn=collate)
    )
    assert n == wanted
    end = time.monotonic() + 10
    while any(one and not torch_batches._has_ended(one >> 32) for one in words(collate)):
        assert time.monotonic() < end
        time.sleep(0.01)
    taken = [collate._items.take() for _ in range(8)]
    assert None not in taken
    for item, word in taken:
        collate._items.give_back(item, word)
    assert len(os.listdir("/proc/self/fd")) <= files + 2


def test_a_batch_of_a_worker_that_has_ended():
    """Its item went to another worker: an error, and not that one's bytes."""
    collate = arenapy_torch.collate(slab_of(1))
    child = os.fork()
    if child == 0:
        os._exit(0 if collate._items.take() == (0, os.getpid() << 32 | 1) else 1)
    assert os.waitpid(child, 0)[1] == 0
    item, word = collate._items.take()  # of the dead
    with pytest.raises(RuntimeError, match="worker that made this batch has ended"):
        collate._tensor(item, child << 32 | 1, 64, (1,), torch.uint8)
    tensor = collate._tensor(item, word, 64, (1,), torch.uint8)
    with pytest.raises(RuntimeError, match="worker that made this batch has ended"):
        collate._tensor(item, child << 32 | 1, 64, (1,), torch.uint8)
    del tensor
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
    sent = torch_batches._Sent(collate._number, 0, 0, 64, (1,), torch.uint8)
    make, place = sent.__reduce__()
    del collate
    with pytest.raises(RuntimeError, match="is gone; keep it, or the DataLoader"):
        make(*place)


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
