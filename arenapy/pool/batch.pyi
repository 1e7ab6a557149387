from typing import final

@final
class BlockBatch:
    def __new__(cls, n: int) -> BlockBatch: ...
