from typing import Any, final

from arenapy.allocator.allocator import Allocator

__all__ = ["memory_resource"]

def memory_resource(allocator: Allocator) -> Any: ...

@final
class HandedOut: ...
