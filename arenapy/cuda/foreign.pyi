from typing import Never, Self, final

@final
class Exported: ...

@final
class Foreign:
    def __new__(cls, not_called: Never, /) -> Self: ...

@final
class Taken: ...
