from typing import final

from arenapy.buffer.block import MemoryOwner

@final
class AllocatorCore(MemoryOwner): ...  # type: ignore[misc]
