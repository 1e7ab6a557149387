from typing import final

from typing_extensions import disjoint_base

@disjoint_base
class Ticket: ...

@final
class Event(Ticket): ...

@final
class Graph(Ticket): ...
