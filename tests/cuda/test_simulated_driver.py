"""The simulated driver does what a driver may do, which is what tests of arenapy rest on."""

import ctypes
import mmap

import numpy as np
import pytest
from helpers import in_threads
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_driver import simulated
from simulated_gpu import DISABLE_TIMING, NON_BLOCKING
from simulated_memory import PATTERN, Refused

NOT_READY, INVALID_HANDLE, UNSUPPORTED, CAPTURED_EVENT = 600, 400, 900, 907
LEGACY, PER_THREAD = 1, 2
HANDLE, ADDRESS = ctypes.c_void_p, ctypes.c_uint64


@pytest.fixture
def one():
    with simulated() as one, one.on(0):
        yield one


def expect_errors(one, *texts):
    """One misuse each, which is then forgotten."""
    assert len(one.errors) == len(texts), one.errors
    for error, text in zip(one.errors, texts, strict=True):
        assert text in error
    one.errors.clear()


def stream(one, flags=0):
    return one.got("cuStreamCreate", HANDLE, flags)


def event(one, flags=DISABLE_TIMING):
    return one.got("cuEventCreate", HANDLE, flags)


def alloc(one, nbytes=4096):
    return one.got("cuMemAlloc", ADDRESS, nbytes)


def own_pool(one, device=0):
    """A memory pool of the driver's."""
    properties = (ctypes.c_int * 22)(1, 0, 1, device)
    return one.got("cuMemPoolCreate", HANDLE, properties)


def free_bytes(one):
    return one.got("cuMemGetInfo", ctypes.c_size_t, ctypes.byref(ctypes.c_size_t()))


class Log(list):
    def of(self, name):
        return lambda: self.append(name)


def registered(one):
    """A page of the host of which the driver knows."""
    array = np.frombuffer(mmap.mmap(-1, 4096), np.uint8)
    assert not one.call("cuMemHostRegister", array.ctypes.data, 4096, 0)
    return array


def test_nothing_runs_by_itself_and_a_stream_is_in_order(one):
    log, s = Log(), stream(one)
    for i in range(3):
        one.launch(s, log.of(i))
    assert one.call("cuStreamQuery", s) == NOT_READY and not log
    assert one.step() and log == [0]
    assert not one.call("cuStreamSynchronize", s) and log == [0, 1, 2]
    assert not one.call("cuStreamQuery", s) and not one.step()


@pytest.mark.parametrize("flags", [0, NON_BLOCKING])
def test_the_legacy_stream_and_others(one, flags):
    log, s = Log(), stream(one, flags)
    one.launch(s, log.of("before"))
    one.launch(LEGACY, log.of("legacy"))
    one.launch(s, log.of("after"))
    one.launch(PER_THREAD, log.of("this thread's"))
    if flags == NON_BLOCKING:
        assert one.step(1) and log == ["legacy"]
        one.call("cuStreamSynchronize", s)
        assert log == ["legacy", "before", "after"], "it does not wait for the thread's stream"
    else:
        assert one.step(1) and log == ["before"], "only that may run"
        one.call("cuStreamSynchronize", PER_THREAD)
        assert log == ["before", "legacy", "this thread's"]


def test_a_wait_runs_what_it_must(one):
    log, a, b, e = Log(), stream(one), stream(one), event(one)
    one.launch(a, log.of("a"))
    one.call("cuEventRecord", e, a)
    one.launch(a, log.of("a after the event"))
    one.launch(b, log.of("b"))
    one.call("cuStreamWaitEvent", b, e, 0)
    one.launch(b, log.of("b after the event"))
    assert one.call("cuEventQuery", e) == NOT_READY
    one.call("cuStreamSynchronize", b)
    assert log == ["a", "b", "b after the event"]
    assert not one.call("cuEventQuery", e)
    one.call("cuCtxSynchronize")
    assert log[-1] == "a after the event"


