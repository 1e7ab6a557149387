"""The device by the driver alone: what a program without an allocator calls, kernels and timers.

The calls are those of cuda-python (``cuda.bindings.driver``), which `arenapy.cuda` needs anyway.
They work on the context that is current, here the primary one of the device, which arenapy's
streams and memory are of, too.
"""

import ctypes
import importlib
from types import TracebackType
from typing import Any, Self

from numpy.typing import NDArray

from arenapy.cuda import CudaError, Stream

from .gpu_kernel import NAME, PTX, THREADS

__all__ = ["Gpu"]

BLOCKS_A_MULTIPROCESSOR = 8  # of 256 threads, as many as one has room for
TIMED = 0  # CU_EVENT_DEFAULT
MULTIPROCESSORS = "CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT"


class Gpu:
    """A device whose primary context is current on this thread while this is in use.

    Parameters
    ----------
    ordinal : int
        Which device, as the driver counts them.

    Notes
    -----
    Thread-safety: for the thread that entered it.
    """

    def __init__(self, ordinal: int = 0) -> None:
        # By name, since its types are known only where it is installed.
        self._driver: Any = importlib.import_module("cuda.bindings.driver")
        self._ordinal = ordinal
        self._events: list[Any] = []  # destroyed at the end

    def __enter__(self) -> Self:
        cu = self._driver
        self._call("cuInit", 0)
        self._device = self._call("cuDeviceGet", self._ordinal)
        self._call("cuCtxPushCurrent", self._call("cuDevicePrimaryCtxRetain", self._device))
        self._module = self._call("cuModuleLoadData", PTX + b"\0")
        self._kernel = self._call("cuModuleGetFunction", self._module, NAME)
        which = getattr(cu.CUdevice_attribute, MULTIPROCESSORS)
        count = self._call("cuDeviceGetAttribute", which, self._device)
        self._blocks = BLOCKS_A_MULTIPROCESSOR * int(count)
        self.driver_version = int(self._call("cuDriverGetVersion"))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        cu = self._driver  # what fails here has failed before, and was told then
        cu.cuCtxSynchronize()
        for event in self._events:
            cu.cuEventDestroy(event)
        cu.cuModuleUnload(self._module)
        cu.cuCtxPopCurrent()
        cu.cuDevicePrimaryCtxRelease(self._device)

    def _call(self, name: str, *arguments: object) -> Any:
        error, *values = getattr(self._driver, name)(*arguments)
        if int(error) != 0:
            said = [self._driver.cuGetErrorName(error)[1], self._driver.cuGetErrorString(error)[1]]
            known, text = (one.decode() if one else "unknown" for one in said)
            raise CudaError(f"{name} failed: {known} ({text})", int(error), known)
        return values[0] if values else None

    # -- memory

    def allocate(self, nbytes: int) -> int:
        """Return the address of new memory of the device."""
        return int(self._call("cuMemAlloc", nbytes))

    def free(self, address: int) -> None:
        """Give memory back to the driver."""
        self._call("cuMemFree", address)

    def copy_in(self, address: int, array: NDArray[Any]) -> None:
        """Copy an array of the host to the device, and wait for it."""
        self._call("cuMemcpyHtoD", address, array.ctypes.data, array.nbytes)

    # -- work

    def launch(
        self, stream: Stream | None, address: int, nbytes: int, rounds: int, sum_: int
    ) -> None:
        """Add the checksum of memory of the device to the word at `sum_`; None: default stream."""
        values = (address, nbytes // 4, rounds, sum_)
        types = (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint64)
        handle = 0 if stream is None else stream.handle
        self._call(
            "cuLaunchKernel", self._kernel, self._blocks, 1, 1, THREADS, 1, 1, 0, handle,
            (values, types), 0,
        )  # fmt: skip

    def synchronize(self) -> None:
        """Wait for all that the device was given."""
        self._call("cuCtxSynchronize")

    # -- time

    def record(self, stream: Stream) -> Any:
        """Return a timed event for all that the stream was given so far."""
        event = self._call("cuEventCreate", TIMED)
        self._events.append(event)
        self._call("cuEventRecord", event, stream.handle)
        return event

    def milliseconds(self, start: Any, end: Any) -> float:
        """Return the time between two events, both of which are over."""
        return float(self._call("cuEventElapsedTime", start, end))
