"""Benchmarks of host memory: calls from Python and C, threads, faults, layouts, room, replays."""
