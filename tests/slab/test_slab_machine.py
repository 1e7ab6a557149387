"""Programs that a `Slab` must survive: growth, trims, limits, sources that fail, threads."""

from slab_machine import DebugSlabMachine, SlabMachine

TestSlab = SlabMachine.TestCase
TestDebugSlab = DebugSlabMachine.TestCase
