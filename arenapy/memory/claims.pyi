from types import TracebackType
from typing import Any, Never, Self, final

WITHIN: int

@final
class Claim:
    def __new__(cls, not_called: Never, /) -> Self: ...
    @property
    def number(self) -> int: ...
    @property
    def view(self) -> Any: ...
    @property
    def shared(self) -> bool: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
        /,
    ) -> None: ...

def claim(
    ranges: list[tuple[int, int, int, int, bool]],
    label: str,
    *,
    view: object = None,
    anyway: bool = False,
    shared: bool = False,
) -> Claim: ...
def in_file(start: int, end: int) -> bool: ...
