from typing import final

from arenapy.pool.segments import Segments

@final
class ThreadCaches(Segments): ...  # type: ignore[misc]
