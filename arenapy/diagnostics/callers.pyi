from typing import final

CONTROL: tuple[bytes, bytes]
IMPORTS: str
RUNNER: str
TABLE: bytes

@final
class Callers:
    def __new__(cls, depth: int) -> Callers: ...
    @property
    def depth(self) -> int: ...
