from typing_extensions import disjoint_base

from arenapy.segments import Segments

@disjoint_base
class Fronts(Segments): ...
