from typing import Literal, Never, NoReturn, Self, SupportsIndex, final

from arenapy.buffer.block import Block, MemoryOwner
from arenapy.buffer.buffer import Buffer
from arenapy.linux.reserved_space import Mapping
from arenapy.linux.vm import Descriptor

@final
class Backing:
    def __new__(cls, not_called: Never, /) -> Self: ...

@final
class Region(MemoryOwner):  # type: ignore[misc]
    # Nothing can be passed: sources make Regions, with from_address.
    def __new__(cls, not_called: Never, /) -> Self: ...
    @classmethod
    def from_address(
        cls,
        address: SupportsIndex,
        nbytes: SupportsIndex,
        *,
        kind: str = "host",
        owner: object = None,
        readonly: bool = False,
        device_id: SupportsIndex = -1,
        host_accessible: bool = True,
        device_accessible: bool = False,
        page_size: SupportsIndex = 4096,
        fork: Literal["inherit", "skip", "closed"] = "inherit",
        fd: SupportsIndex = -1,
        file_offset: SupportsIndex = 0,
        map_address: SupportsIndex = 0,
        map_nbytes: SupportsIndex = 0,
        mapping: Mapping | None = None,
        descriptor: Descriptor | None = None,
    ) -> Region: ...
    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def page_size(self) -> int: ...
    @property
    def fd(self) -> int: ...
    @property
    def file_offset(self) -> int: ...
    @property
    def closed(self) -> bool: ...
    @property
    def huge_fraction(self) -> float: ...
    def buffer(self, offset: SupportsIndex = 0, nbytes: SupportsIndex | None = None) -> Buffer: ...
    def close(self) -> None: ...
    def _make_accessible(self, offset: int, nbytes: int) -> bool: ...
    def __reduce__(self) -> NoReturn: ...

def in_shared_memory(at: int) -> bool: ...
def claim_behind(block: Block) -> tuple[int, bool]: ...
