from collections.abc import Iterable
from typing import Any, Never, Self, SupportsIndex, final

from arenapy.buffer.buffer import Buffer
from arenapy.cuda.ordering import Ordering

@final
class Side:
    def __new__(cls, not_called: Never, /) -> Self: ...

@final
class CudaMemory(Ordering): ...  # type: ignore[misc]

def copy_batch(pairs: Iterable[tuple[Any, Any]], stream: object = None) -> None: ...

ADVICE: dict[str, int]

def prefetch(buffer: Buffer, device_id: SupportsIndex, stream: object = None) -> None: ...
def advise(buffer: Buffer, advice: str, device_id: SupportsIndex = 0) -> None: ...
