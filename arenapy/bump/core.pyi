from typing import final

from arenapy.bump.arena import Arena

@final
class BumpCore(Arena): ...  # type: ignore[misc]
