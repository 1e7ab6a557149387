"""What an operation of `fault_operations` is made of."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

MIB = 1 << 20
OPERATIONS = {}


def nothing():
    return None


@dataclass
class Act:
    """Something that calls the system."""

    act: Callable[[], Any]
    #: Checks what it acts on and gives what is the same after a call that raised.
    view: Callable[[], Any] = nothing
    #: Whether what Python code of ours calls is to fail too: many files below /proc are read.
    python: bool = False
    #: Makes sure that what came back is what was asked for.
    good: Callable[[Any], Any] = lambda result: None
    #: Called at the end, before everything is dropped.
    end: Callable[[], Any] = nothing


def operation(name):
    def add(function):
        assert name not in OPERATIONS
        OPERATIONS[name] = function
        return function

    return add


def made(make, directory):
    """The Act that an operation makes; one that needs a directory says so."""
    return make(directory) if inspect.signature(make).parameters else make()


def seen(allocator):
    """What an allocator says of itself, after its own check."""
    from arenapy import Bump

    allocator.check()
    stats = allocator.stats()
    if isinstance(allocator, Bump):  # its tables may have grown
        stats = replace(stats, metadata_bytes=0)
    return stats, [(region.address, region.nbytes) for region in allocator.regions]
