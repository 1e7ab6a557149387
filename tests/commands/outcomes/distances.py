"""Faster: distances between all pairs of points, by arrays of 4 MB."""

import numpy as np

x, y = np.random.default_rng(1).random((2, 1000), "f4")
for _ in range(100):
    squares = (x[:, None] - x) ** 2 + (y[:, None] - y) ** 2
    near = squares < 0.1
