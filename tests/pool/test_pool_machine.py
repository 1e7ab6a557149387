"""Programs that a `Pool` must survive: sizes, limits, hooks, sources that fail, housekeeping."""

from hypothesis import settings
from pool_machine import (
    BigPoolMachine,
    DebugPoolMachine,
    GranulesPoolMachine,
    HostPoolMachine,
    PoolMachine,
)

TestPool = PoolMachine.TestCase
TestBigPool = BigPoolMachine.TestCase
TestHostPool = HostPoolMachine.TestCase
TestGranulesPool = GranulesPoolMachine.TestCase
TestDebugPool = DebugPoolMachine.TestCase

# Hundreds of MiB are faulted in by each of its examples.
TestBigPool.settings = settings(max_examples=max(settings().max_examples // 5, 1))
