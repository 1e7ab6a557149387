from typing import final

from typing_extensions import disjoint_base

from arenapy.medium import Medium

@final
class Batch: ...

@disjoint_base
class Ordering(Medium): ...

def is_stream(one: object) -> bool: ...
