"""What is behind the simulated driver: what its entry points say, handles, and memory."""

import ctypes
import os
import weakref
from bisect import bisect_right
from collections import Counter
from dataclasses import dataclass
from typing import Any

SUCCESS, INVALID_VALUE, OUT_OF_MEMORY, INVALID_HANDLE = 0, 1, 2, 400

PATTERN = 0xA5  # what fresh memory holds
PAGE, GRANULE, RESERVED = 4096, 2 << 20, 64 << 30
PROT_NONE, PROT_READ_WRITE, MADV_DONTNEED = 0, 3, 4
MAP_PRIVATE_ANONYMOUS_NORESERVE = 0x02 | 0x20 | 0x4000
MAP_FIXED, MAP_SHARED_FIXED = 0x10, 0x01 | 0x10

libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
libc.mprotect.argtypes = libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def put(address, kind, value):
    """What a pointer argument is to receive."""
    kind.from_address(address).value = value


class Refused(Exception):
    """A call that fails with `result`; `misuse`, if any, goes to `errors`."""

    def __init__(self, result, misuse=""):
        super().__init__(result, misuse)
        self.result, self.misuse = result, misuse


class Handles:
    """Those of one kind. The one that was freed last comes back first, as with malloc."""

    def __init__(self, kind, base, result=INVALID_HANDLE):
        self.kind, self.base, self.result = kind, base, result
        self.things, self.free = {}, []

    def add(self, thing):
        handle = self.free.pop() if self.free else self.base + 16 * len(self.things)
        self.things[handle] = thing
        return handle

    def get(self, handle):
        if handle not in self.things:
            raise Refused(self.result, f"there is no {self.kind} {handle or 0:#x} (any more)")
        return self.things[handle]

    def remove(self, handle):
        thing = self.get(handle)
        del self.things[handle]
        self.free.append(handle)
        return thing


@dataclass(eq=False)
class Range:
    start: int
    nbytes: int
    device: int
    kind: str  # "device", "managed", "pool" or "registered"
    pool: Any = None
    ready: bool = True  # a pool's is not until its allocation has run
    freed_at: int | None = None  # the number of the call that frees it
    dead: bool = False
    access: frozenset[int] | None = None  # devices, of a mapping; None: it is none

    @property
    def end(self):
        return self.start + self.nbytes


@dataclass(eq=False)
class Allocation:
    """Memory of cuMemCreate, which is there while somebody has its handle or has mapped it."""

    nbytes: int
    device: int
    held: int = 1  # by handles
    mapped: bool = False
    exportable: bool = False
    file: int = -1  # the memory, once it was exported
    imported: bool = False  # it is another process's, or counted already in this one


@dataclass(eq=False)
class Reserved:
    """Addresses of cuMemAddressReserve."""

    start: int
    nbytes: int
    mappings: dict[int, tuple[Allocation, frozenset[int]]]  # by address, with who has access

    @property
    def end(self):
        return self.start + self.nbytes

    def mapped(self, address):
        """Where the mapping that has an address begins; None: nothing is mapped there."""
        for start, (one, _) in self.mappings.items():
            if start <= address < start + one.nbytes:
                return start
        return None

    def run(self, address):
        """What is mapped from there on, as if it were one piece of memory; or None."""
        first = self.mapped(address)
        if first is None:
            return None
        one, access = self.mappings[first]
        end = first + one.nbytes
        while end in self.mappings and self.mappings[end][1] == access:
            end += self.mappings[end][0].nbytes
        return Range(first, end - first, one.device, "device", ready=bool(access), access=access)


