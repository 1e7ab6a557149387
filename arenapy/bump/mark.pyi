from typing import Never, Self, final

@final
class Mark:
    # Nothing can be passed: Bump.mark() makes Marks, Bump.scope() Scopes.
    def __new__(cls, not_called: Never, /) -> Self: ...
