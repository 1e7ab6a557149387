"""DLPack as a C library has it: capsules read, taken over, and made.

`Tensor` is a library's array that its test describes, right or wrong, and that counts what becomes
of it. `Array` is one with the CUDA array interface.
"""

import ctypes
from ctypes import POINTER, Structure, c_int32, c_int64, c_uint8, c_uint16, c_uint32, c_uint64

import numpy as np

OLD, NEW = b"dltensor", b"dltensor_versioned"
CPU = (1, 0)
READ_ONLY, IS_COPIED = 1, 2
INT, UINT, FLOAT, COMPLEX, BOOL = 0, 1, 2, 5, 6


class DLTensor(Structure):
    _fields_ = [
        ("data", c_uint64),
        ("device_type", c_int32),
        ("device_id", c_int32),
        ("ndim", c_int32),
        ("code", c_uint8),
        ("bits", c_uint8),
        ("lanes", c_uint16),
        ("shape", POINTER(c_int64)),
        ("strides", POINTER(c_int64)),
        ("byte_offset", c_uint64),
    ]


# PYFUNCTYPE would hold the GIL; a C consumer on its own thread does not, and neither does this.
Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class Managed(Structure):
    _fields_ = [("tensor", DLTensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


class ManagedVersioned(Structure):
    _fields_ = [
        ("major", c_uint32),
        ("minor", c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", c_uint64),
        ("tensor", DLTensor),
    ]


def _api(name, restype, *argtypes):
    function = getattr(ctypes.PyDLL(None), name)  # one of its own: signatures differ
    function.restype, function.argtypes = restype, argtypes
    return function


capsule_name = _api("PyCapsule_GetName", ctypes.c_char_p, ctypes.py_object)
capsule_pointer = _api("PyCapsule_GetPointer", ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)
rename_capsule = _api("PyCapsule_SetName", ctypes.c_int, ctypes.py_object, ctypes.c_char_p)
USED = {OLD: b"used_dltensor", NEW: b"used_dltensor_versioned"}  # kept alive: capsules point here


class Consumer:
    """Takes a capsule over as a C library does: renames it, and owes it one call of the deleter."""

    def __init__(self, capsule):
        name = capsule_name(capsule)
        self.pointer = capsule_pointer(capsule, name)
        self.managed = (Managed if name == OLD else ManagedVersioned).from_address(self.pointer)
        self.tensor = self.managed.tensor
        rename_capsule(capsule, USED[name])

    @property
    def device(self):
        return self.tensor.device_type, self.tensor.device_id

    @property
    def flags(self):
        return self.managed.flags

    def delete(self):
        Deleter(self.managed.deleter)(self.pointer)


def tensor_of(capsule):
    name = capsule_name(capsule)
    kind = Managed if name == OLD else ManagedVersioned
    return kind.from_address(capsule_pointer(capsule, name)).tensor


# ---- a producer ----

new_capsule = _api(
    "PyCapsule_New", ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p
)
is_capsule = _api("PyCapsule_IsValid", ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)
pointer_in = _api("PyCapsule_GetPointer", ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)
CODES = {"i": INT, "u": UINT, "f": FLOAT, "c": COMPLEX, "b": BOOL}
tensors = {}  # by the address of what a capsule has: alive until the deleter is called


@Deleter
def delete(pointer):
    """A deleter."""
    tensor, _ = tensors[pointer]
    tensor.deleted += 1
    if tensor.on_delete:
        tensor.on_delete()


@ctypes.PYFUNCTYPE(None, ctypes.c_void_p)
def destroy(capsule):
    """A capsule's destructor: who has taken the tensor over has renamed it."""
    if is_capsule is None:
        return  # the interpreter has ended, and this module with it: free-threaded builds wait
    for name in (OLD, NEW):
        if is_capsule(capsule, name):
            delete(pointer_in(capsule, name))


class Tensor:
    """`version` None: the capsule without one. `fields`: what it says falsely, of a DLTensor."""

    def __init__(self, address, shape, dtype="u1", device=(2, 0), version=(1, 0), **fields):
        self.device, self.version, self.flags = device, version, fields.pop("flags", 0)
        self.strides = fields.pop("strides", None)
        self.fields = fields
        self.address, self.shape, self.dtype = address, shape, np.dtype(dtype)
        self.deleted = 0
        self.on_delete = None
        self.asked = []
        self.capsules = 0

    def __dlpack_device__(self):
        return self.device

    def __dlpack__(self, *, stream=None, max_version=None):
        self.asked.append({"stream": stream, "max_version": max_version})
        return self.capsule()

    def capsule(self):
        managed = (ManagedVersioned if self.version else Managed)()
        one = managed.tensor
        one.data, one.ndim = self.address, len(self.shape)
        one.device_type, one.device_id = self.device
        one.code, one.bits, one.lanes = CODES[self.dtype.kind], 8 * self.dtype.itemsize, 1
        one.shape = (c_int64 * 65)(*self.shape)
        if self.strides is not None:
            one.strides = (c_int64 * 65)(*self.strides)
        for name, value in self.fields.items():
            setattr(one, name, value)
        managed.deleter = ctypes.cast(delete, ctypes.c_void_p).value
        if self.version:
            managed.major, managed.minor = self.version
            managed.flags = self.flags
        pointer = ctypes.addressof(managed)
        tensors[pointer] = self, managed
        self.capsules += 1
        return new_capsule(
            pointer, NEW if self.version else OLD, ctypes.cast(destroy, ctypes.c_void_p)
        )


class OldTensor(Tensor):
    """Of a library from before there were versions."""

    def __dlpack__(self, *, stream=None):
        self.asked.append({"stream": stream})
        return self.capsule()


class Array:
    """`fields`: what its interface says besides, or otherwise."""

    def __init__(self, address, shape, typestr="|u1", readonly=False, **fields):
        self.described = {
            "shape": shape,
            "typestr": typestr,
            "data": (address, readonly),
            "version": 3,
            **fields,
        }
        self.on_delete = None

    @property
    def __cuda_array_interface__(self):
        return self.described

    def __del__(self):
        if self.on_delete:
            self.on_delete()


#: By argument of `__dlpack__`: values that it refuses.
NO_PAIRS = [
    5, -1, 2.5, "cpu", b"abc", (), (1,), (1, 0, 0), ("a", "b"), (1, None), (1.0, 0), [], {}, {1: 2},
    object(), Ellipsis, np.float64(1), np.zeros((2, 2)), ((1, 0), (1, 0)),
]  # fmt: skip
NONSENSE = {
    "max_version": NO_PAIRS,
    "dl_device": [*NO_PAIRS, (2, 0), (1, 1), (-1, -1), (1 << 70, 0)],
    "copy": [0, 1, 2.5, "x", "False", b"", (), (True,), [], object(), np.zeros(3), np.int8(1)],
    "stream": [0, 1, -1, 2.5, "x", (), (1, 0), [], object(), np.zeros(3)],
}
