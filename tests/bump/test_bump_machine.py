"""Programs that a `Bump` must survive: who holds what, marks, scopes, growth, the arena's end."""

from bump_machine import BumpMachine, GrowingMachine, InPlaceMachine, StrictMachine

TestBump = BumpMachine.TestCase
TestStrictBump = StrictMachine.TestCase
TestGrowingBump = GrowingMachine.TestCase
TestBumpInPlace = InPlaceMachine.TestCase