def test_an_event_means_its_latest_record(one):
    log, a, b, e = Log(), stream(one), stream(one), event(one)
    assert not one.call("cuEventQuery", e) and not one.call("cuEventSynchronize", e), "none yet"
    one.launch(a, log.of("first"))
    one.call("cuEventRecord", e, a)
    one.call("cuStreamWaitEvent", b, e, 0)
    one.launch(b, log.of("b"))
    one.launch(a, log.of("second"))
    one.call("cuEventRecord", e, a)
    one.call("cuStreamSynchronize", b)
    assert log == ["first", "b"], "the record of when it was called"
    assert one.call("cuEventQuery", e) == NOT_READY
    one.call("cuEventSynchronize", e)
    assert log == ["first", "b", "second"]


def test_handles_come_back(one):
    log, s = Log(), stream(one)
    one.call("cuStreamGetId", s, ctypes.byref(before := ADDRESS()))
    one.launch(s, log.of("before"))
    assert not one.call("cuStreamDestroy", s)
    assert one.call("cuStreamQuery", s) == INVALID_HANDLE
    assert one.call("cuStreamDestroy", s) == INVALID_HANDLE
    expect_errors(one, "cuStreamQuery: there is no stream", "cuStreamDestroy: there is no stream")
    assert stream(one) == s and not one.call("cuStreamQuery", s), "another one, which is idle"
    one.call("cuStreamGetId", s, ctypes.byref(after := ADDRESS()))
    assert after.value > before.value > 0
    one.launch(LEGACY, log.of("legacy"))
    one.call("cuStreamSynchronize", LEGACY)
    assert log == ["before", "legacy"], "what was queued on the destroyed one still counts"
    e = event(one)
    one.call("cuEventDestroy", e)
    assert one.call("cuEventQuery", e) == INVALID_HANDLE
    expect_errors(one, "cuEventQuery: there is no event")
    assert event(one) == e


def test_threads_have_contexts_and_streams_of_their_own(one):
    def number():
        one.call("cuStreamGetId", PER_THREAD, ctypes.byref(out := ADDRESS()))
        return out.value

    def elsewhere():
        assert one.call("cuStreamGetId", PER_THREAD, ctypes.byref(ADDRESS())) == 201
        with one.on(0):
            found.append(number())

    found = []
    in_threads(elsewhere)
    assert found and found[0] != number() == number()
    with one.on(1):
        s, e = stream(one), event(one)
    one.call("cuStreamGetCtx", s, ctypes.byref(context := HANDLE()))
    assert context.value == 0x2000
    assert one.call("cuEventRecord", e, LEGACY) == INVALID_HANDLE
    expect_errors(one, "event of another context")


@settings(deadline=None, max_examples=30)
@given(data=st.data())
def test_any_order_keeps_to_what_is_needed(data):
    with simulated() as one, one.on(0):
        log = Log()
        streams = [LEGACY, PER_THREAD, stream(one), stream(one, NON_BLOCKING)]
        for i in range(12):
            k = data.draw(st.integers(0, 3))
            one.launch(streams[k], log.of((k, i)))
        while one.step(data.draw(st.integers(0, 3))):
            pass
        assert len(log) == 12
        for n, (k, i) in enumerate(log):
            for later, j in log[n + 1 :]:
                ordered = k == later or (3 not in (k, later) and 0 in (k, later))
                assert i < j or not ordered


def test_a_hook_at_each_call(one):
    log, s = Log(), stream(one)
    one.launch(s, log.of("ran"))
    one.before_call = lambda name: one.step() and log.append(name)
    assert not one.call("cuStreamQuery", s)
    assert log == ["ran", "cuStreamQuery"]


