from collections.abc import Callable
from typing import Self, final

from arenapy.buffer.block import StreamHooks
from arenapy.memory.region import Backing, Region
from arenapy.memory.sources import Host

@final
class DeviceBacking(Backing): ...  # type: ignore[misc]

@final
class LentBacking(Backing): ...  # type: ignore[misc]

@final
class LastPage: ...

@final
class Addresses: ...

@final
class GrownBacking(Backing): ...  # type: ignore[misc]

@final
class DeviceReservation:
    @property
    def region(self) -> Region: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def page_size(self) -> int: ...
    def commit(self, offset: int, nbytes: int) -> None: ...
    def decommit(self, offset: int, nbytes: int, stream: object) -> None: ...

@final
class PinnedBacking(Backing): ...  # type: ignore[misc]

@final
class PooledBacking(Backing): ...  # type: ignore[misc]

@final
class Leaving: ...

@final
class DriverPoolHandle:
    def __new__(cls, ordinal: int, threshold: int | None) -> Self: ...
    @property
    def ordinal(self) -> int: ...
    def trim_to(self, nbytes: int) -> None: ...

def device_memory(ordinal: int) -> StreamHooks: ...
def device_region(memory: StreamHooks, nbytes: int) -> Region: ...
def reserve_device(memory: StreamHooks, nbytes: int) -> DeviceReservation: ...
def lent_region(
    memory: StreamHooks,
    nbytes: int,
    borrow: Callable[[int], int],
    give_back: Callable[[int, int], object],
    check: Callable[[int], object],
) -> Region: ...
def managed_memory(ordinal: int) -> StreamHooks: ...
def managed_region(memory: StreamHooks, nbytes: int) -> Region: ...
def pinned_memory(mapped: bool) -> StreamHooks: ...
def pinned_region(
    memory: StreamHooks,
    source: Host,
    nbytes: int,
    fraction: float,
    portable: bool,
    mapped: bool,
) -> Region: ...
def pinned_bytes() -> int: ...
def pooled_region(memory: StreamHooks, pool: DriverPoolHandle, nbytes: int) -> Region: ...
