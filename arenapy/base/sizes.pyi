from typing import Final

SIZE_CLASSES: Final[tuple[int | None, ...]]
"""Inclusive upper bounds of the 21 size classes in bytes; the last class has none."""

def size_class(nbytes: int) -> int: ...
