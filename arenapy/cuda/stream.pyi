from typing import final

from typing_extensions import disjoint_base

@final
class Stream:
    @property
    def device_id(self) -> int: ...

@disjoint_base
class Ticket: ...

@final
class Event(Ticket): ...

@final
class Graph(Ticket): ...
