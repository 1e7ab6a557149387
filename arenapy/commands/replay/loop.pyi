from collections.abc import Mapping
from typing import Literal, final

import numpy as np
import numpy.typing as npt

from arenapy.bump.bump import Bump
from arenapy.diagnostics.recorder import Recorder
from arenapy.pool.pool import Pool
from arenapy.slab.slab import Slab

TOUCH: Mapping[str, int]

@final
class Heap: ...

@final
class NoHeap(Heap): ...  # type: ignore[misc]

@final
class MallocHeap(Heap):  # type: ignore[misc]
    def __new__(cls, get: int, put: int) -> MallocHeap: ...

@final
class BumpHeap(Heap):  # type: ignore[misc]
    def __new__(cls, arena: Bump) -> BumpHeap: ...

@final
class PoolHeap(Heap):  # type: ignore[misc]
    def __new__(cls, pool: Pool) -> PoolHeap: ...

@final
class SlabHeap(Heap):  # type: ignore[misc]
    def __new__(cls, slab: Slab) -> SlabHeap: ...

def resident(statm: int) -> int: ...
def run(
    heap: Heap,
    slots: npt.NDArray[np.int32],
    sizes: npt.NDArray[np.uint64],
    n_slots: int,
    touch: Literal["nothing", "first", "pages"] = "nothing",
    statm: int = -1,
    recorder: Recorder | None = None,
    cpu: bool = False,
) -> tuple[float, int, int, int]: ...
