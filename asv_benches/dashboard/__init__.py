"""Graphs over commits: asv's pages of the results of reference machines."""
