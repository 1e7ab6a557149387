from typing import final

from arenapy.allocator.allocator_core import RegionSet

@final
class Arena(RegionSet): ...  # type: ignore[misc]
