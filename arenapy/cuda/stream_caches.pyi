from typing import Self, final

from arenapy.buffer.stream_hooks import StreamHooks
from arenapy.cuda.stream_ref import Stream
from arenapy.memory.region import Backing, Region
from arenapy.pool.pool import Pool

@final
class LaneBacking(Backing): ...  # type: ignore[misc]

@final
class LaneSource:
    def __new__(cls, pool: Pool, hooks: StreamHooks, stream: Stream) -> Self: ...
    @property
    def stream(self) -> Stream: ...
    @property
    def hooks(self) -> StreamHooks: ...
    def region(self, nbytes: int) -> Region: ...
