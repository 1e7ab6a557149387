"""arenapy's own allocators under the machines of `arenapy.testing`."""

from arenapy.testing import (
    BufferMachine,
    BufferRules,
    BumpMachine,
    PoolMachine,
    SlabMachine,
    TwoThreadMachine,
)

TestBump = BumpMachine.TestCase
TestSlab = SlabMachine.TestCase
TestPool = PoolMachine.TestCase
TestBuffers = BufferMachine.TestCase


class SlabBuffers(BufferRules, SlabMachine):
    pass


class PoolBuffers(BufferRules, PoolMachine):
    pass


class TwoAtASlab(TwoThreadMachine, SlabMachine):
    pass


class TwoAtAPool(TwoThreadMachine, PoolMachine):
    pass


TestSlabBuffers = SlabBuffers.TestCase
TestPoolBuffers = PoolBuffers.TestCase
TestTwoAtASlab = TwoAtASlab.TestCase
TestTwoAtAPool = TwoAtAPool.TestCase
