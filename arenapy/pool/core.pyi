from typing import final

from arenapy.pool.thread_cache import ThreadCaches

@final
class PoolCore(ThreadCaches): ...  # type: ignore[misc]

@final
class BlockBatch:
    def __new__(cls, n: int) -> BlockBatch: ...
