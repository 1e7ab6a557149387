from typing import final

from arenapy.pool.thread_cache import ThreadCaches

@final
class PoolCore(ThreadCaches): ...  # type: ignore[misc]
