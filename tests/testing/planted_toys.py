"""Three allocators as users write them, each with one bug that matters and habits that do not.

All of them accept requests of negative sizes or hand out one address for two empty blocks. The bug
that matters is that blocks overlap.
"""

import ctypes

LIBC = ctypes.CDLL("libc.so.6")
LIBC.malloc.restype = ctypes.c_void_p
LIBC.malloc.argtypes = [ctypes.c_size_t]
LIBC.free.argtypes = [ctypes.c_void_p]


class Arena:
    """In Python, with a base that is aligned otherwise each time. The end is off by one."""

    def __init__(self):
        self.memory = bytearray(1 << 16)
        self.base = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self.cursor = self.count = 0

    def alloc(self, nbytes):
        if self.cursor + nbytes > len(self.memory):
            raise MemoryError
        start = self.cursor
        self.cursor = start + nbytes - (nbytes > 100)
        return self.base + start


class FreeList:
    """Over malloc by ctypes. It serves a freed block again, and keeps it in its list."""

    def __init__(self):
        self.sizes, self.idle = {}, []

    def malloc(self, nbytes):
        for index, address in enumerate(self.idle):
            if nbytes <= self.sizes[address] * 3 // 2:
                self.idle.insert(0, self.idle.pop(index))
                return address  # and it stays idle
        address = LIBC.malloc((nbytes % (1 << 64)) * 2 if 0 <= nbytes < 1 << 40 else 16)
        self.sizes[address] = nbytes
        return address

    def free(self, address):
        self.idle.append(address)


SLAB = """
cdef class Slab:
    cdef bytearray memory
    cdef size_t base
    cdef list idle
    cdef int top

    def __init__(self):
        self.memory = bytearray(1 << 16)
        self.base = <size_t><char *>self.memory
        self.idle, self.top = [], 0

    def alloc(self, long nbytes):
        if nbytes > 64:
            raise MemoryError
        if self.idle:
            return self.idle[-1] if len(self.idle) > 2 else self.idle.pop()
        if self.top == 1024:
            raise MemoryError
        self.top += 1
        return self.base + 64 * (self.top - 1)

    def free(self, size_t address):
        self.idle.append(address)
"""
