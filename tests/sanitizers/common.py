"""What the programs of overruns.py and allowed.py share."""

import overrun

from arenapy import Host

MIB = 1 << 20
PROGRAMS = {}


def program(function):
    PROGRAMS[function.__name__] = function
    return function


class Regions:
    """A source that reserves nothing."""

    def region(self, nbytes):
        return Host().region(nbytes)


def owned(allocator, nbytes, align=64):
    """A block of C's, every byte of which is written."""
    block = overrun.alloc(allocator, nbytes, align)
    overrun.fill(block, nbytes)
    return block
