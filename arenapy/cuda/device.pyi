from dataclasses import dataclass
from typing import SupportsIndex

@dataclass(frozen=True, slots=True)
class DeviceMemory:
    device_id: int
    name: str
    free_bytes: int
    total_bytes: int

def memory_info(device_id: SupportsIndex = 0) -> DeviceMemory: ...
def device_heap_limit(nbytes: SupportsIndex | None = None, device_id: SupportsIndex = 0) -> int: ...
def devices() -> list[DeviceMemory]: ...
