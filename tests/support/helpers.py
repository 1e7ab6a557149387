"""What several test files share: a source whose memory the test owns, and raw eyes and hands.

``peek`` and ``poke`` go through the address and never through the code under test, so looking at
a block neither exports it nor keeps it alive.
"""

import ctypes
import importlib
import mmap
import sys
import threading
from dataclasses import replace

import arenapy

PAGE = mmap.PAGESIZE
MAX_ALIGN = 2 << 20
GIL = getattr(sys, "_is_gil_enabled", lambda: True)()


def peek(address, nbytes):
    """The bytes at `address`, read without an export."""
    return ctypes.string_at(address, nbytes)


def poke(address, nbytes, byte):
    """Write `byte` over `nbytes` bytes at `address`, without an export."""
    ctypes.memset(address, byte, nbytes)


def round_up(value, align):
    return -(-value // align) * align


class Pages:
    """A source of exactly the bytes asked for, `skew` bytes after a multiple of 2 MiB.

    The memory is unmapped when the region is gone, so a byte read too late is a crash and not a
    lucky pass. `fail_on` names the one call (from 1) that raises `OutOfMemory`.
    """

    def __init__(self, skew=0, fail_on=None):
        self.skew = skew
        self.fail_on = fail_on
        self.calls = 0

    def region(self, nbytes):
        self.calls += 1
        if self.calls == self.fail_on:
            raise arenapy.OutOfMemory(f"planned failure of region {self.calls} ({nbytes} bytes)")
        backing = mmap.mmap(-1, nbytes + self.skew + MAX_ALIGN)
        anchor = (ctypes.c_char * len(backing)).from_buffer(backing)
        start = round_up(ctypes.addressof(anchor), MAX_ALIGN) + self.skew
        return arenapy.Region.from_address(start, nbytes, owner=anchor)


def exact(nbytes, **options):
    """A Bump over exactly `nbytes` bytes that start on a 2 MiB boundary."""
    return arenapy.Bump(nbytes, source=Pages(), **options)


def unchanged_view(arena):
    """Everything an arena says about itself; a refused call must leave it equal."""
    return (
        arena.used,
        arena.remaining,
        arena.retired,
        arena.peak,
        arena.capacity,
        replace(arena.stats(), metadata_bytes=0),  # room that was made is kept
        [(region.address, region.nbytes) for region in arena.regions],
    )


pointer_of = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)
name_of = ctypes.PYFUNCTYPE(ctypes.c_char_p, ctypes.py_object)(
    ("PyCapsule_GetName", ctypes.pythonapi)
)


def c_function(name, result, *arguments, gil=False):
    """A C function that other packages cimport."""
    allocator = name.partition("_")[0]
    home = "c_api" if allocator == "pool" else allocator
    module = importlib.import_module(f"arenapy.{allocator}.{home}")
    capsule = module.__pyx_capi__[name]
    kind = ctypes.PYFUNCTYPE if gil else ctypes.CFUNCTYPE
    return kind(result, ctypes.py_object, *arguments)(pointer_of(capsule, name_of(capsule)))


def readonly_buffer(data):
    """A read-only Buffer that holds `data`."""
    keep = ctypes.create_string_buffer(data, len(data))
    region = arenapy.Region.from_address(
        ctypes.addressof(keep), len(data), owner=keep, readonly=True
    )
    return region.buffer()


def in_threads(*tasks):
    """The results of the tasks, each in a thread of its own, all alive at once; or what the first
    of them raised that did."""
    barrier = threading.Barrier(len(tasks))
    results, errors = [None] * len(tasks), []

    def body(index, task):
        barrier.wait()
        try:
            results[index] = task()
        except BaseException as error:
            errors.append(error)
        finally:
            barrier.wait()

    threads = [threading.Thread(target=body, args=pair) for pair in enumerate(tasks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results
