from typing import Any, SupportsIndex, TypeAlias

import numpy as np
from numpy.typing import DTypeLike, NDArray

from arenapy.buffer import Buffer, View

_Shape: TypeAlias = SupportsIndex | tuple[SupportsIndex, ...] | list[int]

def describe(dtype: DTypeLike) -> tuple[np.dtype[Any], int, str, bytes | None]: ...
def fit(
    shape: _Shape | None, itemsize: SupportsIndex, nbytes: SupportsIndex, dtype: object
) -> tuple[int, ...]: ...
def view_as_array(view: View) -> NDArray[Any]: ...
def interface(buffer: Buffer) -> dict[str, Any]: ...
