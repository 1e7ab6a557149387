"""What the system refused, told from what a signal's handler raised.

A handler runs between any two bytecodes, so also amid a ``try``. `TimeoutError`, which time limits
raise, is an `OSError`; and what the system says has a number.
"""

from types import TracebackType

__all__ = ["IGNORED", "is_of_system"]


def is_of_system(error: BaseException) -> bool:
    """True if the system said so; False if it is to go on to whoever waits for it."""
    return (
        isinstance(error, OSError)
        and error.errno is not None
        and not isinstance(error, TimeoutError)  # no call of ours has a time limit
    )


class _Ignored:
    """A context that ends without the error if it is the system's."""

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> bool:
        return error is not None and is_of_system(error)


IGNORED = _Ignored()
