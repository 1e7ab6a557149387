from typing import Any, Never, Protocol, Self, final

from typing_extensions import CapsuleType

from arenapy.buffer.buffer import View

@final
class Exported: ...

@final
class Foreign:
    def __new__(cls, not_called: Never, /) -> Self: ...

@final
class Taken: ...

class _CudaArray(Protocol):
    @property
    def __cuda_array_interface__(self) -> dict[str, Any]: ...

class _Tensor(Protocol):
    # Also `stream` and, of newer ones, `max_version`.
    def __dlpack__(self) -> CapsuleType: ...
    def __dlpack_device__(self) -> tuple[Any, int]: ...

def asbuffer(obj: _CudaArray | _Tensor, stream: object = None) -> View: ...
def from_dlpack(obj: _Tensor, stream: object = None) -> View: ...
