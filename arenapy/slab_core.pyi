from typing import final

from arenapy.slab_items import Items

@final
class SlabCore(Items): ...  # type: ignore[misc]
