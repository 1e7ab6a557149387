from types import TracebackType
from typing import Never, Self, final

from arenapy.bump import Bump

@final
class Mark:
    # Nothing can be passed: Bump.mark() makes Marks, Bump.scope() Scopes.
    def __new__(cls, not_called: Never, /) -> Self: ...

@final
class Scope:
    def __new__(cls, not_called: Never, /) -> Self: ...
    @property
    def arena(self) -> Bump: ...
    def __enter__(self) -> Bump: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...
