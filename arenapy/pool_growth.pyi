from collections.abc import Callable

from typing_extensions import disjoint_base

from arenapy.allocator import Allocator

@disjoint_base
class PoolGrowth(Allocator):
    @property
    def max_bytes(self) -> int | None: ...
    @property
    def on_oom(self) -> Callable[[int], object] | None: ...
    def full(self, n: int, why: str) -> str: ...
