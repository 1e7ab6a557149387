"""Memory of AMD GPUs, through HIP: the sources `Device` and `Pinned`, and copies between the two.

Never run on hardware: the tests replace the HIP runtime by a model of it.

It is written against the public protocol of sources alone, and so also shows how to write a source
for another vendor. What lives here: calls of the runtime, by hip-python. What does not: streams,
which do not order the blocks of a source in Python (docs/ecosystem.md has the rules that follow).

Thread-safety: everything may be called from any thread. The runtime has a current device for each
thread, which a call here changes and restores.
"""

import os
from dataclasses import dataclass
from typing import Any, NamedTuple

from arenapy.buffer.buffer import Buffer, refuse_objects
from arenapy.interop.hip_calls import INSTALL, allocate, call, calls_on
from arenapy.linux import vm
from arenapy.memory.host_request import check_ordinal, checked_size
from arenapy.memory.region import Region

__all__ = ["Device", "HipError", "Pinned", "Unavailable", "copy"]

PORTABLE = 1  # hipHostMallocPortable: pinned for every device, not only for the current one
KIND = "hip"  # of Device's memory; DLPack and the array interfaces know it by this

_user = 0  # the process that called the runtime first


class Unavailable(RuntimeError):
    """HIP is not available: no hip-python, no ROCm or no device. The message says which.

    Never run on hardware: HIP is tested with a model of its runtime alone.

    Examples
    --------
    >>> import arenapy
    >>> from arenapy.interop import hip
    >>> try:
    ...     arena = arenapy.Bump(1 << 20, hip.Device())
    ... except hip.Unavailable:
    ...     arena = arenapy.Bump(1 << 20)
    """


class HipError(RuntimeError):
    """The HIP runtime refused a call.

    Never run on hardware: HIP is tested with a model of its runtime alone.

    Attributes
    ----------
    result : int
        The runtime's ``hipError_t``.
    name : str
        Its name, such as ``"hipErrorInvalidValue"``.

    Examples
    --------
    >>> from arenapy.interop import hip
    >>> try:
    ...     region = hip.Device().region(1 << 20)
    ... except hip.HipError as error:        # an earlier kernel failed, say
    ...     print(error.name)
    """

    def __init__(self, message: str, result: int = 0, name: str = "") -> None:
        super().__init__(message)
        self.result = result
        self.name = name

    def __reduce__(self) -> tuple[type["HipError"], tuple[str, int, str]]:
        return type(self), (self.args[0], self.result, self.name)


# ---- the runtime ----------------------------------------------------------------------------


def _runtime() -> Any:
    """hip-python's module of the runtime."""
    global _user
    if _user not in (0, os.getpid()):
        raise Unavailable(
            "this process was forked from one that had used HIP, so HIP cannot be used here: "
            "start it with multiprocessing's 'spawn'"
        )
    try:
        from hip import hip
    except ImportError as error:
        raise Unavailable(f"HIP needs hip-python, which is not installed: {INSTALL}") from error
    _user = os.getpid()
    return hip


@dataclass(frozen=True, slots=True)
class Device:
    """Memory of an AMD GPU, by ``hipMalloc``.

    Never run on hardware: HIP is tested with a model of its runtime alone.

    Parameters
    ----------
    ordinal : int
        The number of the device, as the HIP runtime counts.

    Raises
    ------
    ValueError, TypeError
        If `ordinal` is invalid.

    Notes
    -----
    Streams do not order the blocks. Synchronize the streams that use a block before you drop it,
    because an allocator may hand its bytes out at once. Synchronize also before you export it.

    The host cannot access the memory. :func:`copy` copies it. `zeros`, `fill`, `copy_from` and
    `copy_to` raise BufferError. A forked child does not have the memory, and allocators over it are
    closed there. Thread-safety: immutable; may be used from any thread.

    Examples
    --------
    >>> import arenapy
    >>> from arenapy.interop import hip
    >>> pool = arenapy.Pool(8 << 20, hip.Device())
    >>> block = pool.alloc(4096, align=256)
    >>> block.kind, block.__dlpack_device__()
    ('hip', (10, 0))
    """

    ordinal: int = 0

    def __post_init__(self) -> None:
        """Refuse a number that no device can have."""
        check_ordinal(self.ordinal)

    def region(self, nbytes: int) -> Region:
        """Allocate `nbytes` bytes of device memory.

        Never run on hardware: HIP is tested with a model of its runtime alone.

        Parameters
        ----------
        nbytes : int
            Size in bytes, more than 0.

        Returns
        -------
        Region

        Raises
        ------
        OutOfMemory
            If the device does not have enough free memory. The message says how much it has.
        Unavailable
            If there is no hip-python, no ROCm or no device.
        HipError
            If the runtime refused something else.
        ValueError, TypeError
            If `nbytes` is not a size, or there is no such device.

        Examples
        --------
        >>> hip.Device().region(1 << 20).kind
        'hip'
        """
        nbytes = checked_size(nbytes)
        hip = _runtime()
        count = call(hip, "hipGetDeviceCount")
        if self.ordinal >= count:
            raise ValueError(
                f"ordinal={self.ordinal} is not a HIP device; there "
                f"{'is' if count == 1 else 'are'} {count}, counted from 0"
            )
        memory = allocate(hip, self.ordinal, nbytes, ("hipMalloc", "hipFree"))
        return Region.from_address(
            memory.address,
            nbytes,
            kind=KIND,
            owner=memory,
            device_id=self.ordinal,
            host_accessible=False,
            device_accessible=True,
            fork="skip",
        )


