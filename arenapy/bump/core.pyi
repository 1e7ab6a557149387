from typing import Never, Self, final

from arenapy.allocator.allocator_core import AllocatorCore

@final
class Arena(AllocatorCore): ...  # type: ignore[misc]

@final
class BumpCore(Arena): ...  # type: ignore[misc]

@final
class Mark:
    # Nothing can be passed: Bump.mark() makes Marks, Bump.scope() Scopes.
    def __new__(cls, not_called: Never, /) -> Self: ...
