"""Batches of torch's DataLoader in memory that its workers and the program share.

Contents: the collate function, and the ownership of the items of its Slab. The memory is that of a
Slab over Shared.

Each item begins with two words. A word is 0, or a process (the upper half) and a ticket (the lower
half), and every change is a compare-and-swap. The first word is the owner of the item: the process
that makes the batch, then the message with the batch, then the process that has received it. So an
item has one owner at all times, also if a process is killed. The second word is the process that
made the batch, for as long as it has a tensor there. An item is free if each word is 0, or of a
process that has ended.

A forked child sees the batches that its parent had at the fork. So the item of a batch stays the
parent's until the children have ended that were forked between the batch's beginning and its end.
Forks have numbers, and each process knows by a region of its own which children live: every child
sees that region. A batch that has ended is not seen by later children, also if its item is not free
yet.
"""

import atexit
import copy
import itertools
import os
import queue
import sys
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Mapping, MutableMapping, MutableSequence, Sequence
from contextlib import suppress
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np

from arenapy.buffer.buffer import Buffer
from arenapy.interop import shared_words
from arenapy.memory.shared import child_lives, last_fork
from arenapy.memory.sources import Shared
from arenapy.slab.slab import Slab

HEAD = 64  # bytes of an item before the batch: the words, and the alignment of all tensors
WORD = 8
TICKETS = 1 << 32
PATIENCE = 1.0  # seconds: the program may be ahead of the copies, but it may also keep all batches
MOMENT = 0.0002

_collates: "weakref.WeakValueDictionary[tuple[int, int], Collate]" = weakref.WeakValueDictionary()
_made: "weakref.WeakValueDictionary[int, _Held]" = weakref.WeakValueDictionary()  # by address
_numbers = itertools.count()
_tickets = itertools.count(1)
# The threads that wait for copies. A thread is in here until the last object of its frames is gone.
_threads: "weakref.WeakKeyDictionary[threading.Thread, queue.SimpleQueue[Any]]" = (
    weakref.WeakKeyDictionary()
)


class Items:
    """Ownership of the items. Each process that maps the items has one of these."""

    def __init__(self, buffers: Sequence[Buffer]) -> None:
        self.buffers = buffers
        self.makers = [buffer[WORD : 2 * WORD] for buffer in buffers]
        self._seen_by_children = Shared(huge_pages=None).region(HEAD)
        self._dropped: deque[tuple[int, int, int, int]] = deque()

    def take(self, held: "_Held") -> bool:
        """Make a free item that of a batch; False if there is none."""
        for of_the_dead in (False, True):
            for held.item, owner in enumerate(self.buffers):
                if _take_word(owner, held.word, of_the_dead):
                    if _take_word(self.makers[held.item], held.word, of_the_dead):
                        return True
                    self.give_back(held.item, held.word)
        return False

    def pass_on(self, number: int, old: int, new: int) -> bool:
        """Make `new` the owner of an item; False if `old` is not."""
        return shared_words.swap(self.buffers[number], old, new)

    def give_back(self, number: int, word: int) -> None:
        """Make the item free of the batch of this word, and of no other one."""
        shared_words.swap(self.makers[number], word, 0)
        shared_words.swap(self.buffers[number], word, 0)

    def drop(self, number: int, word: int, first: int, last: int) -> None:
        """Make the item free when no child of the forks after `first` up to `last` lives."""
        self._dropped.append((number, word, first, last))
        self.settle()

    def settle(self) -> None:
        """Make the items free of those dropped batches that no child sees any more.

        A batch may be dropped in here, where garbage is collected, and by another thread. An
        exception of a signal may end this: a batch is forgotten last.
        """
        for _ in range(len(self._dropped)):
            with suppress(IndexError, ValueError):
                dropped = self._dropped[0]
                number, word, first, last = dropped
                if child_lives(self._seen_by_children, first, last):
                    self._dropped.rotate(-1)
                else:
                    self.give_back(number, word)
                    self._dropped.remove(dropped)


def _new_word() -> int:
    return os.getpid() * TICKETS + next(_tickets) % TICKETS


