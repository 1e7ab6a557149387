from typing import final

@final
class PoolMemory: ...
