"""For PyInstaller: where arenapy's hook is (the entry point ``pyinstaller40`` names this)."""

import os

__all__ = ["hook_dirs"]


def hook_dirs() -> list[str]:
    """The folder of the hook. No Python name, or setuptools and pkgutil take it for a package."""
    return [os.path.join(os.path.dirname(__file__), "pyinstaller-hooks")]
