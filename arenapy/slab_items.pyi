from typing import final

from arenapy.regions import RegionSet

@final
class Items(RegionSet): ...  # type: ignore[misc]
