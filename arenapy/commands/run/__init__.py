"""``arenapy run``: a program with its arrays in a pool."""
