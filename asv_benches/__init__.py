"""Benchmarks, by what they measure; asv.conf.json beside this file says how asv runs them."""
