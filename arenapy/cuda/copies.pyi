from typing import Never, final

from arenapy.cuda.ordering import Ordering

@final
class Side:
    def __init__(self, not_called: Never, /) -> None: ...

@final
class CudaMemory(Ordering): ...
