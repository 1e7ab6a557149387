"""No difference: it waits."""

import time

import numpy as np

time.sleep(2)
print(np.ones(10).sum())
