"""``arenapy compare``: a program with and without arenapy."""
