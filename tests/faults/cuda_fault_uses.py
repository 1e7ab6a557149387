"""Operations of `cuda_fault_operations` that use blocks: copies, streams, captures, exports."""

import contextlib
import ctypes
import gc
import weakref

import numpy as np
from capsules import CPU, Array, Tensor
from cuda_fault_acts import (
    N,
    asserted,
    drained,
    filled,
    for_each,
    in_use,
    operation,
    pool_over,
    usable,
)
from cuda_support import ALLOCATORS, LEGACY, MIB, SOURCES, new_stream, slowly_fill
from injection import Act
from simulated_driver import INVALID_VALUE

from arenapy import Pool, cuda
from arenapy.cuda import peers
from arenapy.cuda.stream import elapsed

SENT = 5 * MIB // 4  # bytes that go through the host in more pieces than it has slots
MANY_EVENTS = 260  # more than are kept for the next ones


class Thing(np.ndarray):
    """Memory of the host that is not pageable, and of which it is seen that it is gone."""


def registered(gpu, nbytes):
    """Another library's pinned memory, which does not call by the entry points that are failed."""
    array = np.zeros(nbytes + 4096, np.uint8)
    start = -array.ctypes.data % 4096
    array = array[start : start + nbytes].view(Thing)
    gpu.cuMemHostRegister(array.ctypes.data, nbytes, 0)
    weakref.finalize(array, gpu.cuMemHostUnregister, array.ctypes.data)
    return array


# ---- fills and copies ----

WITH = {"": lambda gpu: None, " on a stream": new_stream}


@for_each(WITH, "fill{}")
def fill(gpu, how):
    b, s = pool_over("device").alloc(N), WITH[how](gpu)
    return Act(lambda: b.fill(3, stream=s), good=lambda result: drained(gpu, filled(3, b)))


@operation("fill of pinned memory on a stream")
def fill_pinned(gpu):
    b, s = pool_over("pinned").alloc(N), new_stream(gpu)
    return Act(lambda: b.fill(3, stream=s), good=lambda result: drained(gpu, filled(3, b)))


@for_each(WITH, "copy from ordinary memory{}")
def copy_from(gpu, how):
    b, s = pool_over("device").alloc(N), WITH[how](gpu)
    data = bytes([5]) * N
    return Act(lambda: b.copy_from(data, stream=s), good=lambda _: drained(gpu, filled(5, b)))


@for_each(WITH, "copy to ordinary memory{}")
def copy_to(gpu, how):
    b, s = pool_over("device").alloc(N), WITH[how](gpu)
    b.fill(6)
    data = bytearray(N)

    def good(result):
        gpu.drain()
        assert set(data) == {6}

    return Act(lambda: b.copy_to(data, stream=s), good=good)


@for_each(WITH, "copy from another library's pinned memory{}")
def copy_kept(gpu, how):
    """Which is to live until the copy is done, and no longer."""
    one, s = pool_over("device"), WITH[how](gpu)
    b = one.alloc(N)
    kept = []

    def act():
        data = registered(gpu, N)
        data[:] = 5
        kept.append(weakref.ref(data))
        try:
            b.copy_from(data, stream=s)
        finally:
            del data
            one.stats()  # lets go of what is over

    def end():
        gpu.drain()
        one.trim()
        gpu.kept = sum(ref() is not None for ref in kept)

    return Act(act, good=lambda _: drained(gpu, filled(5, b)), end=end)


@for_each(WITH, "copy between blocks{}")
def copy_blocks(gpu, how):
    device, pinned, s = pool_over("device"), pool_over("pinned"), WITH[how](gpu)
    blocks = [device.alloc(N), pinned.alloc(N)]
    blocks[0].fill(4)

    def act():
        blocks[1].copy_from(blocks[0], stream=s)

    def end():
        for block in blocks:
            block.release()  # which it refuses while it is in use
        del block
        blocks.clear()
        gpu.drain()
        in_use(device), in_use(pinned)  # of the legacy stream an event tells, recorded by a look
        gpu.drain()
        assert in_use(device) == in_use(pinned) == (0, 0, 0)

    return Act(act, good=lambda _: drained(gpu, filled(4, *blocks)), end=end)


@operation("copy between devices")
def between_devices(gpu):
    gpu.peers = {(0, 1), (1, 0)}
    pools = [Pool(MIB, cuda.Device(ordinal)) for ordinal in (0, 1)]
    here, there = (pool.alloc(N) for pool in pools)
    here.fill(7)

    def act():
        there.copy_from(here)
        here.copy_from(there)

    def good(result):
        filled(7, here, there)(result)
        assert gpu.enabled == gpu.peers, "it goes by way of the host"

    return Act(act, good=good, view=lambda: [in_use(pool) for pool in pools])


