"""Allocators that are not arenapy's under `AllocatorMachine`: what ten lines a piece attack."""

import ctypes
import itertools
import mmap
import re
import sys
from multiprocessing.shared_memory import SharedMemory

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import run_state_machine_as_test

from arenapy.testing import AllocatorMachine, TwoThreadMachine, operation, sizes
from arenapy.testing.attack import attack

SYSTEM_CALLS = settings(max_examples=20, stateful_step_count=20)  # each block is one


class Unaligned(AllocatorMachine):
    """Allocators that cannot be asked for an alignment, and hand out as much as there is."""

    alignments = st.none()

    def make(self):
        return None


class Bytes(Unaligned):
    """Each block is a bytearray."""

    bad_request = None

    def allocate(self, state, nbytes, align):
        return bytearray(max(nbytes, 1))

    def address(self, block):
        return ctypes.addressof(ctypes.c_char.from_buffer(block))

    def write(self, block, offset, data):
        block[offset : offset + len(data)] = data

    def read(self, block, offset, nbytes):
        return block[offset : offset + nbytes]


class ShortReads(Bytes):
    def read(self, block, offset, nbytes):
        return bytes(block[offset:nbytes])


class WrongReads(Bytes):
    def read(self, block, offset, nbytes):
        return nbytes


def test_bounds_of_numpy_integers():
    class Outside(Bytes):
        def bounds(self, state):
            return [(np.uint64(0), np.int64(1))]

    class Inside(Bytes):
        def bounds(self, state):
            return [(np.int64(2**62), np.int32(1)), (np.uint64(0), np.int64(2**62))]

    assert list(attack(Outside, examples=20, shrink=0).findings) == ["outside"]
    assert attack(Inside, examples=20, shrink=0).error is None


class NoRemaining(Bytes):
    def remaining(self, state):
        pass


class NoAddress(Bytes):
    def address(self, block):
        super().address(block)


class SignedReads(Bytes):
    def read(self, block, offset, nbytes):
        return memoryview((ctypes.c_byte * nbytes).from_buffer_copy(block, offset))


class Characters(Bytes):
    def read(self, block, offset, nbytes):
        return memoryview((ctypes.c_char * nbytes).from_buffer_copy(block, offset))


class NumPyAddress(Bytes):
    read, write = Unaligned.read, Unaligned.write

    def address(self, block):
        return np.uint64(super().address(block))


class Unprintable(bytearray):
    def __repr__(self):
        raise NotImplementedError("nobody needs it, and it may be slow")


class NoText(Bytes):
    def allocate(self, state, nbytes, align):
        return Unprintable(max(nbytes, 1))


class NumPyRemaining(Bytes):
    grows = True

    def remaining(self, state):
        return np.uint64(100)


@pytest.mark.parametrize(
    "machine", [Bytes, SignedReads, Characters, NumPyAddress, NumPyRemaining, NoText]
)
def test_hooks_that_return_bytes_and_integers(machine):
    assert attack(machine, examples=20, shrink=0).error is None


@pytest.mark.parametrize(
    ("machine", "said"),
    [
        (ShortReads, r"read\(block, \d+, \d+\) returned 0 bytes: return the \d+ bytes"),
        (WrongReads, r"read\(block, 0, \d+\) returned an object of <class 'int'>"),
        (NoRemaining, r"remaining\(state\) returned None: return the bytes that are left"),
        (NoAddress, r"address\(block\) returned None: return the address"),
    ],
)
def test_hooks_that_return_something_else_are_named(machine, said):
    class Large(machine):
        sizes = sizes(least=20_000, most=40_000)

    found = attack(Large, examples=20, shrink=0)
    assert list(found.findings) == ["TypeError"] and re.search(said, found.error)


class MmapMachine(Unaligned):
    """A mapping a block. Empty ones there are none."""

    sizes = sizes(least=1)
    smallest = 1
    default_align = mmap.PAGESIZE

    def allocate(self, state, nbytes, align):
        return mmap.mmap(-1, nbytes)

    def address(self, block):
        return ctypes.addressof(ctypes.c_char.from_buffer(block))

    def free(self, state, block):
        block.close()

    def zeroed(self, state, nbytes):
        return mmap.mmap(-1, nbytes)


