from typing import final

from arenapy.medium import Medium

@final
class Batch: ...

@final
class Ordering(Medium): ...  # type: ignore[misc]

def is_stream(one: object) -> bool: ...
