from typing import final

from arenapy.pool.thread_cache import Fronts

@final
class PoolCore(Fronts): ...  # type: ignore[misc]
