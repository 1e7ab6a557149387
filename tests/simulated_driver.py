"""A CUDA driver made of Python functions, for what can be tested without a GPU.

Each entry point is a C function (ctypes) that calls the method of its name. A test lets calls fail
(`fails`), and reads what was called (`calls`). It is no model of a GPU's timing.
"""

import ctypes
from collections import Counter
from contextlib import contextmanager

from arenapy.cuda import driver

SUCCESS, INVALID_VALUE, OUT_OF_MEMORY = 0, 1, 2
ERRORS = {
    INVALID_VALUE: (b"CUDA_ERROR_INVALID_VALUE", b"invalid argument"),
    OUT_OF_MEMORY: (b"CUDA_ERROR_OUT_OF_MEMORY", b"out of memory"),
}
C_TYPES = {
    "unsigned int": ctypes.c_uint,
    "unsigned char": ctypes.c_ubyte,
    "size_t": ctypes.c_size_t,
    "CUdeviceptr": ctypes.c_uint64,
    "CUhostFn": ctypes.c_void_p,
}
HANDLES = {"CUcontext", "CUstream", "CUevent", "CUmemoryPool", "CUgraph", "CUuserObject"}


def c_type(name):
    if name.endswith("*") or name in HANDLES:
        return ctypes.c_void_p
    if name == "CUmemLocation":
        return ctypes.c_uint64  # two ints, which are passed alike
    return C_TYPES.get(name, ctypes.c_int)


def put(address, kind, value):
    """What a pointer argument is to receive."""
    kind.from_address(address).value = value


class SimulatedDriver:
    """Two devices of 64 and 128 MiB; contexts are 0x1000 and 0x2000."""

    MEMORY = (64 << 20, 128 << 20)

    def __init__(self):
        self.calls = Counter()
        self.fails = {}  # {name: result}
        self.current = []  # contexts, the last one current
        self.heap = 8 << 20
        self.entries = {}
        self.kept = []
        for name, signature in driver.ENTRIES:
            if name.endswith("_12"):
                continue
            arguments = signature.partition("(")[2].rstrip(")").split(", ")
            kinds = [c_type(one) for one in arguments if one != "void"]
            function = ctypes.CFUNCTYPE(ctypes.c_int, *kinds)(self.entry(name))
            self.kept.append(function)
            self.entries[name] = (ctypes.cast(function, ctypes.c_void_p).value, signature)

    def entry(self, name):
        method = getattr(self, name, None)

        def call(*arguments):
            self.calls[name] += 1
            planned = self.fails.get(name, SUCCESS)
            if planned:
                return planned
            return method(*arguments) or SUCCESS if method else INVALID_VALUE

        return call

    def cuInit(self, flags):
        return None

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

    def cuDevicePrimaryCtxRetain(self, out, device):
        put(out, ctypes.c_void_p, 0x1000 * (device + 1))

    def cuCtxPushCurrent(self, context):
        self.current.append(context)

    def cuCtxPopCurrent(self, out):
        put(out, ctypes.c_void_p, self.current.pop())

    def cuMemGetInfo(self, free, total):
        size = self.MEMORY[self.current[-1] // 0x1000 - 1]
        put(free, ctypes.c_size_t, size // 2)
        put(total, ctypes.c_size_t, size)

    def cuCtxSetLimit(self, limit, value):
        assert limit == 2
        self.heap = -(-value // 4096) * 4096

    def cuCtxGetLimit(self, out, limit):
        assert limit == 2
        put(out, ctypes.c_size_t, self.heap)


@contextmanager
def simulated():
    """arenapy on a driver of its own."""
    one = SimulatedDriver()
    driver.use(one.entries)
    try:
        yield one
    finally:
        driver.use(None)
    assert not one.current, "a context was left current"
