"""The exceptions that arenapy raises beside Python's own."""

__all__ = ["OutOfMemory"]


class OutOfMemory(MemoryError):
    """A request that the memory behind it cannot serve.

    The message names what was asked, what there was, and which option to turn.
    """
