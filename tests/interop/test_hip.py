"""HIP memory, on a runtime made of Python functions. Nothing here ever ran on an AMD GPU.

The simulated runtime keeps the host away from device memory, so a byte of it that arenapy touched
would end this process. Pinned memory is also in the matrices of test_every_allocator.
"""

import ctypes
import gc
import importlib
import inspect
import os
import pickle
import re
import sys
import warnings
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from capsules import tensor_of
from children import in_child
from helpers import in_threads
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import run_state_machine_as_test
from simulated_hip import MIB, SimulatedHip, hipError_t, simulated_hip

from arenapy import Bump, OutOfMemory, Pool, Region, Slab, testing
from arenapy.interop import hip, hip_calls

ALLOCATORS = {
    "bump": lambda source: Bump(MIB, source, 4 * MIB),
    "slab": lambda source: Slab(64 << 10, 16, source, max_count=64),
    "pool": lambda source: Pool(4 * MIB, source),
}
SOURCES = {"device": hip.Device, "second device": lambda: hip.Device(1), "pinned": hip.Pinned}


@pytest.fixture
def runtime():
    with simulated_hip() as one:
        yield one


@pytest.fixture(params=ALLOCATORS)
def make(request):
    return ALLOCATORS[request.param]


# Every allocator -----------------------------------------------------------------------------


def own_machine(kind, runtime, ordinal):
    class Machine(kind):
        source = hip.Device(ordinal)
        zeroed = None

        def write(self, block, offset, data):
            start = runtime.window(self.address(block) + offset, len(data), True, ordinal)
            ctypes.memmove(start, data, len(data))

        def read(self, block, offset, nbytes):
            start = runtime.window(self.address(block) + offset, nbytes, True, ordinal)
            return ctypes.string_at(start, nbytes)

        def scopes_outlived(self, **_):
            """Its blocks are arrays of zeros, which this memory does not have."""

    return Machine


