from typing import final

from arenapy.buffer import Keeper

@final
class BumpCore(Keeper): ...
