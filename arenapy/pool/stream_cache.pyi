from typing import final

from arenapy.buffer.block import MemoryOwner

@final
class StreamCache(MemoryOwner): ...  # type: ignore[misc]

@final
class StreamCaches: ...
