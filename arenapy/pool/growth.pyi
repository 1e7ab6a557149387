from collections.abc import Callable
from typing import final

from arenapy.allocator.allocator import Allocator

@final
class PoolGrowth(Allocator):  # type: ignore[misc]
    @property
    def max_bytes(self) -> int | None: ...
    @property
    def on_oom(self) -> Callable[[int], object] | None: ...
    def full(self, n: int, why: str) -> str: ...
