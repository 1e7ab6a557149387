from typing_extensions import disjoint_base

@disjoint_base
class Counts:
    def as_tuple(self) -> tuple[tuple[int, int, int], tuple[int, int, int]]: ...
