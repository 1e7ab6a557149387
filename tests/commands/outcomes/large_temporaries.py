"""Faster: each expression makes arrays of 4 MB, which the C library gives back to the system."""

import numpy as np

x = np.ones((1000, 1000), "f4")
for _ in range(200):
    y = x * x + x - x / 2
