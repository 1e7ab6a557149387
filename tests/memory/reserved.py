"""A reservation's memory, for its tests: written and read by address, judged by the kernel."""

import ctypes
import os

import pytest
from kernel_view import faults_of, resident, smaps

from arenapy.linux import vm
from arenapy.memory.sources import Host, Shared

MIB = 1 << 20
PAGE = vm.PAGE_SIZE
SIZE = 64 * MIB


#: For tests of what both do.
both = pytest.mark.parametrize("source", [Host, Shared])


def reserve(nbytes=SIZE, source=Host, **options):
    reservation = source(**options).reserve(nbytes)
    assert reservation is not None
    return reservation


def write(reservation, offset, nbytes, byte=0x5A):
    """Fill a part; gives the number of page faults that took."""

    def fill(address, nbytes):
        ctypes.memset(address, byte, nbytes)

    return faults_of(fill, reservation.region.address + offset, nbytes)


def read(reservation, offset, nbytes):
    return ctypes.string_at(reservation.region.address + offset, nbytes)


def rss(reservation):
    """Bytes of it in memory; of shared memory those that any process keeps there."""
    if reservation.shared:
        return os.fstat(reservation.region.fd).st_blocks * 512
    return resident(reservation.region.address, reservation.nbytes)


def accessible(reservation, offset):
    return smaps(reservation.region.address + offset)["permissions"][:2] == "rw"
