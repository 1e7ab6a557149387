from typing import final

@final
class Counts:
    def as_tuple(self) -> tuple[tuple[int, int, int], tuple[int, int, int]]: ...
