from typing import final

from arenapy.slab.slots import Items

@final
class SlabCore(Items): ...  # type: ignore[misc]
