"""A CUDA driver made of Python functions, for what can be tested without a GPU.

Each entry point is a C function (ctypes) that calls the method of its name. A test lets calls fail
(`fails`, `fail_at`), reads what was called (`calls`) and what was misused (`errors`), launches
kernels (`launch`), and says when what is queued runs (`step`, `drain`): until then nothing runs
that a GPU could leave undone. `before_call` is where progress, or anything, can be put in between.
"""

import ctypes
import os
import threading
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass

import simulated_gpu as gpu
from simulated_memory import (
    GRANULE,
    INVALID_HANDLE,
    INVALID_VALUE,
    OUT_OF_MEMORY,
    SUCCESS,
    Allocation,
    Handles,
    MemoryPool,
    Range,
    Refused,
    libc,
    put,
)

from arenapy.cuda import driver

DEINITIALIZED, INVALID_DEVICE, PEER_UNSUPPORTED, UNKNOWN = 4, 101, 217, 999
PEER_ALREADY_ENABLED, ALREADY_REGISTERED, NOT_REGISTERED = 704, 712, 713
LOST = 700  # CUDA_ERROR_ILLEGAL_ADDRESS, after which a context says nothing else
WITHOUT_CONTEXT = {  # they succeed all the same
    "cuCtxPushCurrent", "cuCtxPopCurrent", "cuCtxGetCurrent", "cuCtxGetDevice", "cuDeviceGet",
    "cuDeviceGetCount", "cuGetErrorName", "cuGetErrorString", "cuThreadExchangeStreamCaptureMode",
}  # fmt: skip
ERRORS = {
    INVALID_VALUE: (b"CUDA_ERROR_INVALID_VALUE", b"invalid argument"),
    OUT_OF_MEMORY: (b"CUDA_ERROR_OUT_OF_MEMORY", b"out of memory"),
    INVALID_HANDLE: (b"CUDA_ERROR_INVALID_HANDLE", b"invalid resource handle"),
    LOST: (b"CUDA_ERROR_ILLEGAL_ADDRESS", b"an illegal memory access was encountered"),
    PEER_UNSUPPORTED: (b"CUDA_ERROR_PEER_ACCESS_UNSUPPORTED", b"peer access is not supported"),
    gpu.CAPTURE_UNSUPPORTED: (b"CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", b"stream is capturing"),
}
C_TYPES = {
    "unsigned int": ctypes.c_uint,
    "unsigned char": ctypes.c_ubyte,
    "size_t": ctypes.c_size_t,
    "unsigned PY_LONG_LONG": ctypes.c_uint64,
    "CUdeviceptr": ctypes.c_uint64,
    "CUmemGenericAllocationHandle": ctypes.c_uint64,
    "CUhostFn": ctypes.c_void_p,
}
HANDLES = {"CUcontext", "CUstream", "CUevent", "CUmemoryPool", "CUgraph", "CUuserObject"}
UNIFIED_ADDRESSING, CONCURRENT_MANAGED_ACCESS, VIRTUAL_MEMORY = 41, 89, 102  # of a device
ALREADY_MAPPED = 208
RELEASE_THRESHOLD = 4  # of a memory pool
MOVE = 1  # a flag: the reference itself
AS_DESCRIPTOR, DESCRIPTORS = 1, 103  # a handle's kind, and whether a device has it


def c_type(name):
    if name.endswith("*") or name in HANDLES:
        return ctypes.c_void_p
    if name == "CUmemLocation":
        return ctypes.c_uint64  # two ints, which are passed alike
    return C_TYPES.get(name, ctypes.c_int)


def location_of(device):
    """CUDA 13's words for what CUDA 12 calls a device, -1 being the host."""
    return 2 if device == -1 else 1 | device << 32


@dataclass(eq=False)
class UserObject:
    pointer: int | None
    destroy: int  # a C function's address
    callers: int  # references that are not a graph's
    references: int
    handle: int = 0


