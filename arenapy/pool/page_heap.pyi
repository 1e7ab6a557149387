from typing import final

from arenapy.allocator.allocator_core import AllocatorCore

@final
class Pages(AllocatorCore): ...  # type: ignore[misc]

@final
class Segments(Pages): ...  # type: ignore[misc]
