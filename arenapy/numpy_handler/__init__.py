"""NumPy's arrays in a Pool (NEP 49)."""
