from collections.abc import Iterator
from typing import Any

from typing_extensions import disjoint_base

from arenapy.stats import BlockInfo, PoolStats

SIZE_CLASSES: tuple[int | None, ...]
STATES: tuple[str, ...]

def verify(c: Any) -> None: ...
def stats_of(core: Any) -> PoolStats: ...
def listing(c: Any) -> Iterator[BlockInfo]: ...

@disjoint_base
class Listing:
    def __iter__(self) -> Listing: ...
    def __next__(self) -> BlockInfo: ...
