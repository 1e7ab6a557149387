"""Programs that touch only what they may, as overruns.py has those that do not."""

import ctypes
import os

import overrun
from common import MIB, Regions, owned, program

import arenapy
from arenapy import Bump, Pool, Slab

FIXED_NOREPLACE = 0x100000  # there, or nowhere
libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_size_t
libc.mmap.argtypes = [ctypes.c_size_t, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]


def reused(make):
    """The memory of an allocator that is gone, mapped again by somebody else: his, all of it."""
    allocator = make()
    region = allocator.regions[0]
    address, nbytes = region.address, MIB
    assert region.nbytes >= nbytes
    del allocator, region
    mapped = libc.mmap(address, nbytes, 3, 0x22 | FIXED_NOREPLACE, -1, 0)
    assert mapped == address
    overrun.fill(address, nbytes)


@program
def allowed_bump_memory_mapped_again():
    reused(lambda: Bump(MIB))
    yield 0


@program
def allowed_slab_memory_mapped_again():
    reused(lambda: Slab(1000, count=1100))
    yield 0


@program
def allowed_pool_memory_mapped_again():
    reused(lambda: Pool(MIB, source=Regions(), initial_bytes=MIB))
    yield 0


@program
def allowed_closed_region():
    arena = Bump(MIB)
    region = arena.regions[0]
    owned(arena, 100)
    region.close()
    assert region.closed
    yield 0


@program
def allowed_users_own_memory():
    memory = bytearray(4096)
    arena = Bump(4096, source=arenapy.Existing(memory))
    arena.alloc(100)
    overrun.fill(arena.regions[0].address + 2048, 2048)
    yield 0


@program
def allowed_in_a_forked_child():
    arena = Bump(MIB, source=arenapy.Shared())
    address = arena.regions[0].address
    pid = os.fork()
    if pid == 0:
        overrun.fill(address, 1000)  # what it is sent may lie anywhere
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    yield 0


@program
def allowed_debug_mode():
    arena = Bump(MIB, debug=True)
    block = arena.alloc(100)
    block.release()
    arena.alloc(50)
    arena.reset()
    arena.check()
    yield 0