@operation("copy between devices by way of the host")
def between_devices_by_the_host(gpu):
    gpu.peers = set()
    gpus = cuda.Devices(max_bytes=4 * MIB)
    here, there = (gpus.alloc(SENT, device=device) for device in gpus.pools)
    here.fill(7)
    s = new_stream(gpu)

    def end():
        nonlocal here, there
        gpu.drain()
        here = there = None
        peers.trim_relays()

    def good(result):
        drained(gpu, filled(7, there))

    return Act(lambda: there.copy_from(here, stream=s), good=good, end=end)


@for_each(WITH, "copy_batch{}")
def batch(gpu, how):
    one, s = pool_over("device"), WITH[how](gpu)
    blocks = [one.alloc(1000) for _ in range(3)]
    pairs = [(block, bytes([8]) * 1000) for block in blocks]
    return Act(
        lambda: cuda.copy_batch(pairs, stream=s),
        good=lambda _: drained(gpu, filled(8, *blocks)),
        view=lambda: in_use(one),
    )


def advised(version):
    @operation(f"prefetch, CUDA {version}", version)
    def prefetch(gpu):
        b = pool_over("managed").alloc(N)
        return Act(lambda: cuda.prefetch(b, 1))

    @operation(f"advise, CUDA {version}", version)
    def advise(gpu):
        b = pool_over("managed").alloc(N)
        return Act(lambda: cuda.advise(b, "accessed_by", 1))


advised(12)
advised(13)


# ---- streams and events ----


@operation("Stream()")
def stream(gpu):
    return Act(cuda.Stream, good=lambda stream: stream.synchronize())


@operation("end of a Stream")
def end_of_stream(gpu):
    streams = [cuda.Stream()]
    return Act(streams.clear)


@operation("streams and events")
def events(gpu):
    s, t = cuda.Stream(), new_stream(gpu)

    def act():
        event = s.record()
        s.wait(t)
        s.wait(event)
        event.synchronize()
        s.synchronize()
        return event

    return Act(act, good=lambda event: drained(gpu, lambda _: asserted(event.done)))


@operation("Event.done")
def done(gpu):
    event = cuda.Stream().record()
    gpu.drain()
    return Act(lambda: event.done, end=lambda: asserted(event.done))


@operation("end of many Events")
def many_events(gpu):
    s = cuda.Stream()
    things = [s.record() for _ in range(MANY_EVENTS)]
    return Act(things.clear)


@operation("elapsed")
def timed(gpu):
    s = cuda.Stream()
    return Act(lambda: elapsed(s, lambda: None, 0))


# ---- captures ----


def captured(version):
    @operation(f"use in a capture, CUDA {version}", version)
    def capture(gpu):
        """Two nodes of a graph use a block, which is dropped."""
        one, s = pool_over("device"), new_stream(gpu)

        def act():
            b = one.alloc(N)
            gpu.begin_capture(s.handle_)
            try:
                b.fill(3, stream=s)
                b.record_stream(s)
                b.release()
            finally:
                del b
                end_capture(gpu, s)

        return Act(act, view=lambda: in_use(one), end=lambda: usable(one.alloc(N)))


def allocated(name):
    @operation(f"alloc in a capture, {name}")
    def capture(gpu):
        """Of memory that had an owner, whose stream a capture may bar; once more what was freed."""
        one, s = pool_over("device"), new_stream(gpu, name != "its stream barred")
        slowly_fill(gpu, LEGACY, one.alloc(N), 1)

        def act():
            gpu.begin_capture(s.handle_)
            try:
                one.alloc(N, stream=s).release()
                return one.alloc(N, stream=s).nbytes
            finally:
                end_capture(gpu, s)

        return Act(act, view=lambda: in_use(one), end=lambda: usable(one.alloc(N)))


captured(12)
captured(13)
allocated("its stream free")
allocated("its stream barred")


def end_capture(gpu, s):
    if graph := gpu.end_capture(s.handle_):  # none: a failure has made the capture invalid
        gpu.destroy_graph(graph)


@operation("a graph that keeps nothing")
def user_object(gpu):
    """One call has failed before the one that is to."""
    one, s = pool_over("device"), new_stream(gpu)
    b = one.alloc(N)

    def act():
        gpu.begin_capture(s.handle_)
        gpu.fail_at("cuGraphRetainUserObject", 1, INVALID_VALUE)
        try:
            with contextlib.suppress(cuda.CudaError):
                b.record_stream(s)
        finally:
            end_capture(gpu, s)

    return Act(act, view=lambda: in_use(one), end=lambda: usable(b))


# ---- other libraries ----

KINDS = {"device": (2, 0), "managed": (13, 0), "pinned": (3, 0)}


