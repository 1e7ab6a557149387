import os
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Literal, Protocol, final, type_check_only

OPERATIONS: Mapping[str, int]

@final
class Recorder:
    def __new__(cls, path: str | os.PathLike[str], kind: str = "", sites: int = 0) -> Recorder: ...
    @property
    def path(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def recording(self) -> bool: ...
    @property
    def lost(self) -> int: ...
    def start(self) -> None: ...
    def add(
        self,
        operation: Literal["alloc", "free", "mark", "reset", "trim", "grow", "keep"],
        address: int,
        nbytes: int = 0,
        stream: int = 0,
    ) -> None: ...
    def flush(self) -> None: ...
    def stop(self) -> None: ...

@type_check_only
class Recordable(Protocol):
    # Record into this from now on; None: no longer. ValueError if recording already.
    def _record(self, recorder: Recorder | None, /) -> None: ...
    # (address, bytes) of what it has from its source.
    def _reserved(self) -> Iterable[tuple[int, int]]: ...

@final
class Recording:
    def __new__(
        cls,
        allocator: Recordable,
        path: str | os.PathLike[str],
        sites: int = 0,
        kind: str | None = None,
    ) -> Recording: ...
    def __enter__(self) -> Recorder: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...
