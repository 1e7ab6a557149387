from typing import final

from arenapy.allocator.allocator_core import RegionSet

@final
class Space(RegionSet): ...  # type: ignore[misc]
