"""Where arenapy runs. Standard library only: the build loads this file before anything is built."""

import platform
import sys

MACHINES = ("x86_64", "aarch64")
POINTER_BITS = 64


def require_supported() -> None:
    """Raise ``ImportError`` unless this is 64-bit Linux on x86-64 or aarch64.

    Raises
    ------
    ImportError
        Naming the platform found and the ones that work.
    """
    bits = sys.maxsize.bit_length() + 1
    machine = platform.machine()
    if sys.platform != "linux" or machine not in MACHINES or bits != POINTER_BITS:
        raise ImportError(
            "arenapy runs on 64-bit Linux on x86-64 and aarch64 only, "
            f"and this is {bits}-bit Python on {sys.platform} {machine}."
        )
