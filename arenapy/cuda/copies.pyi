from typing import Never, Self, final

from arenapy.cuda.ordering import Ordering

@final
class Side:
    def __new__(cls, not_called: Never, /) -> Self: ...

@final
class CudaMemory(Ordering): ...  # type: ignore[misc]
