"""NumPy programs under arenapy's handler, NumPy's default and tuned mallocs."""
