from typing import Self, final

from arenapy.buffer.stream_hooks import StreamHooks
from arenapy.cuda.stream_ref import StreamRef
from arenapy.memory.region import Backing, Region
from arenapy.pool.pool import Pool

@final
class ChunkBacking(Backing): ...  # type: ignore[misc]

@final
class StreamCacheSource:
    def __new__(cls, pool: Pool, hooks: StreamHooks, stream: StreamRef) -> Self: ...
    @property
    def stream(self) -> StreamRef: ...
    @property
    def hooks(self) -> StreamHooks: ...
    def region(self, nbytes: int) -> Region: ...
