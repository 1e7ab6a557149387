"""Programs that a `Bump` must survive: who holds what, marks, scopes, growth, the arena's end."""

from bump_machine import BumpMachine, GrowingMachine, StrictMachine

TestBump = BumpMachine.TestCase
TestStrictBump = StrictMachine.TestCase
TestGrowingBump = GrowingMachine.TestCase
