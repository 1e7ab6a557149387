"""Stands for a package written by somebody else against an installed arenapy."""
