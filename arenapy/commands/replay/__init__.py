"""``arenapy replay``: a recorded trace with several allocators."""
