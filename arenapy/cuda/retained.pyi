from typing import Never, Self, final

@final
class Retained:
    def __new__(cls, not_called: Never, /) -> Self: ...
