"""Where arenapy runs. Standard library only: the build loads this file before anything is built."""

import _thread
import os
import sys

MACHINES = ("x86_64", "aarch64")
POINTER_BITS = 64


def require_supported() -> None:
    """Raise ``ImportError`` unless this is 64-bit Linux on x86-64 or aarch64.

    Raises
    ------
    ImportError
        Naming the platform found and the ones that work; in an interpreter that is not the main
        one, before anything is imported that only one interpreter can have.
    """
    bits = sys.maxsize.bit_length() + 1
    machine = os.uname().machine  # as platform.machine(), whose import takes long
    if sys.platform != "linux" or machine not in MACHINES or bits != POINTER_BITS:
        raise ImportError(
            "arenapy runs on 64-bit Linux on x86-64 and aarch64 only, "
            f"and this is {bits}-bit Python on {sys.platform} {machine}."
        )
    if not in_main_interpreter():
        raise ImportError(
            "arenapy runs in the main interpreter only, as NumPy does, and this is a "
            "subinterpreter: use threads or processes."
        )


def require_numpy() -> None:
    """Raise ``ImportError`` if this NumPy is too old: a compiled module would not say so."""
    import numpy

    version = getattr(numpy, "__version__", "")
    if version.startswith(("0.", "1.")):
        raise ImportError(
            f"arenapy needs NumPy 2.0 or newer, and this is NumPy {version}: "
            f"{sys.executable} -m pip install 'numpy>=2.0'"
        )


def in_main_interpreter() -> bool:
    """True in the interpreter that the process began with."""
    try:
        return bool(_thread._is_main_interpreter())  # type: ignore[attr-defined]
    except AttributeError:  # before 3.12
        import _xxsubinterpreters as interpreters  # type: ignore[import-not-found]

        return bool(interpreters.get_current() == interpreters.get_main())


def explain_source_tree(error: ModuleNotFoundError) -> None:
    """Say what to do if a compiled module is missing because this is the source tree.

    Python searches the current folder first, so that a clone hides the package that is installed.

    Raises
    ------
    ImportError
        In place of `error`; not raised outside of a source tree, or if another package is missing.
    """
    from pathlib import Path  # not at every import

    tree = Path(__file__).parents[1]
    if (error.name or "").startswith("arenapy.") and (tree / "pyproject.toml").exists():
        raise ImportError(
            f"You are importing arenapy from its source tree, {tree}, and it is not built there "
            f"for this Python. If arenapy is installed, start Python in another folder, or with "
            f"the option -P. To use the tree itself: {sys.executable} -m pip install -e {tree}"
        ) from error
