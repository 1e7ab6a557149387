"""``cuda.bindings.driver`` as the GPU demo uses it, over the simulated driver.

Calls give (result, value ...), as cuda-python's do. A launched kernel is the demo's checksum, by
NumPy, of what the memory holds when the simulated device comes to it.
"""

import ctypes
import sys
from contextlib import contextmanager

import numpy as np
from cuda_support import a_gpu
from helpers import peek

from arenapy.commands.demo import gpu_kernel

MULTIPROCESSORS = 16
MAX_ROUNDS = 3  # of those asked for: time means nothing here


def simulated_checksum(words, rounds):
    return gpu_kernel.checksum(words, min(rounds, MAX_ROUNDS))


class Bindings:
    """The module. Tests may put a function of a batch's sum in `spoil`, and read `launched`."""

    class CUdevice_attribute:
        CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT = MULTIPROCESSORS

    def __init__(self, simulated):
        self.simulated = simulated
        self.spoil = None
        self.launched = 0
        self.loaded = 0  # modules
        simulated.attributes[MULTIPROCESSORS] = 2

    def call(self, name, *arguments):
        return (self.simulated.call(name, *arguments),)

    def got(self, name, kind, *arguments):
        out = kind()
        return self.simulated.call(name, ctypes.byref(out), *arguments), out.value

    def text(self, name, error):
        out = ctypes.c_char_p()
        return self.simulated.call(name, error, ctypes.byref(out)), out.value

    def cuInit(self, flags):
        return self.call("cuInit", flags)

    def cuGetErrorName(self, error):
        return self.text("cuGetErrorName", error)

    def cuGetErrorString(self, error):
        return self.text("cuGetErrorString", error)

    def cuDriverGetVersion(self):
        return self.got("cuDriverGetVersion", ctypes.c_int)

    def cuDeviceGet(self, ordinal):
        return self.got("cuDeviceGet", ctypes.c_int, ordinal)

    def cuDeviceGetAttribute(self, which, device):
        return self.got("cuDeviceGetAttribute", ctypes.c_int, which, device)

    def cuDevicePrimaryCtxRetain(self, device):
        return self.got("cuDevicePrimaryCtxRetain", ctypes.c_void_p, device)

    def cuDevicePrimaryCtxRelease(self, device):
        return (0,)

    def cuCtxPushCurrent(self, context):
        return self.call("cuCtxPushCurrent", context)

    def cuCtxPopCurrent(self):
        return self.got("cuCtxPopCurrent", ctypes.c_void_p)

    def cuCtxSynchronize(self):
        return self.call("cuCtxSynchronize")

    def cuMemAlloc(self, nbytes):
        return self.got("cuMemAlloc", ctypes.c_uint64, nbytes)

    def cuMemFree(self, address):
        return self.call("cuMemFree", address)

    def cuMemcpyHtoD(self, to, source, nbytes):
        result = self.simulated.call("cuMemcpyAsync", to, source, nbytes, None)
        return (result or self.simulated.call("cuStreamSynchronize", None),)

    def cuEventCreate(self, flags):
        return self.got("cuEventCreate", ctypes.c_void_p, flags)

    def cuEventDestroy(self, event):
        return self.call("cuEventDestroy", event)

    def cuEventRecord(self, event, stream):
        return self.call("cuEventRecord", event, stream)

    def cuEventElapsedTime(self, start, end):
        return self.got("cuEventElapsedTime", ctypes.c_float, start, end)

    def cuModuleLoadData(self, image):
        assert image.endswith(b"\0")
        self.loaded += 1
        return 0, "module"

    def cuModuleUnload(self, module):
        self.loaded -= 1
        return (0,)

    def cuModuleGetFunction(self, module, name):
        assert f".entry {name.decode()}(".encode() in gpu_kernel.PTX
        return 0, "kernel"

    def cuLaunchKernel(self, kernel, *shape_and_more):
        *shape, shared, stream, (values, types), extra = shape_and_more
        assert (kernel, shape[1:], shared, extra) == ("kernel", [1, 1, 256, 1, 1], 0, 0)
        assert [ctypes.sizeof(one) for one in types] == [8, 8, 4, 8]  # as the PTX declares them
        start, words, rounds, sum_ = values
        spoil = self.spoil

        def run():
            data = np.frombuffer(peek(start, words * 4), np.uint32)
            found = simulated_checksum(data, rounds)
            total = ctypes.c_uint32.from_address(sum_)
            total.value += spoil(found) if spoil else found

        self.launched += 1
        self.simulated.launch(stream, run, [(start, words * 4), (sum_, 4)])
        return (0,)


@contextmanager
def bindings(monkeypatch):
    """The module in the place of cuda-python's, and a device under it, all free in the end."""
    with a_gpu() as simulated, monkeypatch.context() as patch:
        one = Bindings(simulated)
        patch.setitem(sys.modules, "cuda.bindings.driver", one)
        yield one
        assert one.loaded == 0
