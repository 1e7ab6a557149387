from typing import final

CONTROL: tuple[bytes, bytes]
TABLE: bytes

@final
class CallStacks:
    def __new__(cls, depth: int) -> CallStacks: ...
    @property
    def depth(self) -> int: ...
