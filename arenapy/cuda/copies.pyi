from collections.abc import Iterable
from typing import Any, Never, Self, final

from arenapy.cuda.ordering import Ordering

@final
class Side:
    def __new__(cls, not_called: Never, /) -> Self: ...

@final
class CudaMemory(Ordering): ...  # type: ignore[misc]

def copy_batch(pairs: Iterable[tuple[Any, Any]], stream: object = None) -> None: ...
