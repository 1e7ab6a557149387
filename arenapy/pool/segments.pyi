from typing import final

from arenapy.pool.page_heap import Pages

@final
class Segments(Pages): ...  # type: ignore[misc]
