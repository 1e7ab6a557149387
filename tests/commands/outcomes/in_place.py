"""No difference: it overwrites what it has; the import of arenapy is small beside it."""

import numpy as np

x = np.ones(100_000)
y = np.empty_like(x)
for _ in range(30_000):
    np.add(x, x, out=y)
