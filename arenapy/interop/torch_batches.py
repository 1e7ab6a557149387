"""Batches of torch's DataLoader in memory that its workers and the program share.

Contents: the collate function, and the ownership of the items of its Slab. The memory is that of a
Slab over Shared.

Each item begins with a word: 0 if nobody has the item, otherwise a process (the upper half) and a
ticket (the lower half). Every change is a compare-and-swap. So an item has one owner at all times,
also if a process is killed, and a worker takes the items of processes that have ended. The ticket
shows the program whether the item still has the batch that a worker sent.
"""

import atexit
import itertools
import os
import queue
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from arenapy.buffer.buffer import Buffer
from arenapy.interop import shared_words
from arenapy.slab.slab import Slab

HEAD = 64  # bytes of an item before the batch: the word, and the alignment of all tensors
TICKETS = 1 << 32
PATIENCE = 1.0  # seconds: the program may be ahead of the copies, but it may also keep all batches
MOMENT = 0.0002

_collates: "weakref.WeakValueDictionary[int, Collate]" = weakref.WeakValueDictionary()
_numbers = itertools.count()
_threads: dict[threading.Thread, "queue.SimpleQueue[Any]"] = {}  # those that wait for copies


class Items:
    """Ownership of the items. Each process that maps the items has one of these."""

    def __init__(self, buffers: Sequence[Buffer]) -> None:
        self.buffers = buffers
        self._tickets = itertools.count(1)

    def take(self) -> tuple[int, int] | None:
        """An item for this process, and its word; None if there is none."""
        mine = os.getpid() * TICKETS + next(self._tickets) % TICKETS
        for of_the_dead in (False, True):
            for number, buffer in enumerate(self.buffers):
                word = shared_words.load(buffer)
                if word and not (of_the_dead and _has_ended(word // TICKETS)):
                    continue
                if shared_words.swap(buffer, word, mine):
                    return number, mine
        return None

    def claim(self, number: int, word: int) -> int:
        """The new word of an item that another process took for this one; 0: it is lost."""
        mine = os.getpid() * TICKETS + word % TICKETS
        return mine if shared_words.swap(self.buffers[number], word, mine) else 0

    def give_back(self, number: int, word: int) -> None:
        """Make the item free."""
        shared_words.swap(self.buffers[number], word, 0)


def _has_ended(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass
    return False


class Collate:
    """A function that makes batches in the items of a Slab, for ``DataLoader(collate_fn=...)``."""

    def __init__(self, torch: Any, slab: Slab) -> None:
        if not isinstance(slab, Slab):
            raise TypeError(
                f"{slab!r} is not a Slab; give arenapy.Slab(bytes_of_a_batch, count, Shared())"
            )
        if slab.kind != "shared":
            raise ValueError(
                f"{slab!r} is over {slab.kind} memory, which worker processes cannot write into; "
                "give a Slab over arenapy.Shared(). The program pins its memory itself"
            )
        if slab.capacity == slab.count:
            raise ValueError(f"{slab!r} has no free item; make a Slab for the batches alone")
        self._begin(next(_numbers), slab.alloc_many(slab.capacity - slab.count))
        self._process = os.getpid()
        self._held: weakref.WeakValueDictionary[int, _Held] = weakref.WeakValueDictionary()
        self._leaving: queue.SimpleQueue[Any] | None = None
        self._lock = threading.Lock()
        _collates[self._number] = self
        if torch.cuda.is_available():
            self._leaving = queue.SimpleQueue()
            _pin(torch, self, self._items.buffers)
            waiting = threading.Thread(
                target=_give_back_when_done, args=(self._leaving, self._items), daemon=True
            )
            _threads[waiting] = self._leaving
            waiting.start()
            weakref.finalize(self, self._leaving.put, None)

    def _begin(self, number: int, buffers: Sequence[Buffer]) -> None:
        self._number = number
        self._items = Items(buffers)
        self._warned = self._impatient = False

    # A worker that is spawned, and not forked, gets the items by handle.
    def __getstate__(self) -> tuple[int, list[Buffer]]:
        return self._number, list(self._items.buffers)

    def __setstate__(self, state: tuple[int, list[Buffer]]) -> None:
        self._begin(*state)
        self._process = 0

    def __call__(self, samples: Sequence[Any]) -> Any:
        """Make a batch of samples, as torch's ``default_collate`` does."""
        from torch.utils.data import default_collate
        from torch.utils.data._utils.collate import collate

        taken = self._items.take()
        end = time.monotonic() + (0 if self._impatient else PATIENCE)
        while taken is None and time.monotonic() < end:
            time.sleep(MOMENT)
            taken = self._items.take()
        self._impatient = taken is None
        if taken is None:
            if not self._warned:
                self._warned = True
                warnings.warn(
                    f"all {len(self._items.buffers)} items of the Slab are in use, so batches are "
                    "copied: give the Slab num_workers * prefetch_factor items, and one for each "
                    "batch that the program keeps",
                    RuntimeWarning,
                    stacklevel=2,
                )
            return default_collate(samples)
        batch = _Batch(self, *taken)
        try:
            made = collate(samples, collate_fn_map=batch.functions())
        except BaseException:
            self._items.give_back(*taken)
            raise
        if batch.used == HEAD:  # no tensor
            self._items.give_back(*taken)
        return made

    def _tensor(self, item: int, word: int, offset: int, shape: tuple[int, ...], dtype: Any) -> Any:
        """A tensor of the program over the bytes that a worker wrote."""
        import torch

        with self._lock:
            held = self._held.get(item)
            if held is None or held.sent != word:
                mine = self._items.claim(item, word)
                if not mine:
                    raise RuntimeError(
                        "the worker that made this batch has ended, and another one has its memory"
                    )
                held = self._held[item] = _Held(self, item, word, mine)
        return _part(torch.from_numpy(held.array()), offset, shape, dtype)

    def _dropped(self, item: int, word: int) -> None:
        """Free the memory of a batch, whose last tensor is gone, after the copies out of it."""
        if os.getpid() != self._process or sys.is_finalizing():
            return
        torch = sys.modules["torch"]
        if self._leaving is None or not torch.cuda.is_initialized():
            self._items.give_back(item, word)
            return
        if not torch.cuda.is_current_stream_capturing():  # else a graph may read it for good
            event = torch.cuda.Event(blocking=True)
            event.record()
            self._leaving.put((event, item, word))


class _Held:
    """A batch that the program has. Each of its tensors keeps it."""

    def __init__(self, collate: Collate, item: int, sent: int, word: int) -> None:
        self.collate, self.item, self.sent, self.word = collate, item, sent, word

    def array(self) -> Any:
        import numpy as np

        return np.asarray(self)

    @property
    def __array_interface__(self) -> dict[str, Any]:
        buffer = self.collate._items.buffers[self.item]
        return {
            "version": 3, "typestr": "|u1", "shape": (buffer.nbytes,),
            "data": (buffer.address, False),
        }  # fmt: skip

    def __del__(self) -> None:
        self.collate._dropped(self.item, self.word)


class _Sent:
    """A tensor on its way from a worker to the program, where it arrives as a tensor."""

    def __init__(self, *place: Any) -> None:
        self.place = place

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return _arrived, self.place


def _arrived(number: int, *place: Any) -> Any:
    collate = _collates.get(number)
    if collate is None:
        raise RuntimeError(
            "the collate function that this batch belongs to is gone; keep it, or the DataLoader"
        )
    return collate._tensor(*place)


class _Batch:
    """A batch that is being made in an item."""

    def __init__(self, collate: Collate, item: int, word: int) -> None:
        import torch

        self.collate, self.item, self.word = collate, item, word
        self.used = HEAD
        self.bytes = torch.frombuffer(collate._items.buffers[item], dtype=torch.uint8)

    def functions(self) -> dict[Any, Callable[..., Any]]:
        """The argument of torch's `collate` that says how each kind of sample becomes a tensor."""
        import torch
        from torch.utils.data._utils.collate import default_collate_fn_map as usual

        def stacked(batch: Sequence[Any], *, collate_fn_map: Any = None) -> Any:
            first = batch[0]
            if first.layout is not torch.strided or first.is_nested or first.device.type != "cpu":
                return usual[torch.Tensor](batch, collate_fn_map=collate_fn_map)
            return self.filled(
                (len(batch), *first.shape), first.dtype, lambda out: torch.stack(batch, out=out)
            )

        def moved(make: Callable[..., Any]) -> Callable[..., Any]:
            def made(batch: Sequence[Any], *, collate_fn_map: Any = None) -> Any:
                tensor = make(batch, collate_fn_map=collate_fn_map)
                if not isinstance(tensor, torch.Tensor):
                    return tensor
                return self.filled(tensor.shape, tensor.dtype, lambda out: out.copy_(tensor))

            return made

        numbers = {kind: moved(make) for kind, make in usual.items()}
        return {**numbers, torch.Tensor: stacked}

    def filled(self, shape: Sequence[int], dtype: Any, fill: Callable[[Any], Any]) -> Any:
        """A new tensor in the item, as the batch shall contain it."""
        import torch

        offset, shape = self.used, tuple(shape)
        nbytes = dtype.itemsize
        for extent in shape:
            nbytes *= extent
        if offset + nbytes > len(self.bytes):
            raise ValueError(
                f"a batch of at least {offset + nbytes} bytes does not fit into an item of "
                f"{len(self.bytes)}; make the Slab with a larger item_size, or smaller batches"
            )
        self.used = -(-(offset + nbytes) // HEAD) * HEAD
        with torch.no_grad():
            fill(_part(self.bytes, offset, shape, dtype))
        place = self.item, self.word, offset, shape, dtype
        if self.collate._process == os.getpid():  # a DataLoader without workers
            return self.collate._tensor(*place)
        return _Sent(self.collate._number, *place)


def _part(tensor: Any, offset: int, shape: tuple[int, ...], dtype: Any) -> Any:
    nbytes = dtype.itemsize
    for extent in shape:
        nbytes *= extent
    return tensor[offset : offset + nbytes].view(dtype).view(shape)


def _pin(torch: Any, collate: Collate, buffers: Sequence[Buffer]) -> None:
    """Register the items with CUDA until the collate function and all its batches are gone."""
    runtime = torch.cuda.cudart()
    for buffer in buffers:
        error = runtime.cudaHostRegister(buffer.address, buffer.nbytes, 0)
        if int(error):
            raise RuntimeError(f"cudaHostRegister of {buffer!r} failed: {error}")
        weakref.finalize(collate, _unpin, runtime, buffer).atexit = False


def _unpin(runtime: Any, buffer: Buffer) -> None:
    runtime.cudaHostUnregister(buffer.address)


def _give_back_when_done(leaving: Any, items: Items) -> None:
    """Wait, in a thread, for the copies out of batches that the program has dropped."""
    while (left := leaving.get()) is not None:
        event, item, word = left
        event.synchronize()
        items.give_back(item, word)
    _threads.pop(threading.current_thread(), None)


# The interpreter ends daemon threads that come back to it. Inside torch, whose frames may not be
# unwound, that would abort the program.
@atexit.register
def _end_threads() -> None:
    while _threads:
        thread, leaving = _threads.popitem()
        leaving.put(None)
        thread.join()
