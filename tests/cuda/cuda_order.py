"""Streams of the simulated driver, and what runs on them in the order that shows most.

Nothing that a GPU could leave undone runs before a test says so, and then (`backwards`) what was
given last runs first, as far as it may: what does not wait for what it needs is seen.
"""

import ctypes

import pytest
from cuda_machine import NON_BLOCKING
from helpers import peek, poke

from arenapy import Pool, cuda

MIB = 1 << 20
N = 4096


def stream(one, flags=NON_BLOCKING):
    return one.got("cuStreamCreate", ctypes.c_void_p, flags)


def backwards(one):
    while one.step(-1):
        pass


def write(one, on, block, byte):
    """A kernel."""
    address, nbytes = block.address, block.nbytes
    one.launch(on, lambda: poke(address, nbytes, byte), [(address, nbytes)])


def reads(one, on, address, nbytes):
    """A kernel; the list is filled when it runs."""
    seen = []
    one.launch(on, lambda: seen.append(peek(address, nbytes)), [(address, nbytes)])
    return seen


SOURCES = {
    "device": (cuda.Device, (2, 0)),
    "pool": (cuda.DriverPool, (2, 0)),
    "pinned": (lambda: cuda.Pinned(huge_pages=None), (1, 0)),
    "managed": (cuda.Managed, (13, 0)),
}
EACH = pytest.mark.parametrize("source", SOURCES)


def pool_of(source, stream=None):
    """Of a stream, if the memory can belong to one."""
    own = stream if source in ("device", "pool") else None
    return Pool(4 * MIB, SOURCES[source][0](), stream=own)


def pool_stream(pool, block):
    """Its own one, by the number that the CUDA array interface gives."""
    return pool.alloc(1).__cuda_array_interface__["stream"]
