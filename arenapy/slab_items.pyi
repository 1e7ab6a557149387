from typing_extensions import disjoint_base

from arenapy.regions import RegionSet

@disjoint_base
class Items(RegionSet): ...
