from collections.abc import Iterator
from typing import Any

from typing_extensions import disjoint_base

from arenapy.stats import BlockInfo

def verify(c: Any) -> None: ...
def listing(c: Any) -> Iterator[BlockInfo]: ...

@disjoint_base
class Listing:
    def __iter__(self) -> Listing: ...
    def __next__(self) -> BlockInfo: ...
