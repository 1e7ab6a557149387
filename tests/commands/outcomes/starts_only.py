"""Slower: the import of arenapy is all that changes, and the program is short."""

import numpy as np

print(np.arange(10).sum())
