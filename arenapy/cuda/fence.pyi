from typing import Never, Self, final

@final
class Fence: ...

@final
class EventFence(Fence): ...  # type: ignore[misc]

@final
class GraphFence(Fence): ...  # type: ignore[misc]

@final
class Retained:
    def __new__(cls, not_called: Never, /) -> Self: ...
