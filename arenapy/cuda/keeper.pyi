from arenapy.allocator import Allocator
from arenapy.block import Keeper

def memory_of(allocator: Allocator) -> tuple[Keeper, bool]: ...
