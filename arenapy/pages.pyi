from typing import final

from arenapy.regions import RegionSet

@final
class Pages(RegionSet): ...  # type: ignore[misc]
