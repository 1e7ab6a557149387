"""Stream objects of other libraries, with what theirs have, over streams of the simulated driver.

Each class has the module and the name of the real one, and its attributes: those that say whether
the object owns its stream are all that arenapy may go by. Some own it, and destroy it when they
end; some only have the handle, and it is destroyed under them.

Read from torch 2.11, CuPy 14.2, numba-cuda 0.30, cuda.core 1.2, RMM 26.10.
"""

import ctypes
import weakref

from simulated_gpu import NON_BLOCKING


def named(module, name, *bases, **body):
    """A class that says that it is a library's."""
    return type(name, bases, {"__module__": module, "__qualname__": name, **body})


class Protocol:
    """`handle_` is the number."""

    def __init__(self, handle):
        self.handle_ = handle

    def __cuda_stream__(self):
        return 0, self.handle_


class Property(Protocol):
    """The protocol as an attribute, which is not called."""

    @property
    def __cuda_stream__(self):
        return 0, self.handle_


# ---- torch: streams of a pool, which are never destroyed ----


class _CudaStreamBase:
    """`stream_id`: odd for one of torch's own; else the handle, which is somebody's."""

    device_index = 0

    def __init__(self, stream_id, handle):
        self.stream_id, self.cuda_stream = stream_id, handle

    def __cuda_stream__(self):
        return 0, self.cuda_stream


TorchStream = named("torch.cuda.streams", "Stream", _CudaStreamBase)
TorchExternalStream = named("torch.cuda.streams", "ExternalStream", TorchStream)


class _TorchBase:
    """What ``torch.accelerator`` gives, of any device."""

    def __init__(self, stream_id, handle, kind="cuda"):
        self.stream_id, self.native_handle, self.device_index = stream_id, handle, 0
        self.device = type("device", (), {"type": kind, "index": 0})()


TorchAnyStream = named("torch", "Stream", _TorchBase)
TorchSubclass = named("somebody", "Stream", TorchStream)


# ---- CuPy ----


class _CupyBase:
    def __init__(self, ptr, device_id=0):
        self.ptr, self.device_id = ptr, device_id
        self._graph_host_funcargs = None

    def __cuda_stream__(self):
        return 0, self.ptr


class _CupyOwner(_CupyBase):
    __slots__ = ("driver",)  # the real one has no such attribute

    def __init__(self, driver, ptr):
        super().__init__(ptr)
        self._foreign_stream_ref = None
        self.driver = driver

    def __del__(self):
        if self._foreign_stream_ref is None:
            destroy(self.driver, self.ptr)


CupyStream = named("cupy.cuda.stream", "Stream", _CupyOwner)
CupyExternalStream = named("cupy.cuda.stream", "ExternalStream", _CupyBase)
CupySubclass = named("somebody", "TheirStream", CupyExternalStream)


def cupy_from_external(driver, handle):
    stream = CupyStream.__new__(CupyStream)
    _CupyBase.__init__(stream, handle)
    stream._foreign_stream_ref = Protocol(handle)
    return stream


# ---- numba-cuda ----


class Handle:
    """As ``cuda.bindings.driver.CUstream``."""

    def __init__(self, number):
        self.number = number

    def __int__(self):
        return self.number


class _Numba:
    def __init__(self, handle, finalizer=None, external=False):
        self.handle, self.external = handle, external
        if finalizer is not None:
            weakref.finalize(self, finalizer)

    def __cuda_stream__(self):
        return 0, int(self.handle)


class _OldNumba:
    """From before there was the protocol; `handle` is a ctypes pointer."""

    def __init__(self, context, handle, finalizer, external=False):
        self.context, self.handle, self.external = context, handle, external
        if finalizer is not None:
            weakref.finalize(self, finalizer)


NumbaStream = named("numba.cuda.cudadrv.driver", "Stream", _Numba)
OldNumbaStream = named("numba.cuda.cudadrv.driver", "Stream", _OldNumba)


# ---- cuda.core ----


class CoreBox:
    """A handle that several objects share. The driver's stream ends with the last of them."""

    def __init__(self, handle, owner=None):
        self.handle, self.owner = handle, owner


core_made = weakref.WeakValueDictionary()  # by handle: boxes of streams that cuda.core made


