"""No difference: its time is in a library for linear algebra, which overwrites one array."""

import numpy as np

a = np.random.default_rng(1).random((200, 200))
c = np.empty_like(a)
for _ in range(2000):
    np.matmul(a, a, out=c)