class Memory:
    """Addresses that are given out once; what is freed may not be touched, not by the host either.

    One reservation holds all of it, so that freed addresses are known as such.
    """

    def __init__(self, sizes):
        self.sizes = sizes
        self.others = [size // 2 for size in sizes]  # what other processes hold of each device
        self.used = Counter()
        self.ranges, self.starts = [], []  # all there ever were, by address
        self.registered = {}
        self.reserved = {}  # by address
        self.fresh = ctypes.memset  # what is done to new memory; None: it takes no pages of ours
        self.base = self.next = 0
        self.unmap = lambda: None
        weakref.finalize(self, unmap_all, self.reserved)

    def close(self):
        self.unmap()
        unmap_all(self.reserved)

    def left(self, device):
        return self.sizes[device] - self.others[device] - self.used[device]

    def take(self, device, nbytes):
        if nbytes > self.left(device):
            raise Refused(OUT_OF_MEMORY)
        self.used[device] += nbytes

    def new(self, nbytes, device, kind, pool=None):
        """Small ones are aligned to 512 bytes and no more, others to 2 MiB, as the driver's are."""
        if not self.next:
            flags = MAP_PRIVATE_ANONYMOUS_NORESERVE
            base = libc.mmap(None, RESERVED, PROT_NONE, flags, -1, 0)
            assert base % PAGE == 0, "no address space"
            self.unmap = weakref.finalize(self, libc.munmap, base, RESERVED)
            self.base = base
            self.next = -(-base // GRANULE) * GRANULE
        start = self.next + (512 if nbytes % GRANULE else 0)
        assert not libc.mprotect(self.next, start + nbytes - self.next, PROT_READ_WRITE)
        if self.fresh:
            self.fresh(start, PATTERN, nbytes)
        self.next = (start + nbytes + PAGE) // GRANULE * GRANULE + GRANULE
        one = Range(start, nbytes, device, kind, pool)
        self.ranges.append(one)
        self.starts.append(start)
        return one

    def release(self, one):
        one.dead = True
        first = one.start // PAGE * PAGE
        libc.madvise(first, one.end - first, MADV_DONTNEED)
        libc.mprotect(first, one.end - first, PROT_NONE)

    def find(self, address):
        """The range with that address, which may have been freed; None: not the driver's."""
        for one in self.registered.values():
            if one.start <= address < one.end:
                return one
        for space in self.reserved.values():
            if space.start <= address < space.end:
                return space.run(address)
        i = bisect_right(self.starts, address)
        return self.ranges[i - 1] if i and address < self.ranges[i - 1].end else None

    def is_host(self, address):
        """Whether it is ordinary memory of the host."""
        inside = self.base <= address < self.base + RESERVED if self.base else False
        inside = inside or any(
            space.start <= address < space.end for space in self.reserved.values()
        )
        if inside and not self.find(address):
            raise Refused(INVALID_VALUE, f"{address:#x} is between allocations")
        return not self.find(address)

    def at(self, address):
        """The range of the driver's own that starts there."""
        one = self.find(address)
        if one is None or one.kind == "registered" or one.access is not None:
            return None
        return one if one.start == address else None

    # ---- addresses first, memory later ----

    def reserve(self, nbytes, align):
        flags = MAP_PRIVATE_ANONYMOUS_NORESERVE
        base = libc.mmap(None, nbytes + align, PROT_NONE, flags, -1, 0)
        if base % PAGE:
            raise Refused(OUT_OF_MEMORY)
        start = -(-base // align) * align
        libc.munmap(start + nbytes, base + align - start)
        self.reserved[start] = Reserved(start, nbytes, {})
        return start

    def space(self, address, nbytes):
        """The reservation that has this part."""
        for one in self.reserved.values():
            if one.start <= address and address + nbytes <= one.end:
                return one
        raise Refused(INVALID_VALUE, f"{nbytes} bytes from {address:#x} are not reserved")

    def map(self, address, one):
        if one.file >= 0:
            self.lay(address, one)
        else:
            libc.mprotect(address, one.nbytes, PROT_READ_WRITE)
            if self.fresh:
                self.fresh(address, PATTERN, one.nbytes)
            libc.mprotect(address, one.nbytes, PROT_NONE)
        self.space(address, one.nbytes).mappings[address] = one, frozenset()
        one.mapped = True

    def lay(self, address, one, access=PROT_NONE):
        """Map the file of an allocation there."""
        assert libc.mmap(address, one.nbytes, access, MAP_SHARED_FIXED, one.file, 0) == address

    def export(self, address):
        """A new descriptor of the memory at an address, which from now on is a file."""
        one, access = self.space(address, 1).mappings[address]
        if one.file < 0:
            one.file = os.memfd_create("simulated device")
            os.ftruncate(one.file, one.nbytes)
            os.pwrite(one.file, ctypes.string_at(address, one.nbytes), 0)
            self.lay(address, one, PROT_READ_WRITE if access else PROT_NONE)
        return os.dup(one.file)

    def allow(self, address, nbytes, devices):
        space = self.space(address, nbytes)
        at = address
        while at < address + nbytes:
            if at not in space.mappings:
                raise Refused(INVALID_VALUE, f"access to {at:#x}, where no mapping begins")
            one, access = space.mappings[at]
            space.mappings[at] = one, access | devices
            at += one.nbytes
        libc.mprotect(address, nbytes, PROT_READ_WRITE)

    def unmapped(self, address, nbytes):
        space = self.space(address, nbytes)
        if address not in space.mappings or space.mappings[address][0].nbytes != nbytes:
            raise Refused(INVALID_VALUE, f"{nbytes} bytes from {address:#x} are no whole mapping")
        one, _ = space.mappings.pop(address)
        flags = MAP_PRIVATE_ANONYMOUS_NORESERVE | MAP_FIXED
        assert libc.mmap(address, nbytes, PROT_NONE, flags, -1, 0) == address
        one.mapped = False
        self.drop(one)

    def drop(self, one):
        if one.held or one.mapped:
            return
        if not one.imported:
            self.used[one.device] -= one.nbytes
        if one.file >= 0:
            os.close(one.file)
            one.file = -1


def unmap_all(reserved):
    for one in reserved.values():
        libc.munmap(one.start, one.nbytes)
    reserved.clear()


@dataclass(eq=False)
class MemoryPool:
    """Only counts: addresses are not given out again, so that touching what was freed is seen."""

    memory: Memory
    device: int
    threshold: int = 0
    used: int = 0
    reserved: int = 0
    destroyed: bool = False

    def take(self, nbytes):
        more = max(self.used + nbytes - self.reserved, 0)
        self.memory.take(self.device, more)
        self.reserved += more
        self.used += nbytes

    def give(self, nbytes):
        self.used -= nbytes
        if self.destroyed:
            self.trim(0)

    def trim(self, keep):
        less = self.reserved - max(self.used, min(self.reserved, keep))
        self.reserved -= less
        self.memory.used[self.device] -= less