def test_what_is_raised_within_a_call_is_raised_at_the_end():
    with pytest.raises(ZeroDivisionError), simulated() as one, one.on(0):
        one.launch(LEGACY, lambda: 1 // 0)
        assert one.call("cuStreamSynchronize", LEGACY) == 999
    with pytest.raises(ZeroDivisionError), simulated() as one, one.on(0):
        one.before_call = lambda name: 1 // 0
        assert not one.call("cuStreamSynchronize", LEGACY)


def test_planned_failures(one):
    one.fail_at("cuMemAlloc", 2, 2)
    alloc(one)
    assert one.call("cuMemAlloc", ctypes.byref(ADDRESS()), 8) == 2
    alloc(one)
    assert one.calls["cuMemAlloc"] == 3


# ---- memory ----


def test_memory_is_bounded_and_counted(one):
    before = free_bytes(one)
    big = alloc(one, 8 << 20)
    small = alloc(one, 100)
    assert big % (2 << 20) == 0 and small % 512 == 0
    assert ctypes.string_at(small, 100) == bytes([PATTERN]) * 100
    assert free_bytes(one) == before - (8 << 20) - 100
    assert one.call("cuMemAlloc", ctypes.byref(ADDRESS()), before) == 2
    one.memory.others[0] = 0
    assert not one.call("cuMemAlloc", ctypes.byref(ADDRESS()), before)
    assert one.call("cuMemFree", big + 512) == 1
    for address in (big, small, 0):
        assert not one.call("cuMemFree", address)
    assert one.call("cuMemFree", big) == 1
    expect_errors(one, "was freed before")


def test_a_free_waits_for_the_device(one):
    log, address = Log(), alloc(one)
    one.launch(LEGACY, log.of("used"), [(address, 8)])
    assert not one.call("cuMemFree", address) and log == ["used"]


def test_use_after_free_and_beyond_the_end(one):
    log, address, s = Log(), alloc(one), stream(one)
    one.launch(s, log.of("too far"), [(address + 4000, 97)])
    one.call("cuMemFree", address)
    expect_errors(one, "beyond the end")
    one.launch(s, log.of("too late"), [(address, 8)])
    one.call("cuMemsetD8Async", address, 0, 8, s)
    assert not one.errors, "it is what runs that is wrong"
    one.drain()
    expect_errors(one, "a kernel on stream", "a memset on stream")
    assert one.call("cuMemcpyAsync", alloc(one), alloc(one) + 4096, 8, s) == 1
    expect_errors(one, "between allocations")
    assert not log


def test_what_pointers_are(one):
    def kind(address, attribute=2):
        out = ctypes.c_int(-1)
        return one.call("cuPointerGetAttribute", ctypes.byref(out), attribute, address), out.value

    with one.on(1):
        address = alloc(one)
    managed, host = one.got("cuMemAllocManaged", ADDRESS, 10, 1), registered(one)
    assert [kind(address + 5), kind(managed), kind(host.ctypes.data)] == [(0, 2), (0, 2), (0, 1)]
    assert [kind(address, 8), kind(managed, 8)] == [(0, 0), (0, 1)]
    assert [kind(address, 9), kind(managed, 9)] == [(0, 1), (0, 0)]
    one.call("cuMemFree", address)
    assert kind(address) == kind(id(one)) == (1, -1)


def test_registered_ranges(one):
    host, address = registered(one), alloc(one)
    assert one.call("cuMemHostRegister", host.ctypes.data + 4095, 1, 0) == 712
    assert one.call("cuMemHostUnregister", host.ctypes.data + 1) == 713
    one.call("cuMemcpyAsync", host.ctypes.data + 8, address, 8, LEGACY)
    assert not one.call("cuMemHostUnregister", host.ctypes.data)
    expect_errors(one, "was unregistered while an operation is to use it")
    one.drain()
    expect_errors(one, "not the driver's")


def test_copies_of_registered_memory_wait(one):
    host, address, s = registered(one), alloc(one), stream(one)
    host[:] = 1
    one.call("cuMemcpyAsync", address, host.ctypes.data, 8, s)
    host[:] = 2
    assert ctypes.string_at(address, 1)[0] == PATTERN
    one.call("cuMemcpyAsync", host.ctypes.data + 100, address, 8, s)
    assert one.step() and ctypes.string_at(address, 9) == b"\2" * 8 + bytes([PATTERN])
    one.call("cuMemsetD8Async", address, 3, 8, s)
    one.drain()
    assert host[100] == 2 and ctypes.string_at(address, 1) == b"\3"


def test_copies_of_other_host_memory_do_not(one):
    log, address, s = Log(), alloc(one), stream(one)
    source, target = np.ones(8, np.uint8), np.zeros(8, np.uint8)
    one.call("cuMemcpyAsync", address, source.ctypes.data, 8, s)
    source[:] = 2
    one.launch(stream(one), log.of("elsewhere"))
    one.call("cuMemcpyAsync", target.ctypes.data, address, 8, s)
    assert (target == 1).all() and not log


def test_peers(one):
    with one.on(1):
        theirs, s = alloc(one), stream(one)
    mine = alloc(one)
    assert one.got("cuDeviceCanAccessPeer", ctypes.c_int, 0, 1) == 1
    one.launch(s, touches=[(mine, 8)])
    one.call("cuMemcpyPeerAsync", theirs, 0x2000, mine, 0x1000, 8, s)
    one.drain()
    expect_errors(one, "which is no peer")
    with one.on(1):
        assert [one.call("cuCtxEnablePeerAccess", 0x1000, 0) for _ in range(2)] == [0, 704]
    one.launch(s, touches=[(mine, 8)])
    one.drain()


def test_memory_in_stream_order(one):
    pool, a, b, before = own_pool(one), stream(one), stream(one), free_bytes(one)
    has = one.pool_handles.get(pool)
    address = one.got("cuMemAllocFromPoolAsync", ADDRESS, 4096, pool, a)
    assert (has.reserved, has.used) == (4096, 4096) and free_bytes(one) == before - 4096
    one.launch(b, touches=[(address, 8)])
    one.step(1)
    expect_errors(one, "whose allocation has not run")
    one.launch(a, touches=[(address, 8)])
    assert not one.call("cuMemFreeAsync", address, a)
    assert one.call("cuMemFreeAsync", address, a) == 1
    expect_errors(one, "was freed before")
    one.launch(b, touches=[(address, 8)])
    one.launch(a, touches=[(address, 8)])
    one.step(3)
    expect_errors(one, f"{address:#x}, which was freed")
    one.drain()
    expect_errors(one, f"{address:#x}, which was freed")
    assert (has.reserved, has.used) == (4096, 0), "kept until the next that waits"
    one.call("cuStreamSynchronize", a)
    assert has.reserved == 0 and free_bytes(one) == before
    assert not one.call("cuMemPoolDestroy", pool)
    assert one.call("cuMemPoolTrimTo", pool, 0) == 1
    expect_errors(one, "there is no memory pool")


# ---- captures ----


def test_a_capture_is_replayed(one):
    log, a, b, e = Log(), stream(one), stream(one), event(one)
    one.begin_capture(a)
    one.launch(a, log.of("a"))
    one.call("cuEventRecord", e, a)
    one.call("cuStreamWaitEvent", b, e, 0)
    one.launch(b, log.of("b"))
    status = ctypes.c_int()
    for s in (a, b):
        assert not one.call("cuStreamIsCapturing", s, ctypes.byref(status)) and status.value == 1
    join = event(one)
    one.call("cuEventRecord", join, b)
    one.call("cuStreamWaitEvent", a, join, 0)
    graph = one.end_capture(a)
    assert not one.step() and not log, "nothing was queued"
    assert graph
    for _ in range(2):
        one.replay(graph, a)
    one.launch(a, log.of("after"))
    one.call("cuStreamSynchronize", a)
    assert log == ["a", "b", "a", "b", "after"]
    one.destroy_graph(graph)


def test_capture_info(one):
    a, b = stream(one), stream(one)
    status, number, graph, rest = ctypes.c_int(9), ADDRESS(9), HANDLE(9), ADDRESS(9)
    outs = [ctypes.addressof(out) for out in (status, number, graph, rest)]
    one.begin_capture(a)
    one.cuStreamGetCaptureInfo(a, *outs, 0, outs[3])
    assert (status.value, rest.value) == (1, 0) and number.value != 9
    assert graph.value == one.end_capture(a)
    one.cuStreamGetCaptureInfo(b, *outs, None, outs[3])
    assert (status.value, graph.value) == (0, None)


@pytest.mark.parametrize(
    ("call", "result"),
    [
        (lambda one, s, e: one.call("cuMemAlloc", ctypes.byref(ADDRESS()), 8), UNSUPPORTED),
        (lambda one, s, e: one.call("cuMemFree", 0), UNSUPPORTED),
        (lambda one, s, e: one.call("cuStreamSynchronize", s), UNSUPPORTED),
        (lambda one, s, e: one.call("cuStreamQuery", s), UNSUPPORTED),
        (lambda one, s, e: one.call("cuCtxSynchronize"), UNSUPPORTED),
        (lambda one, s, e: one.call("cuEventQuery", e), CAPTURED_EVENT),
        (lambda one, s, e: one.call("cuMemcpyAsync", 0, 0, 0, LEGACY), 906),
    ],
)
def test_what_invalidates_a_capture(one, call, result):
    s, e = stream(one), event(one)
    one.begin_capture(s)
    one.call("cuEventRecord", e, s)
    assert call(one, s, e) == result
    expect_errors(one, "which invalidates a capture")
    assert one.call("cuEventRecord", e, s) == 901
    assert one.end_capture(s) == 0


def test_capture_modes(one):
    s, e, mode = stream(one), event(one), ctypes.c_int(2)
    one.begin_capture(s)
    one.call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
    assert mode.value == 0
    assert not one.call("cuMemFree", alloc(one)) and not one.call("cuEventQuery", e)
    one.call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
    assert mode.value == 2
    assert one.call("cuEventQuery", e) == UNSUPPORTED
    expect_errors(one, "which invalidates a capture")
    assert one.end_capture(s) == 0


def test_what_a_capture_must_not_mix_with(one):
    a, b, e = stream(one), stream(one), event(one)
    one.call("cuEventRecord", e, b)
    one.begin_capture(a)
    assert one.call("cuStreamWaitEvent", a, e, 0) == 905
    expect_errors(one, "it waits for what is not captured")
    assert one.end_capture(a) == 0
    one.begin_capture(a)
    one.call("cuEventRecord", e, a)
    one.call("cuStreamWaitEvent", b, e, 0)
    assert one.end_capture(a) == 0
    expect_errors(one, "ended with work that its stream does not wait for")
    assert one.call("cuStreamIsCapturing", LEGACY, ctypes.byref(ctypes.c_int())) == 0
    one.begin_capture(a)
    assert one.call("cuStreamIsCapturing", LEGACY, ctypes.byref(ctypes.c_int())) == 906
    assert one.end_capture(a), "to have asked does no harm"
    with pytest.raises(Refused):
        one.begin_capture(LEGACY)


def test_user_objects(one):
    log = []
    destroy = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(log.append)
    function, s = ctypes.cast(destroy, HANDLE), stream(one)
    one.begin_capture(s)
    graph = one.end_capture(s)
    moved = one.got("cuUserObjectCreate", HANDLE, 11, function, 1, 1)
    assert not one.call("cuGraphRetainUserObject", graph, moved, 1, 1)
    assert one.call("cuUserObjectRelease", moved, 1) == 1
    expect_errors(one, "1 references released of 0")
    shared = one.got("cuUserObjectCreate", HANDLE, 12, function, 2, 1)
    assert not one.call("cuGraphRetainUserObject", graph, shared, 1, 0)
    one.replay(graph, s)
    one.destroy_graph(graph)
    assert not log, "it has not run"
    one.drain()
    assert log == [11]
    one.call("cuUserObjectRelease", shared, 1)
    assert log == [11]
    one.call("cuUserObjectRelease", shared, 1)
    assert log == [11, 12]


def test_a_destructor_may_call_nothing(one):
    results = []
    call = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(
        lambda pointer: results.append(one.call("cuMemFree", 0))
    )
    function = ctypes.cast(call, HANDLE)
    made = one.got("cuUserObjectCreate", HANDLE, None, function, 1, 1)
    assert not one.call("cuUserObjectRelease", made, 1)
    assert results == [800]
    expect_errors(one, "called by the destructor of a user object")


def test_misuse_is_told_at_the_end():
    with pytest.raises(AssertionError, match="there is no stream 0x5"), simulated() as one:
        assert one.call("cuStreamDestroy", 0x5) == INVALID_HANDLE


# Addresses first, memory later ------------------------------------------------------------------

MAPPED = 2 << 20


def props(device=0, kind=1):
    """A CUmemAllocationProp."""
    return (ctypes.c_int * 8)(kind, 0, 1, device)


def space(one, pages=4):
    return one.got("cuMemAddressReserve", ADDRESS, pages * MAPPED, MAPPED, 0, 0)


def created(one, nbytes=MAPPED):
    return one.got("cuMemCreate", ADDRESS, nbytes, props(), 0)


def allow(one, address, nbytes=MAPPED, device=0):
    return one.call("cuMemSetAccess", address, nbytes, (ctypes.c_int * 3)(1, device, 3), 1)


def map_page(one, address):
    handle = created(one)
    assert one.call("cuMemMap", address, MAPPED, 0, handle, 0) == 0
    assert one.call("cuMemRelease", handle) == 0
    assert allow(one, address) == 0


def test_memory_is_there_while_it_has_a_handle_or_a_mapping(one):
    start = space(one)
    assert start % MAPPED == 0 and one.memory.used[0] == 0
    handle = created(one)
    assert one.memory.used[0] == MAPPED
    assert one.call("cuMemMap", start, MAPPED, 0, handle, 0) == 0
    assert one.call("cuMemRelease", handle) == 0
    assert one.memory.used[0] == MAPPED and allow(one, start) == 0
    assert ctypes.string_at(start, 4) == bytes([PATTERN]) * 4
    assert one.call("cuMemUnmap", start, MAPPED) == 0 and one.memory.used[0] == 0
    assert one.call("cuMemAddressFree", start, 4 * MAPPED) == 0
    assert not one.memory.reserved and one.errors == []


def test_a_kernel_may_touch_what_is_mapped_side_by_side_and_nothing_else(one):
    start = space(one)
    for i in (0, 1, 3):
        map_page(one, start + i * MAPPED)
    one.launch(LEGACY, None, [(start + MAPPED - 8, 16)])
    one.drain()
    assert one.errors == []
    one.launch(LEGACY, None, [(start + 2 * MAPPED - 8, 16)])
    one.launch(LEGACY, None, [(start + 2 * MAPPED, 1)])
    handle = created(one)
    assert one.call("cuMemMap", start + 2 * MAPPED, MAPPED, 0, handle, 0) == 0
    one.drain()
    expect_errors(one, "beyond the end", "has not run")  # it has no access yet
    assert one.call("cuMemcpyAsync", start + 4 * MAPPED - 4, start, 8, LEGACY) == 0
    one.drain()
    expect_errors(one, "beyond the end")


def test_unmapping_waits_for_nobody(one):
    start = space(one)
    map_page(one, start)
    one.launch(LEGACY, None, [(start, 1)])
    assert one.call("cuMemUnmap", start, MAPPED) == 0 and one.queue
    one.drain()
    expect_errors(one, "was unmapped while an operation is to use it", "not the driver's")


def test_misuse_of_reserved_addresses_is_told(one):
    start, pool = space(one), created(one)
    assert one.call("cuMemMap", start, MAPPED, 0, pool, 0) == 0
    assert one.call("cuMemMap", start + MAPPED, MAPPED, 0, pool, 0) == 1  # twice
    other = created(one, 2 * MAPPED)
    assert one.call("cuMemMap", start, 2 * MAPPED, 0, other, 0) == 208  # over another
    assert one.call("cuMemMap", start + 3 * MAPPED, 2 * MAPPED, 0, other, 0) == 1  # beyond
    assert one.call("cuMemMap", start + MAPPED, 2 * MAPPED, 0, other, 0) == 0
    assert one.call("cuMemUnmap", start + MAPPED, MAPPED) == 1  # a part
    assert one.call("cuMemUnmap", start, 3 * MAPPED) == 1  # two of them
    assert allow(one, start + 3 * MAPPED) == 1  # nothing
    assert one.call("cuMemAddressFree", start, 4 * MAPPED) == 1  # it has memory
    assert one.call("cuMemRelease", pool) == one.call("cuMemRelease", other) == 0
    assert one.call("cuMemRelease", pool) == 1
    assert one.call("cuMemCreate", ctypes.byref(ADDRESS()), MAPPED + 1, props(), 0) == 1
    assert one.call("cuMemCreate", ctypes.byref(ADDRESS()), MAPPED, props(kind=0), 0) == 1
    assert one.call("cuMemFree", start) == 1
    texts = ["mapped already"] * 2 + ["not reserved", "no whole mapping", "no whole mapping"]
    texts += ["no mapping begins", "have memory", "no allocation", "not multiples", "kind 0"]
    expect_errors(one, *texts)
