"""Benchmarks for asv; asv.conf.json beside this file says how they are run."""
