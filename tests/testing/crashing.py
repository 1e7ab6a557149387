"""Machines, and makers of allocators, that tests attack in other processes."""

import ctypes
import functools
import os
import subprocess
import threading
from pathlib import Path

from hypothesis import strategies as st

import arenapy
from arenapy.testing import AllocatorMachine, PoolMachine, TwoThreadMachine, operation


class Crashing(AllocatorMachine):
    """Its blocks of more than 5000 bytes are where nobody may write."""

    alignments = st.none()

    def make(self):
        return ctypes.create_string_buffer(1 << 20), [0]

    def allocate(self, state, nbytes, align):
        memory, cursor = state
        if nbytes > 5000:
            return 8
        start = cursor[0]
        if not 0 <= start + nbytes <= len(memory):
            raise MemoryError
        cursor[0] += max(nbytes, 1)
        return ctypes.addressof(memory) + start

    def address(self, block):
        return block


class Inner:
    class Nested(PoolMachine):
        """One that is not at the top of its module."""


class TwoAtAPool(TwoThreadMachine, PoolMachine):
    pass


class Wrong(PoolMachine):
    """Draws what cannot be written down."""

    @operation(what=st.just(b"bytes"))
    def odd(self, what):
        pass


class Overlapping:
    """Every 20th block shares a byte with the one before; blocks are ints."""

    def __init__(self):
        self.memory = ctypes.create_string_buffer(1 << 20)
        self.cursor = self.count = 0

    def malloc(self, nbytes):
        if not 0 <= nbytes < 1 << 20 or self.cursor + nbytes >= 1 << 20:
            raise MemoryError
        self.count += 1
        start = self.cursor - (self.count % 20 == 0)
        self.cursor = start + max(nbytes, 1)
        return ctypes.addressof(self.memory) + start


class Killed(Overlapping):
    """A signal ends the process at the 5th block."""

    def malloc(self, nbytes):
        if self.count == 4:
            os.kill(os.getpid(), 11)
        return super().malloc(nbytes)


class KilledAtTimes(Overlapping):
    """A signal ends the process at a request of 4097 bytes."""

    def malloc(self, nbytes):
        if nbytes == 4097:
            os.kill(os.getpid(), 11)
        return super().malloc(nbytes)


def bump():
    return arenapy.Bump(1 << 16, arenapy.Host(huge_pages=None, prefault=False))


def pool():
    return arenapy.Pool(1 << 20, arenapy.Host(huge_pages=None, prefault=False))


def nothing():
    return 3


@functools.cache
def helper():
    """A process that keeps standard error, and outlives the attack."""
    process = subprocess.Popen(["sleep", "1000"], stdout=subprocess.DEVNULL)
    Path(os.environ["HELPER"]).write_text(str(process.pid))


def bump_with_a_helper():
    helper()
    return bump()


class Working:
    """Has a thread that a process which ends would wait for."""

    def __init__(self):
        threading.Thread(target=threading.Event().wait).start()

    def alloc(self, nbytes):
        return bytearray(nbytes)
