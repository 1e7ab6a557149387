"""Faster: four batches of 4 MB are copied, changed and dropped."""

import numpy as np

data = np.zeros(1 << 20, "f4")
for _ in range(100):
    batches = [data.copy() for _ in range(4)]
    total = sum(batch[0] for batch in batches)
    del batches
