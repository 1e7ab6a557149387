"""Feed a training loop with batches. Threads prepare the next batches while the loop computes.

    python training_input.py FILE        # rows of 33 float32, the last column is the label
    python training_input.py             # makes a file first

The program maps the file, so the file may be larger than memory. Each batch is an item of a slab.
When the loop drops a batch, a later batch uses the item again, so its memory causes page faults
only once. If you train on a GPU, give the slab the source ``cuda.Pinned()``.
"""

import itertools
import sys
import tempfile
from collections import deque
from concurrent.futures import ThreadPoolExecutor

import numpy as np

import arenapy

COLUMNS = 33
ROWS = 256  # in a batch
AHEAD = 4  # batches that are prepared before the loop needs them


def batches(data, epochs, workers=2):
    """Generate batches of rows in random order, epoch after epoch. Threads prepare them."""
    slab = arenapy.Slab(ROWS * data.itemsize * data.shape[1], count=AHEAD + 2)
    todo = orders(len(data), epochs)

    def gather(rows):
        batch = slab.empty((ROWS, data.shape[1]), data.dtype)
        return np.take(data, rows, axis=0, out=batch, mode="clip")

    with ThreadPoolExecutor(workers) as threads:
        ahead = deque(threads.submit(gather, rows) for rows in itertools.islice(todo, AHEAD))
        while ahead:
            yield ahead.popleft().result()
            ahead.extend(threads.submit(gather, rows) for rows in itertools.islice(todo, 1))


def orders(n, epochs):
    """Generate the row numbers of each batch. Each epoch has each row at most once."""
    for epoch in range(epochs):
        order = np.random.default_rng(epoch).permutation(n)
        yield from order[: n // ROWS * ROWS].reshape(-1, ROWS)


def train(path, epochs=3, rate=0.1):
    """Logistic regression: return the weights, and the share of rows that they classify right."""
    data = arenapy.File(path).region().buffer().array((-1, COLUMNS), "f4")
    weights = np.zeros(COLUMNS - 1, "f4")
    for batch in batches(data, epochs):
        x, y = batch[:, :-1], batch[:, -1]
        weights += rate / ROWS * (y - 1 / (1 + np.exp(-(x @ weights)))) @ x
        del batch, x, y  # free the item
    right = (data[:, :-1] @ weights > 0) == data[:, -1]
    return weights, float(right.mean())


def make_rows(path, n=50_000):
    """Write random rows. A plane separates the two labels."""
    random = np.random.default_rng(7)
    rows = random.normal(size=(n, COLUMNS)).astype("f4")
    rows[:, -1] = rows[:, :-1] @ random.normal(size=COLUMNS - 1) > 0
    rows.tofile(path)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        path = sys.argv[1] if len(sys.argv) > 1 else f"{folder}/rows.f4"
        if len(sys.argv) == 1:
            make_rows(path)
        print(f"{train(path)[1]:.1%} of the rows are on the right side")
