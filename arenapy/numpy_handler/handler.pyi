from typing import Any, final

from numpy.typing import NDArray

from arenapy.buffer.buffer import Buffer
from arenapy.memory.region import Region
from arenapy.pool.pool import Pool

@final
class Counts:
    def as_dict(self) -> dict[str, int]: ...

def make_handler(pool: Pool, fallback: bool) -> tuple[object, Counts]: ...
def handler_block(array: NDArray[Any]) -> tuple[Pool | None, Region, int, int] | None: ...
def buffer_block(buffer: Buffer) -> tuple[Any, Region, int, int] | None: ...
