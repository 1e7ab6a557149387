from typing import final

from arenapy.allocator.allocator_core import AllocatorCore

@final
class Arena(AllocatorCore): ...  # type: ignore[misc]

@final
class BumpCore(Arena): ...  # type: ignore[misc]
