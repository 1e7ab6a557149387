from typing import final

from arenapy.allocator.allocator_core import RegionSet

@final
class Pages(RegionSet): ...  # type: ignore[misc]