class SimulatedDriver(gpu.Gpu):
    """Two devices of 64 and 128 MiB, half of it others'; contexts are 0x1000 and 0x2000."""

    MEMORY = (64 << 20, 128 << 20)

    def __init__(self, version=13):
        """`version`: of CUDA, in whose words it is called; 12 or 13."""
        super().__init__(self.MEMORY)
        self.calls = Counter()
        self.fails = {}  # {name: result}
        self.plan = {}  # {(name, the count of the call): result}
        self.before_call = None  # it is called with a name
        # A real one waits when it unmaps a page. That is not sure of one that others share.
        self.small_frees_wait = True
        self.hooked = set()  # threads that are in it
        self.closed = False
        self.retained = set()  # devices
        self.lost = set()  # devices whose context has failed
        self.raised = None  # by before_call, or by a kernel that a call has run
        self.heap = 8 << 20
        self.attributes.update(
            {UNIFIED_ADDRESSING: 1, CONCURRENT_MANAGED_ACCESS: 1, VIRTUAL_MEMORY: 1, DESCRIPTORS: 1}
        )
        self.allocations = Handles("allocation", 0x700000, INVALID_VALUE)
        self.retained_at = {}  # handle: where its memory is mapped
        self.granularity = GRANULE
        self.advised = []  # arguments of cuMemAdvise and cuMemPrefetchAsync
        self.entries = {}
        self.functions = {}
        for name, signature in driver.ENTRIES:
            plain = name.removesuffix("_12")
            if plain in driver.CHANGED and (name != plain) != (version == 12):
                continue
            arguments = signature.partition("(")[2].rstrip(")").split(", ")
            kinds = [c_type(one) for one in arguments if one != "void"]
            function = ctypes.CFUNCTYPE(ctypes.c_int, *kinds)(self.entry(name))
            self.functions[name] = function
            self.entries[plain] = (ctypes.cast(function, ctypes.c_void_p).value, signature)

    def entry(self, name):
        method = getattr(self, name, None)

        def call(*arguments):
            self._hook(name)
            try:
                self.enter()  # `exclusive` would take twice as long, in tests of million calls
                try:
                    return self._called(name, method, arguments)
                finally:
                    self.leave()
            except BaseException as error:  # nothing can be raised through a C function
                self.raised = self.raised or error
                return UNKNOWN

        return call

    def _hook(self, name):
        """before_call, which may itself lead to calls: those have none."""
        if not self.before_call:
            return
        me = threading.get_native_id()
        if me not in self.hooked:
            self.hooked.add(me)
            try:
                self.before_call(name)
            except BaseException as error:
                self.before_call = None
                self.raised = self.raised or error
            finally:
                self.hooked.discard(me)

    def _called(self, name, method, arguments):
        if self.closed:
            return DEINITIALIZED
        self.calls[name] += 1
        if self.plan or self.fails:
            planned = self.plan.pop((name, self.calls[name]), self.fails.get(name, SUCCESS))
            if planned:
                return planned
        if self.lost and name not in WITHOUT_CONTEXT and self._of_a_lost_device(name, arguments):
            return LOST
        try:
            if self.destroying and threading.get_native_id() in self.destroying:
                raise Refused(gpu.NOT_PERMITTED, "called by the destructor of a user object")
            return method(*arguments) or SUCCESS if method else INVALID_VALUE
        except Refused as refused:
            if refused.misuse:
                self.errors.append(f"{name}: {refused.misuse}")
            return refused.result

    # ---- for tests ----

    def fail_at(self, name, n, result):
        """The n-th call from now, counted from 1, fails."""
        self.plan[name, self.calls[name] + n] = result

    def call(self, name, *arguments):
        """Its result."""
        return self.functions[name](*arguments)

    def got(self, name, kind, *arguments):
        """What a call that succeeds writes to its first argument, of a ctypes kind."""
        out = kind()
        result = self.call(name, ctypes.byref(out), *arguments)
        assert not result, f"{name}: {result}"
        return out.value

    @contextmanager
    def on(self, device):
        """With the context of a device current."""
        self.current.append(0x1000 * (device + 1))
        try:
            yield
        finally:
            self.current.pop()

    @property
    def current(self):
        """This thread's contexts, the last one current."""
        return self.stacks.setdefault(threading.get_native_id(), [])

    def lose(self, device):
        """Its context fails: what is queued there never runs, and every call says so."""
        with self.exclusive():
            self.lost.add(device)
            for one in [one for one in self.queue if one.device == device]:
                self.queue.remove(one)
                one.done, one.needs = True, ()

    def _of_a_lost_device(self, name, arguments):
        handle = arguments[0] if name.startswith("cuStream") and arguments else None
        if handle in self.stream_handles.things:
            return self.stream_handles.things[handle].device in self.lost
        return bool(self.current) and self.device() in self.lost

    def close(self):
        """Forget what is queued, and unmap all memory."""
        with self.exclusive():
            self.closed = True
            self.queue.clear()
            self.memory.close()

    # ---- devices and contexts ----

    def cuInit(self, flags):
        return None

    def cuDriverGetVersion(self, out):
        put(out, ctypes.c_int, 12080)

    def cuGetErrorName(self, result, out):
        return self._text(result, out, 0)

    def cuGetErrorString(self, result, out):
        return self._text(result, out, 1)

    def _text(self, result, out, which):
        if result not in ERRORS:
            return INVALID_VALUE
        put(out, ctypes.c_char_p, ERRORS[result][which])
        return SUCCESS

    def cuDeviceGetCount(self, out):
        put(out, ctypes.c_int, len(self.MEMORY))

    def cuDeviceGet(self, out, ordinal):
        put(out, ctypes.c_int, ordinal)

    def cuDeviceGetName(self, out, size, device):
        ctypes.memmove(out, b"Simulated %d\0" % device, 12)

    def cuDeviceGetAttribute(self, out, attribute, device):
        put(out, ctypes.c_int, self.attributes.get(attribute, 0))

    def cuDeviceGetUuid(self, out, device):
        ctypes.memmove(out, b"simulated GPU %2d" % device, 16)

    def cuDeviceCanAccessPeer(self, out, device, peer):
        put(out, ctypes.c_int, (device, peer) in self.peers)

    def cuDevicePrimaryCtxGetState(self, device, flags, active):
        """Who has a stream there has its context."""
        there = any(one.device == device for one in self.streams)
        put(flags, ctypes.c_uint, 0)
        put(active, ctypes.c_int, there or device in self.retained)

    def cuDevicePrimaryCtxRetain(self, out, device):
        self.retained.add(device)
        put(out, ctypes.c_void_p, 0x1000 * (device + 1))

    def cuCtxPushCurrent(self, context):
        self.current.append(context)

    def cuCtxPopCurrent(self, out):
        if not self.current:
            return gpu.INVALID_CONTEXT
        put(out, ctypes.c_void_p, self.current.pop())

    def cuCtxGetCurrent(self, out):
        put(out, ctypes.c_void_p, self.current[-1] if self.current else 0)

    def cuCtxGetDevice(self, out):
        put(out, ctypes.c_int, self.device())

    def cuCtxSetLimit(self, limit, value):
        assert limit == 2
        self.heap = -(-value // 4096) * 4096

    def cuCtxGetLimit(self, out, limit):
        assert limit == 2
        put(out, ctypes.c_size_t, self.heap)

    def cuCtxEnablePeerAccess(self, context, flags):
        self.unsafe()
        pair = (self.device(), context // 0x1000 - 1)
        if pair in self.enabled or pair not in self.peers:
            return PEER_ALREADY_ENABLED if pair in self.enabled else PEER_UNSUPPORTED
        self.enabled.add(pair)

    def cuCtxSynchronize(self):
        for capture in self.captures:
            if capture.origin.context == self.context():
                self.spoil(capture, gpu.CAPTURE_UNSUPPORTED, "it waits for all streams")
        self.wait([one for one in self.queue if one.device == self.device()])

    # ---- memory ----

    def cuMemGetInfo(self, free, total):
        put(free, ctypes.c_size_t, self.memory.left(self.device()))
        put(total, ctypes.c_size_t, self.MEMORY[self.device()])

    def cuMemAlloc(self, out, nbytes):
        self._allocate(out, nbytes, "device")

    def cuMemAllocManaged(self, out, nbytes, flags):
        if flags not in (1, 2):
            return INVALID_VALUE
        self._allocate(out, nbytes, "managed")

    def _allocate(self, out, nbytes, kind):
        self.unsafe()
        if not nbytes:
            raise Refused(INVALID_VALUE)
        self.memory.take(self.device(), nbytes)
        put(out, ctypes.c_uint64, self.memory.new(nbytes, self.device(), kind).start)

    def cuMemFree(self, address):
        self.unsafe()
        if address:
            one = self._freed(address)
            if self.small_frees_wait or one.nbytes >= GRANULE:
                self.finish([each for each in self.queue if each.device == one.device])
            self._release(one)

    def _freed(self, address):
        """The range, which from now on is being freed."""
        one = self.memory.at(address)
        if one is None:
            raise Refused(INVALID_VALUE)
        if one.freed_at is not None or one.dead:
            raise Refused(INVALID_VALUE, f"{address:#x} was freed before")
        one.freed_at = next(self.numbers)
        return one

    def _release(self, one):
        self.memory.release(one)
        if one.pool:
            one.pool.give(one.nbytes)
        else:
            self.memory.used[one.device] -= one.nbytes

    # ---- addresses first, memory later: sizes are multiples of the granularity ----

    def _whole(self, *numbers):
        if not all(numbers) or any(one % self.granularity for one in numbers):
            raise Refused(INVALID_VALUE, f"{numbers} are not multiples of {self.granularity}")

    def cuMemGetAllocationGranularity(self, out, props, option):
        self._device_of(props)
        put(out, ctypes.c_size_t, self.granularity)

    def _device_of(self, props):
        """Of a CUmemAllocationProp: pinned memory of a device."""
        kind, _, place, ordinal = (ctypes.c_int * 4).from_address(props)
        if kind != 1 or place != 1 or not 0 <= ordinal < len(self.MEMORY):
            raise Refused(INVALID_VALUE, f"memory of the kind {kind} at {place}, {ordinal}")
        return ordinal

    def cuMemAddressReserve(self, out, nbytes, align, wanted, flags):
        self.unsafe()
        self._whole(nbytes)
        if flags or align & (align - 1):
            return INVALID_VALUE
        put(out, ctypes.c_uint64, self.memory.reserve(nbytes, max(align, self.granularity)))

    def cuMemAddressFree(self, address, nbytes):
        self.unsafe()
        one = self.memory.reserved.get(address)
        if one is None or one.nbytes != nbytes:
            raise Refused(INVALID_VALUE, f"{nbytes} bytes from {address:#x} are no reservation")
        if one.mappings:
            raise Refused(INVALID_VALUE, f"the addresses from {address:#x} have memory")
        libc.munmap(address, nbytes)
        del self.memory.reserved[address]

    def cuMemCreate(self, out, nbytes, props, flags):
        self.unsafe()
        self._whole(nbytes)
        device = self._device_of(props)
        handles = ctypes.c_int.from_address(props + 4).value
        if handles not in (0, AS_DESCRIPTOR):
            raise Refused(INVALID_VALUE, f"handles of the kind {handles}")
        self.memory.take(device, nbytes)
        one = Allocation(nbytes, device, exportable=handles == AS_DESCRIPTOR)
        put(out, ctypes.c_uint64, self.allocations.add(one))

    def cuMemRelease(self, handle):
        self.unsafe()
        one = self.allocations.remove(handle)
        one.held -= 1
        self.memory.drop(one)

    def cuMemRetainAllocationHandle(self, out, address):
        self.unsafe()
        space = self.memory.space(address, 1)
        if address not in space.mappings:
            raise Refused(INVALID_VALUE, f"no mapping begins at {address:#x}")
        one, _ = space.mappings[address]
        one.held += 1
        self.retained_at[handle := self.allocations.add(one)] = address
        put(out, ctypes.c_uint64, handle)

    def cuMemExportToShareableHandle(self, out, handle, kind, flags):
        """As a file that has the bytes."""
        self.unsafe()
        one = self.allocations.get(handle)
        if flags or kind != AS_DESCRIPTOR or not one.exportable or not one.mapped:
            raise Refused(INVALID_VALUE, "an allocation that was not made for it")
        put(out, ctypes.c_int, self.memory.export(self.retained_at[handle]))

    def cuMemImportFromShareableHandle(self, out, file, kind):
        """Of any process's simulated device, the first one."""
        self.unsafe()
        try:
            nbytes = os.fstat(file or 0).st_size
        except OSError:
            nbytes = 0
        if kind != AS_DESCRIPTOR or not nbytes or nbytes % self.granularity:
            raise Refused(INVALID_VALUE)
        one = Allocation(nbytes, self.device(), file=os.dup(file or 0), imported=True)
        put(out, ctypes.c_uint64, self.allocations.add(one))

    def cuMemMap(self, address, nbytes, offset, handle, flags):
        self.unsafe()
        self._whole(address, nbytes)
        one = self.allocations.get(handle)
        if offset or flags or nbytes != one.nbytes or one.mapped:
            raise Refused(INVALID_VALUE, "a part of an allocation, or one that is mapped already")
        space = self.memory.space(address, nbytes)
        if any(space.mapped(at) for at in range(address, address + nbytes, self.granularity)):
            raise Refused(ALREADY_MAPPED, f"{address:#x} is mapped already")
        self.memory.map(address, one)

    def cuMemUnmap(self, address, nbytes):
        """Unlike cuMemFree it waits for nothing."""
        self.unsafe()
        self._whole(address, nbytes)
        if self.uses(address, nbytes):
            self.errors.append(f"{address:#x} was unmapped while an operation is to use it")
        self.memory.unmapped(address, nbytes)

    def cuMemSetAccess(self, address, nbytes, descriptions, count):
        self.unsafe()
        self._whole(address, nbytes)
        words = (ctypes.c_int * (3 * count)).from_address(descriptions)
        if not count or any(words[i] != 1 or words[i + 2] != 3 for i in range(0, 3 * count, 3)):
            return INVALID_VALUE
        self.memory.allow(address, nbytes, frozenset(words[1::3]))

    def cuMemHostRegister(self, address, nbytes, flags):
        self.unsafe()
        known = [one for one in self.memory.registered.values() if one.start < address + nbytes]
        if any(address < one.end for one in known):
            return ALREADY_REGISTERED
        one = Range(address, nbytes, self.device(), "registered")
        self.memory.registered[address] = one

    def cuMemHostUnregister(self, address):
        self.unsafe()
        if address not in self.memory.registered:
            return NOT_REGISTERED
        one = self.memory.registered.pop(address)
        if self.uses(one.start, one.nbytes):
            self.errors.append(f"{address:#x} was unregistered while an operation is to use it")

    def cuPointerGetAttribute(self, out, attribute, address):
        one = self.memory.find(address)
        if one is None or one.dead:
            return INVALID_VALUE
        known = {
            2: (ctypes.c_int, 1 if one.kind == "registered" else 2),  # the type of memory
            8: (ctypes.c_int, one.kind == "managed"),
            9: (ctypes.c_int, one.device),
        }
        if attribute not in known:
            return INVALID_VALUE
        put(out, *known[attribute])

    def cuMemAdvise(self, address, nbytes, advice, location):
        self._advise("cuMemAdvise", address, nbytes, advice, location)

    def cuMemAdvise_12(self, address, nbytes, advice, device):
        self.cuMemAdvise(address, nbytes, advice, location_of(device))

    def cuMemPrefetchAsync_12(self, address, nbytes, device, stream):
        self.cuMemPrefetchAsync(address, nbytes, location_of(device), 0, stream)

    def cuMemPrefetchAsync(self, address, nbytes, location, flags, stream):
        self._advise("cuMemPrefetchAsync", address, nbytes, flags, location)
        self.submit(self.stream(stream), "a prefetch", None, [(address, nbytes)])

    def _advise(self, name, address, nbytes, what, location):
        one = self.memory.find(address)
        if one is None or one.kind != "managed":
            raise Refused(INVALID_VALUE)
        if not self.attributes.get(CONCURRENT_MANAGED_ACCESS) and location & 0xFFFFFFFF == 1:
            raise Refused(INVALID_DEVICE)
        kind, ordinal = location & 0xFFFFFFFF, location >> 32
        self.advised.append((name, address, nbytes, what, kind, ordinal))

    def cuMemcpyAsync(self, to, source, nbytes, stream):
        """The host's other memory is read before the call returns, or written before it does."""
        stream = self.stream(stream)
        touches = [(one, nbytes) for one in (source, to) if not self.memory.is_host(one)]
        data = source
        if self.memory.is_host(source) and not stream.capture:
            data = ctypes.string_at(source, nbytes)
        one = self.submit(stream, "a copy", lambda: ctypes.memmove(to, data, nbytes), touches)
        if self.memory.is_host(to) and not stream.capture:
            self.finish([one])

    def cuMemcpyPeerAsync(self, to, to_context, source, source_context, nbytes, stream):
        for address, context in ((to, to_context), (source, source_context)):
            one = self.memory.find(address)
            if one is None or context != 0x1000 * (one.device + 1):
                raise Refused(INVALID_VALUE, f"{address:#x} is not of context {context or 0:#x}")
        self.cuMemcpyAsync(to, source, nbytes, stream)

    def cuMemsetD8Async(self, address, value, nbytes, stream):
        if not self.memory.find(address):
            raise Refused(INVALID_VALUE, f"{address:#x} is not the driver's")
        stream, touches = self.stream(stream), [(address, nbytes)]
        self.submit(stream, "a memset", lambda: ctypes.memset(address, value, nbytes), touches)

    # ---- the driver's own pools ----

    def cuMemPoolCreate(self, out, properties):
        self.unsafe()
        device = ctypes.c_int.from_address(properties + 12).value
        put(out, ctypes.c_void_p, self.pool_handles.add(MemoryPool(self.memory, device)))

    def cuMemPoolDestroy(self, pool):
        self.unsafe()
        one = self.pool_handles.remove(pool)
        one.destroyed = True
        one.trim(0)

    def cuMemPoolSetAttribute(self, pool, attribute, value):
        if attribute == RELEASE_THRESHOLD:
            self.pool_handles.get(pool).threshold = ctypes.c_uint64.from_address(value).value

    def cuMemPoolSetAccess(self, pool, access, count):
        """What the pool's memory may be reached from; nothing is refused without it."""
        self.unsafe()
        kind, _, flags = (ctypes.c_int * 3).from_address(access)
        if (kind, flags, count) != (1, 3, 1):
            raise Refused(INVALID_VALUE, f"access {kind, flags} for {count}")
        self.pool_handles.get(pool)

    def cuMemPoolTrimTo(self, pool, keep):
        self.unsafe()
        self.pool_handles.get(pool).trim(keep)

    def cuMemAllocFromPoolAsync(self, out, nbytes, pool, stream):
        pool, stream = self.pool_handles.get(pool), self.stream(stream)
        if not nbytes:
            return INVALID_VALUE
        self.usable(stream)
        self._no_memory_of_a_graph(stream)
        pool.take(nbytes)
        one = self.memory.new(nbytes, pool.device, "pool", pool)
        one.ready = False
        put(out, ctypes.c_uint64, one.start)
        self.submit(stream, "an allocation", lambda: setattr(one, "ready", True))

    def cuMemFreeAsync(self, address, stream):
        stream, one = self.stream(stream), self.memory.at(address)
        self.usable(stream)
        self._no_memory_of_a_graph(stream)
        if one is None or not one.pool:
            raise Refused(INVALID_VALUE, f"{address:#x} cannot be freed on {stream.name}")
        one = self._freed(address)
        self.submit(stream, "a free", lambda: self._release(one))

    def _no_memory_of_a_graph(self, stream):
        if stream.capture:
            raise Refused(INVALID_VALUE, "memory of a graph: not modelled")

    # ---- user objects ----

    def cuUserObjectCreate(self, out, pointer, destroy, count, flags):
        if flags != 1 or not count:
            return INVALID_VALUE
        one = UserObject(pointer, destroy, count, count)
        one.handle = self.object_handles.add(one)
        put(out, ctypes.c_void_p, one.handle)

    def cuUserObjectRelease(self, user_object, count):
        one = self.object_handles.get(user_object)
        if count > one.callers:
            raise Refused(INVALID_VALUE, f"{count} references released of {one.callers}")
        one.callers -= count
        self.drop(one, count)

    def cuGraphRetainUserObject(self, graph, user_object, count, flags):
        graph, one = self.graph_handles.get(graph), self.object_handles.get(user_object)
        if flags == MOVE and count > one.callers:
            raise Refused(INVALID_VALUE, f"{count} references moved of {one.callers}")
        if flags == MOVE:
            one.callers -= count
        else:
            one.references += count
        graph.objects[one] += count


@contextmanager
def simulated(version=13):
    """arenapy on a driver of its own, of which nothing may have been misused."""
    one = SimulatedDriver(version)
    driver.use(one.entries)
    try:
        yield one
        one.before_call = None
        one.drain()
    finally:
        driver.use(None)
        one.close()
        if one.raised:
            raise one.raised
    assert not any(one.stacks.values()), "a context was left current"
    assert not one.errors, one.errors
