from collections.abc import Mapping
from typing import Literal, final

import numpy as np
import numpy.typing as npt
from typing_extensions import disjoint_base

from arenapy.bump import Bump
from arenapy.pool import Pool
from arenapy.recorder import Recorder

TOUCH: Mapping[str, int]

@disjoint_base
class Heap: ...

@final
class MallocHeap(Heap):
    def __init__(self, get: int, put: int) -> None: ...

@final
class BumpHeap(Heap):
    def __init__(self, arena: Bump) -> None: ...

@final
class PoolHeap(Heap):
    def __init__(self, pool: Pool) -> None: ...

def resident(statm: int) -> int: ...
def run(
    heap: Heap,
    slots: npt.NDArray[np.int32],
    sizes: npt.NDArray[np.uint64],
    n_slots: int,
    touch: Literal["nothing", "first", "pages"] = "nothing",
    statm: int = -1,
    recorder: Recorder | None = None,
) -> tuple[float, int, int, int]: ...
