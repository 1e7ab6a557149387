from typing import final

from arenapy.memory.region import Region

@final
class InPlace:
    def region(self, nbytes: int) -> Region: ...
