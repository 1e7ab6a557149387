from typing import final

from arenapy.allocator.allocator_core import AllocatorCore

@final
class Items(AllocatorCore): ...  # type: ignore[misc]

@final
class SlabCore(Items): ...  # type: ignore[misc]
