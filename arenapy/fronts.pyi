from typing import final

from arenapy.segments import Segments

@final
class Fronts(Segments): ...  # type: ignore[misc]
