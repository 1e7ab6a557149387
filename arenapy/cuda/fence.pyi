from typing import final

@final
class Fence: ...

@final
class EventFence(Fence): ...  # type: ignore[misc]

@final
class GraphFence(Fence): ...  # type: ignore[misc]
