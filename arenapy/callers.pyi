from typing import final

@final
class Callers:
    def __new__(cls, depth: int) -> Callers: ...
    @property
    def depth(self) -> int: ...
