from typing import final

from typing_extensions import disjoint_base

@disjoint_base
class Kept: ...

@final
class Stream:
    @property
    def device_id(self) -> int: ...

def described(stream: object) -> tuple[int, int]: ...
