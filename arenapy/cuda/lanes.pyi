from typing import Self, final

from arenapy.buffer.stream_hooks import Medium
from arenapy.cuda.stream import Stream
from arenapy.memory.region import Backing, Region
from arenapy.pool.pool import Pool

@final
class LaneBacking(Backing): ...  # type: ignore[misc]

@final
class LaneSource:
    def __new__(cls, pool: Pool, medium: Medium, stream: Stream) -> Self: ...
    @property
    def stream(self) -> Stream: ...
    @property
    def medium(self) -> Medium: ...
    def region(self, nbytes: int) -> Region: ...
