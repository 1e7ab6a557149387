from typing import final

from arenapy.regions import RegionSet

@final
class Space(RegionSet): ...  # type: ignore[misc]