def foreign(gpu, kind):
    """An address, and what gives its memory back."""
    if kind == "pinned":
        array = registered(gpu, N)
        return array.ctypes.data, lambda: array
    call = "cuMemAllocManaged" if kind == "managed" else "cuMemAlloc"
    address = gpu.got(call, ctypes.c_uint64, N, *[1] * (kind == "managed"))
    return address, lambda: gpu.call("cuMemFree", address)


@for_each(KINDS, "asbuffer of {}")
def asbuffer(gpu, kind):
    address, give_back = foreign(gpu, kind)
    s, t = new_stream(gpu), new_stream(gpu)

    def act():
        return cuda.asbuffer(Array(address, (N,), stream=t.handle_), stream=s)

    return Act(act, end=give_back, good=usable)


@operation("from_dlpack")
def from_dlpack(gpu):
    address, give_back = foreign(gpu, "device")
    s = new_stream(gpu)
    tensors = []

    def act():
        tensors.append(Tensor(address, (N,)))
        return cuda.from_dlpack(tensors[-1], stream=s)

    def end():
        gc.collect()
        assert [one.deleted for one in tensors] == [one.capsules for one in tensors]
        give_back()

    return Act(act, end=end, good=usable)


@operation("fill of a borrowed Buffer")
def fill_borrowed(gpu):
    address, give_back = foreign(gpu, "device")
    b = cuda.asbuffer(Array(address, (N,)))

    def end():
        b.release()  # which it refuses while it is in use
        give_back()

    return Act(lambda: b.fill(3), good=filled(3, b), end=end)


@operation("end of a borrowed Buffer")
def end_of_borrowed(gpu):
    """Whose memory its library gives back at once."""
    s, t = new_stream(gpu), new_stream(gpu)
    array = Array(0, (N,))
    array.data = registered(gpu, N)
    array.described["data"] = (array.data.ctypes.data, False)
    buffers = [cuda.asbuffer(array, stream=s)]
    del array
    buffers[0].record_stream(t)
    slowly_fill(gpu, t, buffers[0], 1)

    def act():
        buffers.clear()
        gc.collect()

    return Act(act)


@operation("export by DLPack")
def to_dlpack(gpu):
    one, s, t = pool_over("device"), new_stream(gpu), new_stream(gpu)
    b = one.alloc(N, stream=s)
    return Act(lambda: b.__dlpack__(stream=t.handle_), view=lambda: in_use(one))


@operation("export by the array interface")
def to_interface(gpu):
    one, s = pool_over("device"), new_stream(gpu)
    b = one.alloc(N, stream=s)
    return Act(lambda: b.__cuda_array_interface__, view=lambda: in_use(one))


@operation("release of pinned memory that was exported by the array interface")
def exported_and_released(gpu):
    one = pool_over("pinned")
    blocks = [one.alloc(N)]
    assert blocks[0].__cuda_array_interface__
    return Act(blocks.clear, view=lambda: (gpu.drain(), in_use(one))[1])


@operation("export of pinned memory to the host")
def to_host(gpu):
    """The stream that has used it is waited for."""
    one, s = pool_over("pinned"), new_stream(gpu)
    b = one.alloc(N)
    b.record_stream(s)
    slowly_fill(gpu, s, b, 1)

    def good(capsule):
        filled(1, b)(None)

    return Act(lambda: b.__dlpack__(dl_device=CPU), good=good, view=lambda: in_use(one))


@for_each(["device", "managed"], "export of a copy, of {}")
def copied(gpu, source):
    one, t = pool_over(source), new_stream(gpu)
    b = one.alloc(N)
    return Act(lambda: b.__dlpack__(copy=True, stream=t.handle_), view=lambda: in_use(one))


@operation("export of a copy to the host")
def copied_to_host(gpu):
    one = pool_over("device")
    b = one.alloc(N)
    return Act(lambda: b.__dlpack__(copy=True, dl_device=CPU), view=lambda: in_use(one))


# ---- a bit of everything ----


def everything(allocator, source):
    @operation(f"a bit of everything, {allocator} over {source}")
    def scenario(gpu):
        one = ALLOCATORS[allocator](SOURCES[source]())
        s, t = new_stream(gpu), new_stream(gpu)

        def act():
            a = one.alloc(N, stream=s)
            b = one.alloc(N)
            a.fill(1, stream=s)
            b.copy_from(a, stream=s)
            b.record_stream(t.handle_)
            slowly_fill(gpu, t, b, 1)
            b.release()
            a.copy_to(bytearray(N))
            a.fill(2)
            c = one.alloc(1000, stream=t)
            c.record_stream(s)
            del c
            if allocator == "bump":
                one.reset(stream=s)
            else:
                one.trim()
            return a

        def good(a):
            if not a.closed:
                usable(a)

        return Act(act, good=good, view=lambda: in_use(one))


for _source in SOURCES:
    everything("pool", _source)
everything("bump", "device")
everything("slab", "pinned")
