from typing import final

from arenapy.bump.arena import Space

@final
class BumpCore(Space): ...  # type: ignore[misc]
