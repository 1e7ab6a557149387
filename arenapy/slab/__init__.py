"""Slab: items of one size."""
