from typing import final

@final
class Many:
    def __new__(cls, n: int) -> Many: ...
