from typing import Any, Never, Protocol, Self, final

import numpy as np

from arenapy.buffer.buffer import Buffer
from arenapy.linux.vm import Descriptor
from arenapy.memory.region import Region

# The object that multiprocessing sends in place of a file descriptor.
class _Handle(Protocol):
    def detach(self) -> int: ...

@final
class ReceivedFile:
    def __new__(cls, not_called: Never, /) -> Self: ...

def install() -> None: ...
def forget_arrived() -> None: ...
def leased_file(buffer: Buffer) -> tuple[Descriptor, int, Region] | None: ...
def reduce_buffer(buffer: Buffer) -> tuple[Any, ...]: ...
def bytes_of(array: np.ndarray[Any, Any]) -> tuple[Buffer, int] | None: ...
def reduce_array(array: np.ndarray[Any, Any]) -> tuple[Any, ...]: ...
def reduce_region(region: Region) -> tuple[Any, ...]: ...
def receive_buffer(
    handle: _Handle | Descriptor,
    identity: tuple[int, int] | None,
    offset: int,
    nbytes: int,
    page_size: int,
    readonly: bool,
    layout: tuple[Any, Any] | None,
) -> Buffer: ...
def receive_array(
    received: tuple[Any, ...],
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    at: int,
    dtype: np.dtype[Any],
    writeable: bool,
) -> np.ndarray[Any, Any]: ...
def receive_region(
    handle: _Handle | Descriptor,
    identity: tuple[int, int],
    offset: int,
    nbytes: int,
    page_size: int,
) -> Region: ...
def leased_window(region: Region, offset: int, nbytes: int) -> Region: ...
