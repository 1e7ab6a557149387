from typing import final

@final
class Ticket: ...

@final
class Event(Ticket): ...  # type: ignore[misc]

@final
class Graph(Ticket): ...  # type: ignore[misc]
