"""Property-based tests for allocators: arenapy's own, and anybody's.

Subclass `AllocatorMachine`, say how to make, allocate and address, and pytest attacks your
allocator; ``arenapy fuzz package:make_allocator`` does so without a class. Needs Hypothesis, which
nothing else of arenapy does: ``pip install hypothesis``. The exception is `arenapy.testing.asv`,
for benchmarks, which is there without it.
"""

from importlib.util import find_spec
from typing import TYPE_CHECKING

if not __debug__:
    raise ImportError(
        "arenapy.testing checks allocators by assert statements, which python -O leaves out: "
        "run it without -O"
    )

_HAS_HYPOTHESIS = find_spec("hypothesis") is not None

if TYPE_CHECKING or _HAS_HYPOTHESIS:
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

if not (TYPE_CHECKING or _HAS_HYPOTHESIS):

    def __getattr__(name: str) -> object:
        if name in __all__:
            raise ModuleNotFoundError(
                f"arenapy.testing.{name} needs Hypothesis: pip install hypothesis",
                name="hypothesis",
            )
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
