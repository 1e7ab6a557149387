from typing import final

from arenapy.buffer.block import Keeper

@final
class RegionSet(Keeper): ...  # type: ignore[misc]
