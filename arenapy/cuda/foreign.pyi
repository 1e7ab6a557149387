from typing import Never, final

@final
class Foreign:
    def __init__(self, not_called: Never, /) -> None: ...

@final
class Taken: ...
