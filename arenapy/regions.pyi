from typing import final

from arenapy.block import Block, Keeper

@final
class RegionSet(Keeper): ...  # type: ignore[misc]

def claim_behind(block: Block) -> int: ...
