"""A HIP runtime made of Python functions, as hip-python shows it, for tests without an AMD GPU.

Calls give (result, value ...), as hip-python's do, and take addresses as integers. Memory of a
device is mapped twice: at its address the host may not touch it (PROT_NONE: a read is a SIGSEGV),
and the runtime uses the second mapping. Copies inside devices are queued until somebody waits for
that device. A test lets calls fail (`fails`, `plan`), reads what was called (`calls`) and what was
misused (`errors`), and may put anything in between (`before_call`).

Never run on hardware: nobody compared this model with an AMD GPU.
"""

import contextlib
import ctypes
import enum
import gc
import mmap
import os
import sys
import threading
from collections import Counter, deque
from dataclasses import dataclass
from types import SimpleNamespace

MIB = 1 << 20
PAGE = mmap.PAGESIZE
FAILED = ctypes.c_void_p(-1).value
PORTABLE = 1

libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class hipError_t(enum.IntEnum):
    hipSuccess = 0
    hipErrorInvalidValue = 1
    hipErrorOutOfMemory = 2
    hipErrorNoDevice = 100
    hipErrorInvalidDevice = 101
    hipErrorIllegalAddress = 700
    hipErrorUnknown = 999


class hipMemcpyKind(enum.IntEnum):
    hipMemcpyHostToHost = 0
    hipMemcpyHostToDevice = 1
    hipMemcpyDeviceToHost = 2
    hipMemcpyDeviceToDevice = 3


class Pointer:
    """What hip-python returns for an address."""

    def __init__(self, address):
        self.address = address

    def __int__(self):
        return self.address


def mapped(nbytes, fd, access):
    flags = mmap.MAP_SHARED if fd >= 0 else mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    address = libc.mmap(None, nbytes, access, flags, fd, 0)
    assert address != FAILED, os.strerror(ctypes.get_errno())
    return address


@dataclass(eq=False)
class Range:
    """An allocation."""

    address: int
    nbytes: int
    device: int
    on_device: bool
    window: int  # where the runtime finds the bytes


class Refused(Exception):
    """A call's result."""


