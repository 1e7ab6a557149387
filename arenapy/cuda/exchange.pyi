from typing import Any, Protocol

from typing_extensions import CapsuleType

from arenapy.buffer import View

class CudaArray(Protocol):
    @property
    def __cuda_array_interface__(self) -> dict[str, Any]: ...

class Tensor(Protocol):
    # Also `stream` and, of newer ones, `max_version`.
    def __dlpack__(self) -> CapsuleType: ...
    def __dlpack_device__(self) -> tuple[Any, int]: ...

def asbuffer(obj: CudaArray | Tensor, stream: object = None) -> View: ...
def from_dlpack(obj: Tensor, stream: object = None) -> View: ...
