from typing import final

from arenapy.cuda.stream import Stream
from arenapy.medium import Medium
from arenapy.pool import Pool
from arenapy.region import Backing, Region

@final
class LaneBacking(Backing): ...

@final
class LaneSource:
    def __init__(self, pool: Pool, medium: Medium, stream: Stream) -> None: ...
    @property
    def stream(self) -> Stream: ...
    @property
    def medium(self) -> Medium: ...
    def region(self, nbytes: int) -> Region: ...
