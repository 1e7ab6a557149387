from typing import Self, final

from arenapy.cuda.stream import Stream
from arenapy.medium import Medium
from arenapy.pool import Pool
from arenapy.region import Backing, Region

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
