"""Property-based tests for allocators: arenapy's own, and anybody's.

Subclass `AllocatorMachine`, say how to make, allocate and address, and pytest attacks your
allocator; ``arenapy fuzz package:make_allocator`` does so without a class. Needs Hypothesis, which
nothing else of arenapy does: ``pip install hypothesis``.
"""

from arenapy.testing.buffers import BufferMachine, BufferRules
from arenapy.testing.machine import AllocatorMachine
from arenapy.testing.model import MarkRecord
from arenapy.testing.operations import OneOf, operation, operations
from arenapy.testing.own import BumpMachine, PoolMachine, SlabMachine
from arenapy.testing.ranges import Live
from arenapy.testing.sources import FailingSource
from arenapy.testing.steps import Program, Step, load, steps_path
from arenapy.testing.strategies import alignments, programs, shapes_and_dtypes, sizes
from arenapy.testing.streams import StreamMachine, Streams
from arenapy.testing.tally import Tally
from arenapy.testing.threads import TwoThreadMachine
from arenapy.testing.timeline import SimulatedEvent, SimulatedStream, SimulatedStreams

__all__ = [
    "AllocatorMachine",
    "BufferMachine",
    "BufferRules",
    "BumpMachine",
    "FailingSource",
    "Live",
    "MarkRecord",
    "OneOf",
    "PoolMachine",
    "Program",
    "SimulatedEvent",
    "SimulatedStream",
    "SimulatedStreams",
    "SlabMachine",
    "Step",
    "StreamMachine",
    "Streams",
    "Tally",
    "TwoThreadMachine",
    "alignments",
    "load",
    "operation",
    "operations",
    "programs",
    "shapes_and_dtypes",
    "sizes",
    "steps_path",
]
