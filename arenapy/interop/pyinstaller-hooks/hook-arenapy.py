"""The modules and files that a program frozen by PyInstaller needs of arenapy.

PyInstaller reads the imports of Python code. Those of compiled modules, and those by name, are
listed here. A program imports `arenapy.interop` and `arenapy.testing` by itself, where it needs
them.
"""

from PyInstaller.utils.hooks import can_import_module, collect_data_files, collect_submodules

LEFT_OUT = ("arenapy._build", "arenapy.commands", "arenapy.interop", "arenapy.testing")
STANDARD_LIBRARY = [
    *("collections.abc", "contextlib", "contextvars", "copyreg", "dataclasses", "functools"),
    *("gc", "heapq", "importlib", "itertools", "multiprocessing", "operator", "os", "pathlib"),
    *("re", "socket", "struct", "sys", "threading", "time", "types", "typing", "warnings"),
    *("weakref",),
]

hiddenimports = [
    *STANDARD_LIBRARY,
    *collect_submodules("arenapy", filter=lambda name: not name.startswith(LEFT_OUT)),
    *(collect_submodules("cuda") if can_import_module("cuda.bindings") else ()),
]
datas = collect_data_files("arenapy", includes=["cuda/device-code/*", "trace/page.html"])
# Optional: they are in the program if it imports them.
excludedimports = ["bokeh", "matplotlib"]