class SimulatedHip:
    """The module ``hip.hip``, with two devices of 64 and 128 MiB."""

    hipError_t = hipError_t
    hipMemcpyKind = hipMemcpyKind
    MEMORY = (64 * MIB, 128 * MIB)

    def __init__(self):
        self.process = os.getpid()
        self.ranges = {}  # by address
        self.freed = set()  # addresses that were allocated before
        self.queues = [deque() for _ in self.MEMORY]  # of each device: copies that are still to do
        self.calls = Counter()
        self.fails = {}  # {name: result}
        self.plan = {}  # {(name, the count of the call): result}
        self.errors = []  # misuse
        self.before_call = None  # it is called with a name, outside the lock
        self.last_error = 0
        self.here = threading.local()
        self.lock = threading.RLock()

    def __getattr__(self, name):
        method = getattr(type(self), f"_{name}", None) if name.startswith("hip") else None
        if method is None:
            raise AttributeError(f"module 'hip.hip' has no attribute {name!r}")

        def call(*arguments):
            if os.getpid() != self.process:
                os.write(2, f"{name} was called in a forked child\n".encode())
                os._exit(99)
            if self.before_call:
                self.before_call(name)
            with self.lock:
                return self._called(name, method, arguments)

        return call

    def _called(self, name, method, arguments):
        self.calls[name] += 1
        result = self.plan.get((name, self.calls[name]), self.fails.get(name, 0))
        try:
            if result:
                raise Refused(result)
            return (hipError_t.hipSuccess, *(method(self, *arguments) or ()))
        except Refused as error:
            self.last_error = hipError_t(error.args[0])
            return (self.last_error, *[None] * (name in ("hipMalloc", "hipHostMalloc")))

    def misused(self, text):
        self.errors.append(text)
        raise Refused(hipError_t.hipErrorInvalidValue)

    # -- devices

    @property
    def current(self):
        return getattr(self.here, "device", 0)

    def _hipGetDeviceCount(self):
        return (len(self.MEMORY),)

    def _hipGetDevice(self):
        return (self.current,)

    def _hipSetDevice(self, device):
        if not 0 <= device < len(self.MEMORY):
            raise Refused(hipError_t.hipErrorInvalidDevice)
        self.here.device = device

    def _hipGetLastError(self):
        found, self.last_error = self.last_error, 0
        return (found,)

    def _hipDeviceSynchronize(self):
        self.finish(self.current)

    def finish(self, device):
        while self.queues[device]:
            self.queues[device].popleft()()

    # -- memory

    def used(self, device):
        return sum(r.nbytes for r in self.ranges.values() if r.on_device and r.device == device)

    def _hipMemGetInfo(self):
        total = self.MEMORY[self.current]
        return total - self.used(self.current), total

    def _hipMalloc(self, nbytes):
        if self.used(self.current) + nbytes > self.MEMORY[self.current]:
            raise Refused(hipError_t.hipErrorOutOfMemory)
        fd = os.memfd_create("hip")
        try:
            os.ftruncate(fd, nbytes)
            address = mapped(nbytes, fd, 0)
            window = mapped(nbytes, fd, mmap.PROT_READ | mmap.PROT_WRITE)
        finally:
            os.close(fd)
        return self.allocated(Range(address, nbytes, self.current, True, window))

    def _hipHostMalloc(self, nbytes, flags):
        if flags != PORTABLE:
            raise Refused(hipError_t.hipErrorInvalidValue)
        address = mapped(nbytes, -1, mmap.PROT_READ | mmap.PROT_WRITE)
        return self.allocated(Range(address, nbytes, self.current, False, address))

    def allocated(self, made):
        self.ranges[made.address] = made
        self.freed.discard(made.address)
        return (Pointer(made.address),)

    def _hipFree(self, address):
        self.end(address, True)

    def _hipHostFree(self, address):
        self.end(address, False)

    def end(self, address, on_device):
        found = self.ranges.get(address)
        if found is None:
            how = "free of memory that is free" if address in self.freed else "foreign free"
            self.misused(f"{how}: {address:#x}")
        if found.on_device != on_device:
            self.misused(f"freed by the function of other memory: {address:#x}")
        if self.current != found.device:
            self.misused(f"freed with device {self.current} current: {address:#x}")
        self.finish(found.device)
        del self.ranges[address]
        self.freed.add(address)
        libc.munmap(address, found.nbytes)
        if on_device:
            libc.munmap(found.window, found.nbytes)

    # -- copies

    def window(self, address, nbytes, on_device, device=None):
        """Where the runtime finds bytes."""
        for one in self.ranges.values():
            if one.address <= address and address + nbytes <= one.address + one.nbytes:
                if one.on_device != on_device or device not in (None, one.device):
                    self.misused(f"{address:#x} is not where the call says")
                return one.window + address - one.address
        if on_device:
            self.misused(f"{nbytes} bytes at {address:#x} are not on a device")
        return address

    def _hipMemcpy(self, to, source, nbytes, kind):
        assert isinstance(kind, hipMemcpyKind)  # as hip-python checks
        from_device, to_device = kind in (2, 3), kind in (1, 3)
        # The current device copies; it is to be the source's.
        target = self.window(to, nbytes, to_device, None if from_device else self.current)
        origin = self.window(source, nbytes, from_device, self.current if from_device else None)
        self.launch(self.current, lambda: ctypes.memmove(target, origin, nbytes))
        if not (from_device and to_device):
            self.finish(self.current)

    # -- for tests

    def launch(self, device, kernel):
        """Give a device work on its null stream."""
        self.queues[device].append(kernel)

    def peek(self, address, nbytes):
        return ctypes.string_at(self.window(address, nbytes, True), nbytes)

    def poke(self, address, nbytes, byte):
        ctypes.memset(self.window(address, nbytes, True), byte, nbytes)


@contextlib.contextmanager
def simulated_hip(leaks=False, misuse=False):
    """A runtime in the place of hip-python's. In the end all its memory is free, unless `leaks`."""
    one = SimulatedHip()
    before = sys.modules.get("hip")
    sys.modules["hip"] = SimpleNamespace(hip=one)
    try:
        yield one
    finally:
        if before is None:
            del sys.modules["hip"]
        else:
            sys.modules["hip"] = before
    gc.collect()
    assert misuse or not one.errors, one.errors
    assert leaks or not one.ranges, "memory was never given back"
    assert not one.last_error, "an error was left for other libraries to find"
