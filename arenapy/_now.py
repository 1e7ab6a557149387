"""Imports the allocators, NumPy with them: all that ``import arenapy`` usually imports.

This is a module so that threads which use the package for the first time at once wait for one
another. Python's lock of an import does that, and knows a deadlock.
"""

from arenapy._platform import explain_source_tree, require_numpy, require_supported

__all__: list[str] = []


def _import_all() -> None:
    require_supported()
    try:
        # It has to do what takes no time only in a process without threads, and NumPy starts some.
        import arenapy.base.thread_slot

        require_numpy()
        from arenapy import pickling  # noqa: F401  # it teaches Buffers to be pickled
    except ModuleNotFoundError as error:
        explain_source_tree(error)
        raise
    # Buffer needs it at its first export, where a callback may interrupt it and export, too.
    from arenapy.buffer import dlpack  # noqa: F401

    for name, place in arenapy._NOW.items():
        arenapy._import(name, place)


_import_all()
