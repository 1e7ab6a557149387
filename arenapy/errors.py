"""The exceptions that arenapy raises beside Python's own."""

__all__ = ["MemoryCorruption", "OutOfMemory"]


class MemoryCorruption(RuntimeError):
    """Memory that nobody has was written to: what debug mode raises.

    The message names the block that the memory was of, the first damaged byte, and where the
    block was allocated and given back.
    """


class OutOfMemory(MemoryError):
    """A request that the memory behind it cannot serve.

    The message names what was asked, what there was, and which option to turn.
    """
