from typing import final

from arenapy.allocator.allocator_core import RegionSet

@final
class Items(RegionSet): ...  # type: ignore[misc]
