from typing import SupportsIndex

from arenapy.buffer.buffer import Buffer

ADVICE: dict[str, int]

def prefetch(buffer: Buffer, device_id: SupportsIndex, stream: object = None) -> None: ...
def advise(buffer: Buffer, advice: str, device_id: SupportsIndex = 0) -> None: ...
