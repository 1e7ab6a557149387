"""What the kernel says about this process's memory, for tests of the code that asked for it."""

import contextlib
import ctypes
import os
import resource
from pathlib import Path

import numpy as np

from arenapy import Bump
from arenapy.linux import vm

PAGE = vm.PAGE_SIZE
LIBC = ctypes.CDLL(None)
ENTRY = 8  # bytes of /proc/self/pagemap for each page
PRESENT = 63  # the highest bit of an entry
SANITIZED = "asan" in Path("/proc/self/maps").read_text()  # gcc's library or clang's
#: At most, beside those of a test's memory: the interpreter's and its collector's. A MiB has 256.
#: AddressSanitizer's allocator gives each new object fresh memory.
OWN_FAULTS = 64 if SANITIZED else 16


def write_pages(address, nbytes):
    """Write one byte of each page, in one call of C: the objects of a loop would fault, too."""
    memory = (ctypes.c_char * nbytes).from_address(address)
    np.frombuffer(memory, "u1")[::PAGE] = ord("x")


def faults_of(call, *args):
    """Minor faults of this thread during `call(address, nbytes, ...)`, whose code is made warm."""
    warm = ctypes.create_string_buffer(PAGE)
    call(ctypes.addressof(warm), 1024)
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    call(*args)
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before


def smaps(address):
    """The smaps entry of the mapping that has `address`, its words by name; None if there is none.

    Beside the kernel's names: "range" (first and last + 1) and "permissions".
    """
    entry = None
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if words[0].endswith(":"):
            if entry is not None:
                entry[words[0].rstrip(":")] = words[1:]
            continue
        if entry is not None:
            break
        start, stop = (int(word, 16) for word in words[0].split("-"))
        if start <= address < stop:
            entry = {"range": (start, stop), "permissions": words[1]}
    return entry


def vm_flags(address):
    """The VmFlags of the mapping that has `address`; empty if there is none."""
    entry = smaps(address)
    return set(entry["VmFlags"]) if entry else set()


def resident(address, nbytes):
    """Bytes of this range that are in memory, by whole pages.

    Not by mapping, as smaps tells them: the kernel merges a mapping with one beside it.
    """
    with open("/proc/self/pagemap", "rb", buffering=0) as pages:
        pages.seek(address // PAGE * ENTRY)
        entries = pages.read(-(-nbytes // PAGE) * ENTRY)
    return int((np.frombuffer(entries, "<u8") >> PRESENT).sum()) * PAGE


def is_mapped(address):
    """By a call that maps nothing itself: to read smaps takes memory, perhaps just there."""
    page = address // PAGE * PAGE
    residency = ctypes.create_string_buffer(1)
    return LIBC.mincore(ctypes.c_void_p(page), ctypes.c_size_t(PAGE), residency) == 0


def numa_map(address):
    """The line of numa_maps that begins at `address`; None in a kernel without NUMA."""
    path = Path("/proc/self/numa_maps")
    if not path.exists():
        return None
    lines = path.read_text().splitlines()
    return next(line for line in lines if line.startswith(f"{address:x} "))


@contextlib.contextmanager
def nothing_leaks(monkeypatch):
    """What is mapped inside is unmapped at the end, and no file descriptor stays open."""
    mapped = []
    real = vm.map_memory

    def map_memory(nbytes, **options):
        mapping = real(nbytes, **options)
        mapped.append((mapping.address, mapping.map_address, mapping.map_nbytes))
        return mapping

    fds = sorted(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(vm, "map_memory", map_memory)
    yield
    if SANITIZED:
        mapped.clear()  # a sanitizer's allocator maps its own there at once
    for address, first, nbytes in mapped:
        assert not any(is_mapped(at) for at in (first, address, first + nbytes - 1))
    assert sorted(os.listdir("/proc/self/fd")) == fds


def closed_in_child(source):
    """Whether a forked child finds an allocator over the source's memory closed."""
    arena = Bump(100, source=source)
    child = os.fork()
    if not child:
        try:
            arena.alloc(1)
        except ValueError:
            os._exit(1)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, 1)
    return bool(status)