@dataclass(frozen=True, slots=True)
class Pinned:
    """Host memory that AMD GPUs can access directly, by ``hipHostMalloc``.

    Never run on hardware: HIP is tested with a model of its runtime alone.

    Notes
    -----
    For the processor this is ordinary memory. It is pinned for every device. Streams do not order
    the blocks: synchronize the streams that use a block before you drop it. A forked child does not
    have the memory, and allocators over it are closed there. Thread-safety: immutable; may be used
    from any thread.

    Examples
    --------
    >>> import arenapy
    >>> from arenapy.interop import hip
    >>> staging = arenapy.Slab(4096, count=2, source=hip.Pinned())
    >>> item = staging.alloc()
    >>> item.array(dtype="f4")[:] = 1
    >>> hip.copy(arenapy.Pool(source=hip.Device()).alloc(4096), item)
    """

    def region(self, nbytes: int) -> Region:
        """Allocate `nbytes` bytes of pinned host memory.

        Never run on hardware: HIP is tested with a model of its runtime alone.

        Parameters
        ----------
        nbytes : int
            Size in bytes, more than 0.

        Returns
        -------
        Region

        Raises
        ------
        OutOfMemory, Unavailable, HipError, ValueError, TypeError
            As :meth:`Device.region`.

        Examples
        --------
        >>> hip.Pinned().region(1 << 20).kind
        'hip pinned'
        """
        nbytes = checked_size(nbytes)
        hip = _runtime()
        ordinal = call(hip, "hipGetDevice")
        memory = allocate(hip, ordinal, nbytes, ("hipHostMalloc", "hipHostFree"), PORTABLE)
        return Region.from_address(
            memory.address,
            nbytes,
            kind=f"{KIND} pinned",
            owner=memory,
            device_accessible=True,
            page_size=vm.PAGE_SIZE,
            fork="skip",
        )


# ---- copies ---------------------------------------------------------------------------------


class _Side(NamedTuple):
    """One side of a copy."""

    address: int
    nbytes: int
    ordinal: int  # -1: the host
    keeper: Any  # an export, which keeps the memory in its place


def _side(name: str, thing: Any, written: bool) -> _Side:
    if isinstance(thing, Buffer) and thing.kind == KIND:
        if written and thing.readonly:
            raise BufferError(f"{name}={thing!r} is read-only; give a writable Buffer")
        keeper = thing.view().__dlpack__(max_version=(1, 0))
        return _Side(thing.address, thing.nbytes, thing.device_id, keeper)
    try:
        view = memoryview(thing)
    except TypeError:
        raise TypeError(
            f"{name}, a {type(thing).__name__}, has no buffer; give a Buffer of hip.Device, or "
            "contiguous memory of the host"
        ) from None
    refuse_objects(view.format, thing)
    if written and view.readonly:
        raise BufferError(f"{name}, a {type(thing).__name__}, is read-only; give a writable object")
    if not view.contiguous:
        raise BufferError(f"{name}, a {type(thing).__name__}, is not contiguous; give a copy of it")
    return _Side(vm.address_of(view) if view.nbytes else 0, view.nbytes, -1, view)


def copy(target: Any, source: Any) -> None:
    """Copy the bytes of `source` into `target`. One of them is memory of `Device`.

    Never run on hardware: HIP is tested with a model of its runtime alone.

    The copy is done on return. It comes after the work that the blocking streams of the devices had
    before. Synchronize other streams yourself.

    Parameters
    ----------
    target, source : Buffer, or contiguous buffer of the host
        Both have the same number of bytes. They do not overlap.

    Raises
    ------
    ValueError
        If the sizes differ, both sides are on the host, they overlap, or one of them is closed.
    TypeError
        If a side has no memory that can be copied.
    BufferError
        If `target` is read-only, a side is not contiguous, or it is on a device of another kind.
    Unavailable, HipError
        As :meth:`Device.region`.

    Notes
    -----
    Thread-safety: may be called from any thread.

    Examples
    --------
    >>> import arenapy
    >>> from arenapy.interop import hip
    >>> block = arenapy.Pool(source=hip.Device()).alloc(5)
    >>> hip.copy(block, b"hello")
    >>> back = bytearray(5)
    >>> hip.copy(back, block)
    >>> back
    bytearray(b'hello')
    """
    to, origin = _side("target", target, True), _side("source", source, False)
    if to.nbytes != origin.nbytes:
        raise ValueError(
            f"target has {to.nbytes} bytes and source has {origin.nbytes}; slice the larger one"
        )
    if to.ordinal < 0 and origin.ordinal < 0:
        raise ValueError("target and source are both on the host; use Buffer.copy_from, or NumPy")
    if to.ordinal == origin.ordinal and abs(to.address - origin.address) < to.nbytes:
        raise ValueError("target and source overlap, which HIP cannot copy; copy through the host")
    if not to.nbytes:
        return
    hip = _runtime()
    if min(to.ordinal, origin.ordinal) >= 0 and to.ordinal != origin.ordinal:
        # The copy waits for the other device alone.
        calls_on(hip, to.ordinal, [("hipDeviceSynchronize",)])
    places = ["Host" if one.ordinal < 0 else "Device" for one in (origin, to)]
    direction = getattr(hip.hipMemcpyKind, f"hipMemcpy{places[0]}To{places[1]}")
    calls: list[tuple[Any, ...]] = [("hipMemcpy", to.address, origin.address, to.nbytes, direction)]
    if places == ["Device", "Device"]:  # which the runtime does not wait for
        calls.append(("hipDeviceSynchronize",))
    calls_on(hip, to.ordinal if origin.ordinal < 0 else origin.ordinal, calls)
