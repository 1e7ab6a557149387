"""Common parts of Bump, Slab and Pool."""
