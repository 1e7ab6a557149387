"""Adapters: allocators that say nothing about themselves, or are a C library, made attackable.

What lives here: how a method is found by its usual names, and how a block's address is. What may
not: what is asked of them, which attack.py decides.
"""

from __future__ import annotations

import contextlib
import ctypes
import inspect
import operator
import os
from collections.abc import Callable
from typing import Any

import numpy as np

__all__ = ["Adapter", "CLibrary", "address_of"]

ALLOCATE = ("alloc", "allocate", "malloc")
FREE = ("free", "release", "deallocate", "dealloc")
FREE_OF_BLOCK = ("release", "free", "close")
SIZE_LIMIT = 1 << 64
ALIGN_NAMES = ("align", "alignment")


def address_of(block: Any) -> int:
    """Where a block starts: an int, ``.address``, ``.ptr``, ``.handle``, or by its buffer.

    Parameters
    ----------
    block : object

    Returns
    -------
    int

    Raises
    ------
    TypeError
        It has none of these.

    Examples
    --------
    >>> from arenapy.testing.adapters import address_of
    >>> address_of(4096)
    4096
    """
    if isinstance(block, int):
        return block
    for name in ("address", "ptr", "handle"):
        found = getattr(block, name, None)
        found = found() if callable(found) else found
        if found is not None and hasattr(found, "__int__"):
            return int(found)
    try:
        return int(np.frombuffer(block, "u1").ctypes.data) if len(block) else 0
    except (TypeError, ValueError, BufferError) as error:
        raise TypeError(
            f"a block of {type(block).__name__} is not an int, and has no .address or buffer "
            f"({error})"
        ) from error


def _method(thing: Any, names: tuple[str, ...]) -> Callable[..., Any] | None:
    """The first of the methods `names` that it has."""
    found = (getattr(thing, name, None) for name in names)
    return next((method for method in found if callable(method)), None)


def _parameters(method: Callable[..., Any]) -> list[str]:
    """The names of what may be passed by position; none known of most functions in C."""
    try:
        parameters = inspect.signature(method).parameters.values()
    except (TypeError, ValueError):
        return []
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [parameter.name for parameter in parameters if parameter.kind in kinds]


def _requires_align(method: Callable[..., Any]) -> bool:
    """True if the second parameter has no default."""
    parameter = list(inspect.signature(method).parameters.values())[1]
    return parameter.default is inspect.Parameter.empty


def _is_null(block: Any) -> bool:
    try:
        return address_of(block) == 0
    except TypeError:  # it does not say
        return False


class Adapter:
    """An allocator by the usual names of its methods.

    ``alloc``, ``allocate`` or ``malloc(nbytes[, align])`` allocates. ``free``, ``release``,
    ``deallocate`` or ``dealloc(block)`` of the allocator gives back, else ``release``, ``free`` or
    ``close()`` of the block, else dropping it. ``mark()`` and ``reset([mark])``, ``remaining`` and
    ``check()`` are used if they are there.

    Parameters
    ----------
    allocator : object

    Raises
    ------
    TypeError
        It has no method to allocate with.

    Notes
    -----
    Thread-safety: as the allocator's.

    Examples
    --------
    >>> import arenapy
    >>> from arenapy.testing.adapters import Adapter
    >>> adapter = Adapter(arenapy.Pool())
    >>> adapter.aligns, adapter.mark is None
    (True, True)
    """

    def __init__(self, allocator: Any) -> None:
        self.allocator = allocator
        method = _method(allocator, ALLOCATE)
        if method is None:
            raise TypeError(
                f"{type(allocator).__name__} has none of the methods {', '.join(ALLOCATE)}"
            )
        self._allocate = method
        self.aligns = any(name in ALIGN_NAMES for name in _parameters(method)[1:2])
        self._wants_align = self.aligns and _requires_align(method)
        self._free = _method(allocator, FREE)
        # deallocate(address, nbytes), as memory resources have it
        self._free_wants_size = self._free is not None and len(_parameters(self._free)) > 1
        self.mark = _method(allocator, ("mark",))
        self.reset = _method(allocator, ("reset",))
        self.check = _method(allocator, ("check",))

    def allocate(self, nbytes: int, align: int | None) -> tuple[Any, int]:
        """(block, its bytes)."""
        if align is None and self._wants_align:
            align = 1
        wanted = (nbytes,) if align is None or not self.aligns else (nbytes, align)
        block = self._allocate(*wanted)
        if block is None or (nbytes and _is_null(block)):
            raise MemoryError(f"{nbytes} bytes were refused")  # as malloc does it
        return block, nbytes

    def free(self, block: tuple[Any, int]) -> None:
        """Give a block back."""
        if self._free is not None:
            self._free(*block) if self._free_wants_size else self._free(block[0])
        elif (method := _method(block[0], FREE_OF_BLOCK)) is not None:
            method()

    def remaining(self) -> int | None:
        """Return the number of free bytes, or None if the allocator does not say."""
        found: Any = getattr(self.allocator, "remaining", None)
        found = found() if callable(found) else found
        try:
            return operator.index(found)
        except TypeError:
            return None


class CLibrary:
    """``malloc``, ``aligned_alloc`` and ``free`` of a C library.

    Parameters
    ----------
    path : str
        A name or path that the dynamic linker finds.

    Raises
    ------
    OSError
        It cannot be loaded, or lacks one of the functions.

    Notes
    -----
    Thread-safety: as the library's; ctypes calls it without the GIL.

    Examples
    --------
    >>> from arenapy.testing.adapters import CLibrary
    >>> libc = CLibrary("libc.so.6")
    >>> block = libc.alloc(100, 64)
    >>> block % 64
    0
    >>> libc.free(block)
    """

    def __init__(self, path: str) -> None:
        if os.path.exists(path) and not os.path.isfile(path):
            raise OSError(f"{path} is not a file; name a shared library")  # dlopen waits at a FIFO
        library = ctypes.CDLL(path)
        self._malloc = self._function(library, path, "malloc", ctypes.c_size_t)
        aligned = (ctypes.c_size_t, ctypes.c_size_t)
        self._aligned_alloc = self._function(library, path, "aligned_alloc", *aligned)
        self._free = self._function(library, path, "free", ctypes.c_void_p)
        self._free.restype = None

    @staticmethod
    def _function(library: ctypes.CDLL, path: str, name: str, *types: Any) -> Any:
        try:
            function = getattr(library, name)
        except AttributeError:
            raise OSError(f"{path} has no function {name}") from None
        function.restype, function.argtypes = ctypes.c_void_p, types
        return function

    def alloc(self, nbytes: int, align: int | None = None) -> int:
        """The address of `nbytes` bytes; of a multiple of `align`, as C11 wants it."""
        if not 0 <= nbytes < SIZE_LIMIT:
            raise ValueError(f"{nbytes} bytes are no size_t, and ctypes would cut it")
        if align is None or align < ctypes.sizeof(ctypes.c_void_p):
            found = self._malloc(nbytes)
        else:
            rounded = -(-nbytes // align) * align
            found = self._aligned_alloc(align, rounded) if rounded < SIZE_LIMIT else None
        if found is None:
            raise MemoryError(f"{nbytes} bytes were refused")
        return int(found)

    def free(self, block: int) -> None:
        """Free it."""
        self._free(block)


@contextlib.contextmanager
def explained(what: str) -> Any:
    """Errors of importing and making what is named on a command line, as ValueError."""
    try:
        yield
    except ValueError:
        raise
    except Exception as error:  # anything may be in the module that is named
        raise ValueError(f"{what}: {type(error).__name__}: {error}") from error