def _take_word(block: Buffer, mine: int, of_the_dead: bool) -> bool:
    word = shared_words.load(block)
    free = not word or (of_the_dead and _has_ended(word // TICKETS))
    return free and shared_words.swap(block, word, mine)


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

    _leaving: "queue.SimpleQueue[Any] | None"

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
        buffers = slab.alloc_many(slab.capacity - slab.count)
        for buffer in buffers:
            buffer[:HEAD] = bytes(HEAD)
        self._begin((os.getpid(), next(_numbers)), buffers)
        if torch.cuda.is_available():
            self._leaving = queue.SimpleQueue()
            _pin(torch, self, self._items.buffers)
            waiting = threading.Thread(
                target=_give_back_when_done, args=(self._leaving, self._items), daemon=True
            )
            _threads[waiting] = self._leaving
            waiting.start()
            weakref.finalize(self, self._leaving.put, None)

    def _begin(self, number: tuple[int, int], buffers: Sequence[Buffer]) -> None:
        """Begin in this process."""
        self._number, self._items = number, Items(buffers)
        self._leaving = None
        self._warned = self._impatient = False
        self._process = os.getpid()
        _collates[number] = self

    def _here(self) -> Items:
        """The items as this process has them, which may be a forked child."""
        if self._process != os.getpid():
            self._begin(self._number, self._items.buffers)
        return self._items

    # A process that is spawned, and not forked, gets the items by handle.
    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return _opened, (self._number, list(self._items.buffers))

    def __call__(self, samples: Sequence[Any]) -> Any:
        """Make a batch of samples, as torch's ``default_collate`` does."""
        import torch
        from torch.utils.data._utils.collate import collate

        if torch.utils.data.get_worker_info() is not None:
            ForkingPickler.register(torch.Tensor, _sent)
        held = _Held(self)
        end = time.monotonic() + (0 if self._impatient else PATIENCE)
        while not self._items.take(held):
            if time.monotonic() < end:
                time.sleep(MOMENT)
                continue
            self._impatient = True
            if not self._warned:
                self._warned = True
                warnings.warn(
                    f"all {len(self._items.buffers)} items of the Slab are in use, so batches are "
                    "copied: give the Slab num_workers * prefetch_factor items, and one for each "
                    "batch that the program keeps",
                    RuntimeWarning,
                    stacklevel=2,
                )
            return torch.utils.data.default_collate(samples)
        self._impatient = False
        return collate(samples, collate_fn_map=_Batch(held).functions())

    def _dropped(self, item: int, word: int, first: int) -> None:
        """Free the memory of a batch, whose last tensor is gone, after the copies out of it."""
        if word // TICKETS != os.getpid() or sys.is_finalizing():  # a child frees nothing of others
            return
        dropped = item, word, first, last_fork()
        torch = sys.modules["torch"]
        if self._leaving is None or not torch.cuda.is_initialized():
            self._items.drop(*dropped)
            return
        if not torch.cuda.is_current_stream_capturing():  # else a graph may read it for good
            event = torch.cuda.Event(blocking=True)
            event.record()
            self._leaving.put((event, dropped))


def _opened(number: tuple[int, int], buffers: Sequence[Buffer]) -> Collate:
    collate = _collates.get(number)
    if collate is None:
        collate = Collate.__new__(Collate)
        collate._begin(number, buffers)
    return collate


class _Held:
    """The batch of an item in this process, which frees the item. Each of its tensors keeps this.

    The word is a new one, and known here before it is in the item. So the end of this frees just
    the item that it has, if it has one, whatever an exception of a signal has interrupted.
    """

    word = 0  # before there is anything to free

    def __init__(self, collate: Collate) -> None:
        items = collate._here()
        items.settle()
        self.collate, self.item, self.first = collate, 0, last_fork()
        self.word = _new_word()

    @property
    def address(self) -> int:
        return self.collate._items.buffers[self.item].address

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return {
            "version": 3, "typestr": "|u1", "data": (self.address, False),
            "shape": (self.collate._items.buffers[self.item].nbytes,),
        }  # fmt: skip

    # Once in each message, however many of its tensors the message has. The first message takes the
    # item along. Another one gets a copy, since the program may have freed the item by then.
    def __reduce__(self) -> Any:
        word = _new_word()
        mine = self.word // TICKETS == os.getpid()
        if mine and self.collate._items.pass_on(self.item, self.word, word):
            return _received, (self.collate._number, self.item, word)
        return np.array(self).__reduce__()

    def __del__(self) -> None:
        if self.word:
            self.collate._dropped(self.item, self.word, self.first)


def _sent(tensor: Any) -> Any:
    """What a worker sends of a tensor: its place if it is in an item."""
    from torch.multiprocessing.reductions import reduce_tensor

    held = _held_by(tensor)
    if held is None or tensor.requires_grad:
        return reduce_tensor(tensor)
    storage = tensor.untyped_storage()
    place = storage.data_ptr() - held.address, storage.nbytes(), tensor.dtype
    return _arrived, (held, *place, tensor.storage_offset(), tuple(tensor.shape), tensor.stride())


def _received(number: tuple[int, int], item: int, word: int) -> Any:
    """The bytes of an item that a worker sent: this process's from here on."""
    collate = _collates.get(number)
    if collate is None:
        raise RuntimeError(
            "the collate function that this batch belongs to is gone; keep it, or the DataLoader"
        )
    held = _Held(collate)
    held.item = item
    if not collate._items.pass_on(item, word, held.word):
        raise RuntimeError(
            "the worker that made this batch has ended, and another one has its memory"
        )
    return np.asarray(held)


def _arrived(whole: Any, first: int, nbytes: int, dtype: Any, *layout: Any) -> Any:
    import torch

    memory = torch.from_numpy(whole[first : first + nbytes]).untyped_storage()
    return torch.empty(0, dtype=dtype, device="cpu").set_(memory, *layout)


class _Batch:
    """A batch that is being made in an item."""

    def __init__(self, held: _Held) -> None:
        self.held = held
        self.used = HEAD
        self.bytes = np.asarray(held)

    def functions(self) -> dict[Any, Callable[..., Any]]:
        """The argument of torch's `collate` that says how each kind of sample becomes a tensor."""
        import torch
        from torch.utils.data._utils.collate import collate_tensor_fn
        from torch.utils.data._utils.collate import default_collate_fn_map as usual

        def stacked(batch: Sequence[Any], *, collate_fn_map: Any = None) -> Any:
            first = batch[0]
            dtype = first.dtype
            if not _is_plain(first) or not all(
                type(one) is torch.Tensor and one.dtype is dtype and not one.requires_grad
                for one in batch
            ):  # torch decides which type, class and gradient the batch has
                return usual[torch.Tensor](batch, collate_fn_map=collate_fn_map)
            return self.filled(
                (len(batch), *first.shape), dtype, lambda out: torch.stack(batch, out=out)
            )

        def moved(make: Callable[..., Any]) -> Callable[..., Any]:
            def made(batch: Sequence[Any], *, collate_fn_map: Any = None) -> Any:
                tensor = make(batch, collate_fn_map=collate_fn_map)
                if not isinstance(tensor, torch.Tensor) or not _is_plain(tensor):
                    return tensor
                if _held_by(tensor) is self.held:
                    return tensor  # `make` has called torch's `collate` with these functions
                return self.filled(tensor.shape, tensor.dtype, lambda out: out.copy_(tensor))

            return made

        functions = {kind: moved(make) for kind, make in usual.items()}
        if usual[torch.Tensor] is collate_tensor_fn:  # else the user has put another one there
            functions[torch.Tensor] = stacked
        return functions | {Mapping: _container, Sequence: _container}  # after the user's own

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
        out = torch.from_numpy(self.bytes[offset : offset + nbytes]).view(dtype).view(shape)
        with torch.no_grad():
            fill(out)
        if nbytes:
            _made[out.data_ptr()] = self.held
        return out


def _container(batch: Sequence[Any], *, collate_fn_map: Any = None) -> Any:
    """A batch of containers as torch makes it, except that nothing is collated twice.

    torch does so if a container of the samples' class cannot be made. Here that takes double room.
    """
    from torch.utils.data._utils.collate import collate

    def made(samples: Sequence[Any]) -> Any:
        return collate(samples, collate_fn_map=collate_fn_map)

    first = batch[0]
    whole: Any
    if isinstance(first, Mapping):
        whole = {key: made([one[key] for one in batch]) for key in first}
    elif isinstance(first, tuple) and hasattr(first, "_fields"):
        return type(first)(*map(made, zip(*batch, strict=False)))
    else:
        if any(len(one) != len(first) for one in batch):
            raise RuntimeError("each element in list of batch should be of equal size")
        whole = [made(samples) for samples in zip(*batch, strict=False)]
        if isinstance(first, tuple):
            return whole
    try:
        if not isinstance(first, (MutableMapping, MutableSequence)):
            return type(first)(whole)
        clone = copy.copy(first)  # it may have more than its items
        for key in whole if isinstance(whole, dict) else range(len(whole)):
            clone[key] = whole[key]
        return clone
    except TypeError:
        return whole


def _is_plain(tensor: Any) -> bool:
    import torch

    return (
        tensor.layout is torch.strided
        and not (tensor.is_nested or tensor.is_quantized)
        and tensor.device.type == "cpu"
    )


def _held_by(tensor: Any) -> _Held | None:
    """The batch whose item a tensor is in."""
    return _made.get(tensor.untyped_storage().data_ptr()) if _is_plain(tensor) else None


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
        event, dropped = left
        event.synchronize()
        items.drop(*dropped)


# Else the program might wait for new workers, which wait for an item that only it can make free.
def _settle_all() -> None:
    for collate in list(_collates.values()):
        if collate._process == os.getpid():
            collate._items.settle()


os.register_at_fork(before=_settle_all)


# The interpreter ends daemon threads that come back to it. Inside torch, whose frames may not be
# unwound, that would abort the program.
@atexit.register
def _end_threads() -> None:
    while _threads:
        thread, leaving = _threads.popitem()
        leaving.put(None)
        thread.join()
