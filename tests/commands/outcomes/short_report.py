"""Slower: a short program with small arrays."""

import numpy as np

table = {key: np.arange(50) * key for key in range(1000)}
print(sum(int(row.sum()) for row in table.values()))
