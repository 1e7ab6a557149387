from typing import final

from arenapy.pages import Pages

@final
class Segments(Pages): ...  # type: ignore[misc]
