from typing import final

from arenapy.pool.segments import Segments

@final
class Fronts(Segments): ...  # type: ignore[misc]
