from typing import final

from arenapy.fronts import Fronts

@final
class PoolCore(Fronts): ...  # type: ignore[misc]
