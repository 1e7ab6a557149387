from typing import final

from arenapy.buffer.stream_hooks import Medium

@final
class Batch: ...

@final
class Ordering(Medium): ...  # type: ignore[misc]

def is_stream(one: object) -> bool: ...
