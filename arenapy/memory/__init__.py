"""Regions, the sources that make them, and what a fork does to them."""