@pytest.mark.parametrize("kind", [testing.BumpMachine, testing.SlabMachine, testing.PoolMachine])
@pytest.mark.parametrize("ordinal", [0, 1])
@pytest.mark.sampled
@pytest.mark.full
def test_allocators_over_device_memory_keep_their_promises(runtime, kind, ordinal):
    few = settings(max_examples=max(settings().max_examples // 4, 3), deadline=None)
    run_state_machine_as_test(own_machine(kind, runtime, ordinal), settings=few)
    assert runtime.calls["hipMalloc"] and runtime.calls["hipFree"]


@pytest.mark.parametrize("source", SOURCES)
def test_blocks_say_what_they_are(runtime, make, source):
    allocator = make(SOURCES[source]())
    block = allocator.alloc(1000, align=64)
    region = allocator.regions[0]
    on_device = source != "pinned"
    assert block.kind == region.kind == ("hip" if on_device else "hip pinned")
    assert block.device_id == {"device": 0, "second device": 1, "pinned": -1}[source]
    assert region.host_accessible == (not on_device) and region.device_accessible
    assert runtime.window(block.address, 1000, on_device)


@pytest.mark.parametrize("source", SOURCES)
def test_memory_goes_back_with_the_last_buffer(runtime, make, source):
    allocator = make(SOURCES[source]())
    block = allocator.alloc(100)
    part = block[10:20]
    del block, allocator
    gc.collect()
    assert len(runtime.ranges) == 1
    del part
    gc.collect()
    assert not runtime.ranges


def test_what_the_host_would_have_to_do_is_refused(runtime, make):
    allocator = make(hip.Device())
    block = allocator.alloc(4096)
    calls = [
        lambda: allocator.zeros(10),
        lambda: allocator.empty(10),
        lambda: allocator.copy(np.arange(3)),
        lambda: block.fill(1),
        lambda: block.copy_from(bytes(4096)),
        lambda: block.copy_to(bytearray(4096)),
        lambda: block.array(),
        lambda: bytes(block),
        lambda: pickle.dumps(block),
        lambda: pickle.dumps(block, 5),
    ]
    for call in calls:
        with pytest.raises(BufferError, match="as its source says"):
            call()
    with pytest.raises((BufferError, RuntimeError), match="device"):  # NumPy 2.5, and before
        np.from_dlpack(block)
    with pytest.raises(AttributeError, match="not on the host"):
        _ = block.__array_interface__
    allocator.check()


def test_a_block_that_must_move_to_grow_is_refused(runtime):
    arena = Bump(MIB, hip.Device())
    block = arena.alloc(100)
    arena.alloc(1)
    used = arena.used
    with pytest.raises(BufferError, match="the host cannot copy it; allocate a larger block"):
        arena.grow(block, 1000)
    assert arena.used == used and block.nbytes == 100


def test_debug_mode_touches_no_byte(runtime):
    for allocator in (Pool(4 * MIB, hip.Device(), debug=True),
                      Slab(4096, 8, hip.Device(), debug=True)):  # fmt: skip
        allocator.alloc(4096).release()
        allocator.alloc(100).release()
        allocator.check()


# Copies --------------------------------------------------------------------------------------

BYTES = st.binary(min_size=1, max_size=5000)


@given(data=BYTES, offset=st.integers(0, 300), ordinals=st.tuples(*[st.integers(0, 1)] * 2))
def test_bytes_arrive(data, offset, ordinals):
    with simulated_hip() as runtime:
        pools = [Pool(4 * MIB, hip.Device(ordinal)) for ordinal in ordinals]
        blocks = [pool.alloc(len(data) + offset + 10) for pool in pools]
        there, other = [block[offset : offset + len(data)] for block in blocks]
        for block in blocks:
            runtime.poke(block.address, block.nbytes, 0xEE)
        hip.copy(there, data)
        hip.copy(other, there)
        assert not any(runtime.queues), "it returned before the copy was done"
        back = bytearray(len(data))
        hip.copy(back, other)
        assert back == data
        pinned = Pool(MIB, hip.Pinned()).alloc(len(data))
        hip.copy(pinned, there)
        assert bytes(pinned) == data
        for block in blocks:
            seen = runtime.peek(block.address, block.nbytes)
            assert seen == b"\xee" * offset + data + b"\xee" * 10, "bytes outside have changed"
        assert runtime.current == 0
        del there, other, block, blocks, pools, pinned


def test_arrays_of_numpy_and_typed_views(runtime):
    block = Pool(4 * MIB, hip.Device()).alloc(4000).view((10, 100), "f4")
    x = np.arange(1000, dtype="f4").reshape(10, 100)
    hip.copy(block, x)
    y = np.zeros_like(x)
    hip.copy(y, block)
    assert (x == y).all()
    mixed = Pool(4 * MIB, hip.Device()).alloc(160).view(10, "i4,f8,i4")  # DLPack has no such type
    hip.copy(mixed, np.ones(10, "i4,f8,i4"))
    empty = Pool(4 * MIB, hip.Device()).alloc(0)
    calls = dict(runtime.calls)
    hip.copy(empty, b"")
    assert runtime.calls == calls


@pytest.mark.parametrize("to", [None, 0, 1])
@pytest.mark.parametrize("origin", [None, 0, 1])
def test_a_copy_comes_after_what_the_devices_were_given(runtime, to, origin):
    if to is origin is None:
        return
    sides = [bytearray(8) if one is None else hip.Device(one).region(8).buffer()
             for one in (to, origin)]  # fmt: skip
    for ordinal, side, byte in ((to, sides[0], 1), (origin, sides[1], 2)):
        if ordinal is None:
            side[:] = bytes([byte]) * 8
        else:
            where = side.address, 8, byte
            runtime.launch(ordinal, lambda where=where: runtime.poke(*where))
    hip.copy(*sides)
    runtime.finish(0)
    runtime.finish(1)
    found = sides[0] if to is None else runtime.peek(sides[0].address, 8)
    assert found == b"\2" * 8


def test_bad_sides_are_named(runtime):
    pool = Pool(4 * MIB, hip.Device())
    block, closed = pool.alloc(100), pool.alloc(100)
    closed.release()
    frozen = Region.from_address(
        block.address, 100, kind="hip", readonly=True, host_accessible=False, device_id=0
    ).buffer()
    calls = dict(runtime.calls)
    for arguments, error, text in [
        ((block, bytes(99)), ValueError, "target has 100 bytes and source has 99; slice"),
        ((bytes(100), block), BufferError, "target, a bytes, is read-only; give a writable"),
        ((block, 3), TypeError, "source, a int, has no buffer; give"),
        ((block, np.zeros(200, "u1")[::2]), BufferError, "source, a ndarray, is not contiguous"),
        ((block, np.array([None] * 10)), TypeError, "holds Python objects"),
        ((bytearray(100), bytes(100)), ValueError, "both on the host; use Buffer.copy_from"),
        ((block[:60], block[40:]), ValueError, "overlap, which HIP cannot copy"),
        ((block, block), ValueError, "overlap"),
        ((closed, bytes(100)), ValueError, "closed|released"),
        ((frozen, bytes(100)), BufferError, "is read-only; give a writable Buffer"),
    ]:
        with pytest.raises(error, match=text):
            hip.copy(*arguments)
    assert runtime.calls == calls, "nothing was asked of the runtime"


def test_a_block_that_is_copied_cannot_be_released_meanwhile(runtime):
    block = Pool(4 * MIB, hip.Device()).alloc(100)
    refused = []

    def release(name):
        if name == "hipMemcpy":
            with pytest.raises(BufferError, match="live exports"):
                block.release()
            refused.append(name)

    runtime.before_call = release
    hip.copy(block, bytes(100))
    runtime.before_call = None
    assert refused
    block.release()


# Exports -------------------------------------------------------------------------------------


@pytest.mark.parametrize("ordinal", [0, 1])
def test_device_memory_goes_to_others_by_dlpack(runtime, ordinal):
    block = Pool(4 * MIB, hip.Device(ordinal)).alloc(4000)
    view = block.view((10, 100), "f4")
    assert view.__dlpack_device__() == (10, ordinal)
    for options in (
        {},
        {"stream": 0},
        {"stream": -1},
        {"stream": 1 << 40},
        {"max_version": (1, 0)},
        {"dl_device": (10, ordinal), "copy": False},
    ):
        capsule = view.__dlpack__(**options)
        tensor = tensor_of(capsule)
        assert (tensor.device_type, tensor.device_id) == (10, ordinal)
        assert tensor.data == block.address and tensor.ndim == 2
    empty = view[:0].__dlpack__()
    assert tensor_of(empty).data == 0
    for options in ({"stream": "x"}, {"stream": -2}):
        with pytest.raises(ValueError, match="names no HIP stream"):
            view.__dlpack__(**options)
    for options in ({"dl_device": (2, ordinal)}, {"dl_device": (1, 0)}, {"dl_device": (11, 0)},
                    {"dl_device": (10, 1 - ordinal)}, {"copy": True}):  # fmt: skip
        with pytest.raises(BufferError, match=r"not where the Buffer is|cannot be copied"):
            view.__dlpack__(**options)
    fields = view.__cuda_array_interface__
    assert fields["data"] == (block.address, False) and fields["stream"] is None


def test_pinned_memory_goes_to_others_as_the_hosts_or_as_pinned(runtime):
    block = Pool(4 * MIB, hip.Pinned()).alloc(64)
    assert block.__dlpack_device__() == (1, 0)
    block.fill(7)
    assert (np.from_dlpack(block) == 7).all()
    capsule = block.__dlpack__(dl_device=(11, 0), stream=0, max_version=(1, 0))
    tensor = tensor_of(capsule)
    assert (tensor.device_type, tensor.device_id) == (11, 0)
    assert tensor.data == block.address
    for options in ({"dl_device": (11, 0), "copy": True}, {"dl_device": (3, 0)},
                    {"dl_device": (10, 0)}):  # fmt: skip
        with pytest.raises(BufferError, match=r"not where the Buffer is|cannot be copied"):
            block.__dlpack__(**options)
    with pytest.raises(ValueError, match="takes stream=None"):
        block.__dlpack__(stream=0)
    assert block.__cuda_array_interface__["stream"] is None


def test_a_tensor_keeps_the_block(runtime):
    pool = Pool(4 * MIB, hip.Device())
    block = pool.alloc(100)
    address = block.address
    capsule = block.__dlpack__()
    del block
    others = [pool.alloc(100) for _ in range(100)]
    assert all(abs(other.address - address) >= 100 for other in others)
    del capsule


# Errors --------------------------------------------------------------------------------------


def test_bad_arguments_are_named(runtime):
    for make, error, text in [
        (lambda: hip.Device(-1), ValueError, "ordinal=-1: devices are counted from 0"),
        (lambda: hip.Device("0"), TypeError, "ordinal='0': need an int"),
        (lambda: hip.Device(True), TypeError, "ordinal=True: need an int"),
        (lambda: hip.Device(2).region(1), ValueError, "ordinal=2 is not a HIP device; there are 2"),
        (lambda: hip.Device().region(0), ValueError, "nbytes=0: need at least 1"),
        (lambda: hip.Pinned().region(1.5), TypeError, "nbytes=1.5: need an int"),
        (lambda: Pool(MIB, hip.Device(), stream=1), ValueError, "not ordered by a stream"),
        (lambda: Pool(MIB, hip.Device()).alloc(1, stream=1), ValueError, "not ordered by a stream"),
    ]:
        with pytest.raises(error, match=text):
            make()
    assert not runtime.ranges


def test_what_is_missing_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "hip", None)
    with pytest.raises(hip.Unavailable, match=r"not installed: pip install .arenapy-memory\[hip\]"):
        hip.Device().region(1)
    with simulated_hip() as runtime:
        runtime.fails["hipGetDeviceCount"] = hipError_t.hipErrorNoDevice
        with pytest.raises(hip.Unavailable, match=r"hipErrorNoDevice: .*rocminfo"):
            hip.Device().region(1)

        def no_library(name):
            raise RuntimeError("failed to dlopen 'libamdhip64.so'")

        runtime.before_call = no_library
        with pytest.raises(hip.Unavailable, match=r"dlopen .*ROCm"):
            hip.Pinned().region(1)


def test_too_much_is_out_of_memory_with_the_figures(runtime, make):
    with pytest.raises(OutOfMemory, match=r"hipErrorOutOfMemory: 64 MiB of the device's 64 MiB"):
        hip.Device().region(65 * MIB)
    hip.Device(1).region(65 * MIB)
    runtime.fails["hipMalloc"] = hipError_t.hipErrorOutOfMemory
    with pytest.raises(OutOfMemory, match=r"hipMalloc of .*ask for less"):
        make(hip.Device()).alloc(100)


def test_a_pool_gives_back_its_idle_memory_before_it_gives_up(runtime):
    pool = Pool(source=hip.Device())
    blocks = pool.alloc_many([30 * MIB] * 2)
    blocks.clear()
    assert pool.alloc(50 * MIB).nbytes == 50 * MIB


def test_an_error_keeps_its_name(runtime):
    runtime.fails["hipMalloc"] = hipError_t.hipErrorIllegalAddress
    with pytest.raises(hip.HipError, match="hipMalloc failed: hipErrorIllegalAddress") as caught:
        hip.Device().region(1)
    error = pickle.loads(pickle.dumps(caught.value))
    assert (error.result, error.name) == (700, "hipErrorIllegalAddress")
    assert str(error) == str(caught.value)


CALLS = ["hipGetDevice", "hipSetDevice", "hipGetDeviceCount", "hipMalloc", "hipFree", "hipMemcpy",
         "hipHostMalloc", "hipHostFree", "hipDeviceSynchronize"]  # fmt: skip


def a_bit_of_everything():
    pool = Pool(8 * MIB, hip.Device(1))
    block = pool.alloc(3 * MIB)
    other = Bump(MIB, hip.Device()).alloc(1000)
    item = Slab(1000, 4, hip.Pinned()).alloc()
    hip.copy(block[:1000], item)
    hip.copy(other, block[:1000])
    hip.copy(item, other)
    block.release()
    pool.trim()


@settings(deadline=None)
@given(
    plan=st.dictionaries(
        st.tuples(st.sampled_from(CALLS), st.integers(1, 12)),
        st.sampled_from([hipError_t.hipErrorUnknown, hipError_t.hipErrorOutOfMemory]),
        max_size=4,
    ),
)
def test_whichever_calls_fail_nothing_is_lost_or_freed_twice(plan):
    with simulated_hip() as runtime, warnings.catch_warnings():
        # A free tells so that the device which was current before could not be made so again.
        warnings.simplefilter("ignore", RuntimeWarning)
        runtime.plan = plan
        with suppress(hip.HipError, MemoryError):
            a_bit_of_everything()
        gc.collect()
        runtime.plan = {}
        assert runtime.current in (0, 1)
        unfreed = len(hip_calls.unfreed)
        assert len(runtime.ranges) == unfreed
        hip.Device().region(1)  # frees what was not freed
        gc.collect()
        assert not hip_calls.unfreed


def test_a_refused_free_is_told_of_and_done_later(runtime):
    region = hip.Device().region(3 * MIB)
    runtime.fails["hipFree"] = hipError_t.hipErrorIllegalAddress
    del region
    assert len(runtime.ranges) == 1
    runtime.fails["hipMalloc"] = hipError_t.hipErrorOutOfMemory
    with pytest.raises(OutOfMemory, match="the runtime refused to free 3 MiB"):
        hip.Device().region(1)
    runtime.fails.clear()
    hip.Pinned().region(1)
    assert not runtime.ranges


def test_a_device_that_cannot_be_current_again_is_told_of(runtime):
    region = hip.Device(1).region(4096)
    runtime.plan = {("hipSetDevice", runtime.calls["hipSetDevice"] + 2): hipError_t.hipErrorUnknown}
    with pytest.warns(RuntimeWarning, match="another device is current now"):
        del region
    assert not runtime.ranges and not hip_calls.unfreed


def test_memory_that_others_have_freed_is_not_freed_again(runtime):
    region = hip.Device().region(4096)
    runtime.hipFree(region.address)
    with pytest.warns(RuntimeWarning, match="other code has freed this memory"):
        del region
    assert not hip_calls.unfreed
    runtime.errors.clear()


def test_the_current_device_of_a_thread_stays(runtime):
    runtime.hipSetDevice(1)
    region = hip.Device(0).region(4096)
    hip.copy(region.buffer(0, 5), b"hello")
    assert runtime.current == 1
    with pytest.raises(OutOfMemory):
        hip.Device(0).region(1 << 40)
    assert runtime.current == 1
    del region
    assert runtime.current == 1
    runtime.hipSetDevice(0)


# Threads, forks, the end ---------------------------------------------------------------------


def test_threads_use_both_devices(runtime):
    pools = [Pool(32 * MIB, hip.Device(ordinal)) for ordinal in (0, 1)]

    def work(number):
        def task():
            for i in range(60):
                blocks = [pool.alloc(1 + (i * 977 + number * 31) % 40000) for pool in pools]
                data = [bytes([number + 1 + k]) * block.nbytes for k, block in enumerate(blocks)]
                for block, part in zip(blocks, data, strict=True):
                    hip.copy(block, part)
                for block, part in zip(blocks, data, strict=True):
                    back = bytearray(block.nbytes)
                    hip.copy(back, block)
                    assert back == part
                if i % 7 == 0:
                    pools[i % 2].trim()

        return task

    in_threads(*[work(8 * number) for number in range(6)])
    for pool in pools:
        pool.check()


@pytest.mark.parametrize("source", SOURCES)
def test_a_forked_child_calls_nothing(runtime, make, source):
    one = make(SOURCES[source]())
    block = one.alloc(100)
    runtime.fails["hipFree"] = hipError_t.hipErrorUnknown
    unfreed = hip.Device().region(4096)
    del unfreed
    runtime.fails.clear()

    def child():
        nonlocal block, one
        with pytest.raises(ValueError, match=r"forked|stayed with the parent"):
            one.alloc(100)
        with pytest.raises(ValueError, match=r"forked|stayed with the parent"):
            hip.copy(block, bytes(100))
        for make_region in (hip.Device().region, hip.Pinned().region):
            with pytest.raises(hip.Unavailable, match=r"forked .*'spawn'"):
                make_region(100)
        del block, one
        gc.collect()

    assert in_child(child) == 0  # a call ends it with 99
    hip.Device().region(1)


@pytest.mark.no_sanitizer
def test_nothing_is_called_once_the_interpreter_ends(run_script):
    run_script(
        f"""
        import os, sys
        sys.path.insert(0, {os.path.dirname(inspect.getfile(SimulatedHip))!r})
        from types import SimpleNamespace
        from simulated_hip import SimulatedHip
        from arenapy import Bump, Pool
        from arenapy.interop import hip

        def told(self, address, write=os.write):     # nothing else is sure to be there by then
            write(2, b"freed at the end")

        SimulatedHip._hipFree = SimulatedHip._hipHostFree = told
        sys.modules["hip"] = SimpleNamespace(hip=SimulatedHip())
        pool = Pool(4 << 20, hip.Device())
        block = pool.alloc(100)
        pinned = Bump(100, hip.Pinned()).alloc(10)
        region = hip.Device().region(100)
        """
    )


def test_whatever_names_hip_says_that_it_never_ran():
    root = Path(__file__).parents[2]
    files = [root / "tests/support/simulated_hip.py", *root.glob("arenapy/interop/hip*.py*")]
    files += [page for page in root.glob("docs/*.md") if "interop.hip" in page.read_text()]
    files.remove(root / "docs/reference.md")  # made of what the modules say
    assert len(files) > 6
    silent = [one for one in files if "never run on hardware" not in one.read_text().lower()]
    assert not silent


def test_the_guides_program_runs(runtime):
    guide = (Path(__file__).parents[2] / "docs/ecosystem.md").read_text()
    (program,) = [
        one
        for one in re.findall(r"^```python\n(.*?)^```", guide, re.DOTALL | re.MULTILINE)
        if "interop import hip" in one
    ]
    names = {}
    exec(program, names)
    assert runtime.peek(names["block"].address, 1 << 20) == b"\1" * (1 << 20)


# hip-python itself ---------------------------------------------------------------------------


def test_the_real_module_has_what_is_called():
    real = pytest.importorskip("hip").hip
    for name in [*CALLS, "hipGetLastError", "hipMemGetInfo"]:
        ours = inspect.signature(getattr(SimulatedHip, f"_{name}"))
        assert len(inspect.signature(getattr(real, name)).parameters) == len(ours.parameters) - 1
    for kind in ("hipError_t", "hipMemcpyKind"):
        for member in getattr(importlib.import_module("simulated_hip"), kind):
            assert int(getattr(getattr(real, kind), member.name)) == int(member)
