"""arenapy's own allocators under the machines of `arenapy.testing`.

The suite's own machines know more of each; these are as a user has them, so a part of the examples
of the profile will do.
"""

from hypothesis import settings

from arenapy.testing import (
    BufferMachine,
    BufferRules,
    BumpMachine,
    PoolMachine,
    SlabMachine,
    TwoThreadMachine,
)


class SlabBuffers(BufferRules, SlabMachine):
    pass


class PoolBuffers(BufferRules, PoolMachine):
    pass


class TwoAtASlab(TwoThreadMachine, SlabMachine):
    pass


class TwoAtAPool(TwoThreadMachine, PoolMachine):
    pass


def a_part(machine):
    case = machine.TestCase
    case.settings = settings(case.settings, max_examples=max(settings().max_examples // 4, 5))
    return case


TestBump = a_part(BumpMachine)
TestSlab = a_part(SlabMachine)
TestPool = a_part(PoolMachine)
TestBuffers = a_part(BufferMachine)
TestSlabBuffers = a_part(SlabBuffers)
TestPoolBuffers = a_part(PoolBuffers)
TestTwoAtASlab = a_part(TwoAtASlab)
TestTwoAtAPool = a_part(TwoAtAPool)
