from typing import final

from arenapy.space import Space

@final
class BumpCore(Space): ...  # type: ignore[misc]
