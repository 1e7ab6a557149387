from collections.abc import Callable, Mapping
from typing import Any, Literal, SupportsIndex, TypeVar, final, overload

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from arenapy.buffer.ndarray import _Shape
from arenapy.diagnostics.ledger import Ledger
from arenapy.diagnostics.recorder import Recorder

_DTypeT = TypeVar("_DTypeT", bound=np.dtype[Any])
_ScalarT = TypeVar("_ScalarT", bound=np.generic)
_ShapeT = TypeVar("_ShapeT", bound=tuple[int, ...])

@final
class Allocator:
    @overload
    def empty(
        self, shape: _Shape, dtype: Literal["f8"] = "f8", order: Literal["C", "F"] = "C"
    ) -> NDArray[np.float64]: ...
    @overload
    def empty(
        self,
        shape: _Shape,
        dtype: type[_ScalarT] | np.dtype[_ScalarT],
        order: Literal["C", "F"] = "C",
    ) -> NDArray[_ScalarT]: ...
    @overload
    def empty(
        self, shape: _Shape, dtype: DTypeLike, order: Literal["C", "F"] = "C"
    ) -> NDArray[Any]: ...
    @overload
    def zeros(
        self, shape: _Shape, dtype: Literal["f8"] = "f8", order: Literal["C", "F"] = "C"
    ) -> NDArray[np.float64]: ...
    @overload
    def zeros(
        self,
        shape: _Shape,
        dtype: type[_ScalarT] | np.dtype[_ScalarT],
        order: Literal["C", "F"] = "C",
    ) -> NDArray[_ScalarT]: ...
    @overload
    def zeros(
        self, shape: _Shape, dtype: DTypeLike, order: Literal["C", "F"] = "C"
    ) -> NDArray[Any]: ...
    @overload
    def copy(self, array_like: np.ndarray[_ShapeT, _DTypeT]) -> np.ndarray[_ShapeT, _DTypeT]: ...
    @overload
    def copy(self, array_like: ArrayLike) -> NDArray[Any]: ...
    def struct_of_arrays(
        self, fields: Mapping[str, Any], n: SupportsIndex
    ) -> dict[str, NDArray[Any]]: ...
    def _tally(self) -> tuple[int, int, int]: ...
    def _exchange_peak(self, peak: int | None) -> int: ...
    def _record(self, recorder: Recorder | None, ended: Recorder | None = ...) -> None: ...
    def _ledger(self) -> Ledger | None: ...
    def _reserved(self) -> list[tuple[int, int]]: ...

def live_allocators() -> list[Allocator]: ...
def call_at_end(note: Callable[[Allocator], object]) -> None: ...
def call_at_reset(note: Callable[[Allocator], object]) -> None: ...
def note_reset(allocator: Allocator) -> None: ...
