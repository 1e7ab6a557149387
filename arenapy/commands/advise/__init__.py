"""``arenapy advise``: which allocator a recorded program should use, and how large."""