class SharedMemoryMachine(Unaligned):
    """A segment a block."""

    sizes = sizes(least=1)
    smallest = 1
    default_align = mmap.PAGESIZE

    def allocate(self, state, nbytes, align):
        if nbytes > sys.maxsize:  # it would leave its file behind
            raise MemoryError(nbytes)
        return SharedMemory(create=True, size=nbytes)

    def address(self, block):
        return ctypes.addressof(ctypes.c_char.from_buffer(block.buf))

    def free(self, state, block):
        block.close()
        block.unlink()


class ByteArrayMachine(Unaligned):
    """Python's own objects; dropping one gives it back."""

    empty_is_apart = False  # it has no memory then

    def allocate(self, state, nbytes, align):
        return bytearray(nbytes)

    def address(self, block):
        return ctypes.addressof((ctypes.c_char * len(block)).from_buffer(block))

    def free(self, state, block):
        pass

    def zeroed(self, state, nbytes):
        return bytearray(nbytes)


TestMmap = settings(SYSTEM_CALLS)(MmapMachine).TestCase
TestSharedMemory = settings(SYSTEM_CALLS)(SharedMemoryMachine).TestCase
TestByteArray = ByteArrayMachine.TestCase


class ArrowMachine(Unaligned):
    """A pool of pyarrow, behind a proxy: what that says is allocated is this machine's."""

    default_align = 64
    empty_is_apart = False  # all of them are one static area

    def make(self):
        import pyarrow

        return pyarrow.proxy_memory_pool(self.pool)

    def allocate(self, state, nbytes, align):
        import pyarrow

        return pyarrow.allocate_buffer(nbytes, memory_pool=state)

    def address(self, block):
        return block.address

    def free(self, state, block):
        pass  # by being dropped

    def used(self, state):
        return state.bytes_allocated()


class TwoAtArrow(TwoThreadMachine, ArrowMachine):
    pass


@pytest.mark.parametrize("base", [ArrowMachine, TwoAtArrow])
@pytest.mark.parametrize("name", ["mimalloc", "jemalloc", "system"])
@pytest.mark.sampled
@pytest.mark.full
def test_arrow(name, base):
    pyarrow = pytest.importorskip("pyarrow")
    if name not in pyarrow.supported_memory_backends():
        pytest.skip(f"this pyarrow has no {name}")
    machine = type("Arrow", (base,), {"pool": getattr(pyarrow, f"{name}_memory_pool")()})
    run_state_machine_as_test(machine, settings=settings(max_examples=12))
    assert machine.tally.steps > 100 and machine.tally.found_at is None


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=2),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner),
    max_leaves=5,
)


@pytest.mark.parametrize("name", ["nbytes", "align", "which", "requests"])
def test_arguments_of_a_step_of_one_s_own_may_have_any_names(name):
    """Also names that the machine's own steps have, for other things."""

    class Own(MmapMachine):
        @operation(**{name: JSON})
        def own(self, **values):
            assert len(repr(values[name])) < 8, "a value of its own"

        @operation(nbytes=st.integers(100, 200), which=st.integers(1, 3))
        def limited(self, nbytes, which):
            assert nbytes >= 100 and which, "a smaller value than it may have"

    found = attack(Own, examples=60)
    (finding,) = found.findings.values()
    assert finding.message.startswith("a value of its own")


def test_memory_that_may_not_be_touched():
    """Nothing is written there, and nothing read, zeros neither."""

    class Untouched(Unaligned):
        write = bad_request = None

        def make(self):
            return itertools.count(1)

        def allocate(self, state, nbytes, align):
            return next(state) << 40

        def address(self, block):
            return block

        def zeroed(self, state, nbytes):
            return self.allocate(state, nbytes, None)

        def read(self, block, offset, nbytes):
            raise AssertionError("it was read")

    assert attack(Untouched, examples=20).failing is None
