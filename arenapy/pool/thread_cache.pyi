from typing import final

from arenapy.pool.page_heap import Segments

@final
class ThreadCaches(Segments): ...  # type: ignore[misc]
