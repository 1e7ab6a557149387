from typing import Any, Never, Self, final

from arenapy.buffer.buffer import Buffer
from arenapy.linux.vm import Descriptor

@final
class LeaseFence:
    def __new__(cls, not_called: Never, /) -> Self: ...

def lend(buffer: Buffer) -> tuple[Descriptor, bytes]: ...
def reduce_buffer(buffer: Buffer) -> tuple[Any, ...]: ...
def receive_handle(
    handle: Any, place: bytes, nbytes: int, readonly: bool, layout: tuple[Any, Any] | None
) -> Buffer: ...
def receive_buffer(
    file: Descriptor, place: bytes, nbytes: int, readonly: bool, layout: tuple[Any, Any] | None
) -> Buffer: ...
