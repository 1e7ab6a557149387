"""Traces: files with the operations of an allocator, to record, read, generate and replay."""

from arenapy.diagnostics.recorder import Recorder, Recording
from arenapy.trace.format import EVENT, OPERATIONS, Frame, Site
from arenapy.trace.synthetic import PHASES, Phase
from arenapy.trace.trace import Summary, Trace, from_torch, load, record, synthetic

__all__ = [
    "EVENT",
    "OPERATIONS",
    "PHASES",
    "Frame",
    "Phase",
    "Recorder",
    "Recording",
    "Site",
    "Summary",
    "Trace",
    "from_torch",
    "load",
    "record",
    "synthetic",
]
