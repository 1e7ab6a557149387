from typing import final

class Kept: ...

@final
class Stream:
    @property
    def device_id(self) -> int: ...

def described(stream: object) -> tuple[int, int]: ...
