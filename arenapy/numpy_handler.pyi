from typing import Any

from numpy.typing import NDArray

from arenapy.buffer import Buffer
from arenapy.numpy_blocks import Counts
from arenapy.pool import Pool
from arenapy.region import Region

def make_handler(pool: Pool, fallback: bool) -> tuple[object, Counts]: ...
def handler_block(array: NDArray[Any]) -> tuple[Pool | None, Region, int, int] | None: ...
def buffer_block(buffer: Buffer) -> tuple[Any, Region, int, int] | None: ...
