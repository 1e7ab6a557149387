from typing_extensions import disjoint_base

from arenapy.block import Keeper

@disjoint_base
class RegionSet(Keeper): ...
