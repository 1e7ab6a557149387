from collections.abc import Iterable
from typing import Any

def copy_batch(pairs: Iterable[tuple[Any, Any]], stream: object = None) -> None: ...
