from typing_extensions import CapsuleType

from arenapy.buffer.buffer import Buffer

def device(buffer: Buffer) -> tuple[int, int]: ...
def capsule(
    buffer: Buffer,
    stream: object,
    max_version: tuple[int, int] | None,
    dl_device: tuple[int, int] | None,
    copy: bool | None,
) -> CapsuleType: ...