class _Core:
    """Whether it owns its stream it does not say: see `core_own` and `core_from_handle`."""

    def __init__(self, handle):
        self._box = CoreBox(handle)

    @classmethod
    def _init(cls, obj):
        """Another object for a stream that cuda.core made; else it keeps what names the stream."""
        handle = obj.__cuda_stream__()[1]
        stream = cls(handle)
        stream._box = core_made.get(handle) or CoreBox(handle, obj)
        return stream

    def __cuda_stream__(self):
        if self.is_closed:
            raise RuntimeError("Stream has been closed")
        return 0, self._box.handle

    @property
    def handle(self):
        return Handle(0 if self.is_closed else self._box.handle)

    @property
    def is_closed(self):
        return self._box is None

    def close(self):
        self._box = None


class _OldCore:
    """From before it said that it is closed, and shared handles: its handle is 0 then."""

    __init__, close = _Core.__init__, _Core.close

    def __cuda_stream__(self):
        return 0, 0 if self._box is None else self._box.handle


CoreStream = named("cuda.core._stream", "Stream", _Core)
OldCoreStream = named("cuda.core._stream", "Stream", _OldCore)


def core_own(driver, handle, kind=CoreStream):
    stream = kind(handle)
    weakref.finalize(stream._box, destroy, driver, handle)
    if kind is CoreStream:
        core_made[handle] = stream._box
    return stream


# ---- RMM: the object that keeps the stream is hidden ----


class _Rmm(Protocol):
    pass


RmmStream = named("rmm.pylibrmm.stream", "Stream", _Rmm)


def rmm_own(driver, handle):
    stream = RmmStream(handle)
    weakref.finalize(stream, destroy, driver, handle)
    return stream


# ---- all ----


def destroy(driver, handle):
    assert driver.closed or driver.call("cuStreamDestroy", handle) == 0


def finalized(driver, handle):
    return lambda: destroy(driver, handle)


class Opaque:
    """Somebody's own class, which keeps its stream."""

    def __init__(self, driver, handle):
        self.handle_ = handle
        weakref.finalize(self, destroy, driver, handle)

    def __cuda_stream__(self):
        return 0, self.handle_


#: Of a stream that the object keeps alive, and of which arenapy knows that.
KNOWN_OWNERS = {
    "torch": lambda driver, handle: TorchStream(3, handle),  # which nobody destroys
    "torch.Stream": lambda driver, handle: TorchAnyStream(3, handle),
    "CuPy": CupyStream,
    "cuda.core": core_own,
    "numba": lambda driver, handle: NumbaStream(Handle(handle), finalized(driver, handle)),
    "older numba": lambda driver, handle: OldNumbaStream(
        None, ctypes.c_void_p(handle), finalized(driver, handle)
    ),
}
#: The same, of which nobody can know it.
OTHER_OWNERS = {
    "older cuda.core": lambda driver, handle: core_own(driver, handle, OldCoreStream),
    "RMM": rmm_own,
    "somebody's": Opaque,
}
#: Of a stream that somebody else may destroy.
NOT_OWNERS = {
    "integer": lambda driver, handle: handle,
    "protocol": lambda driver, handle: Protocol(handle),
    "property": lambda driver, handle: Property(handle),
    "torch ExternalStream": lambda driver, handle: TorchExternalStream(handle, handle),
    "torch external": lambda driver, handle: TorchStream(handle, handle),
    "torch.Stream external": lambda driver, handle: TorchAnyStream(handle, handle),
    "torch subclass": lambda driver, handle: TorchSubclass(3, handle),
    "CuPy ExternalStream": lambda driver, handle: CupyExternalStream(handle),
    "CuPy subclass": lambda driver, handle: CupySubclass(handle),
    "CuPy from_external": cupy_from_external,
    "numba external": lambda driver, handle: NumbaStream(Handle(handle), external=True),
    "numba from a handle": lambda driver, handle: NumbaStream(Handle(handle)),
    "older numba external": lambda driver, handle: OldNumbaStream(
        None, ctypes.c_void_p(handle), None, external=True
    ),
    "cuda.core from_handle": lambda driver, handle: CoreStream(handle),
    "older cuda.core from_handle": lambda driver, handle: OldCoreStream(handle),
    "RMM of another": lambda driver, handle: RmmStream(handle),
}


def new_handle(driver, flags=NON_BLOCKING):
    return driver.got("cuStreamCreate", ctypes.c_void_p, flags)
