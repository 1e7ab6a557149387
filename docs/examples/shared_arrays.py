"""Share an array between processes. Each worker writes its part of the array without a copy.

    python shared_arrays.py [WORKERS]

A queue sends a Buffer over ``Shared`` memory as a handle, and the receiver maps the same bytes. The
workers compute the Mandelbrot set. Some rows of it take much longer than others. Therefore the
workers take bands of rows from a queue until the queue is empty.
"""

import multiprocessing
import sys

import numpy as np

import arenapy

HEIGHT, WIDTH, BAND = 480, 640, 16
LEFT, RIGHT, TOP, BOTTOM = -2.2, 0.8, 1.2, -1.2
MOST = 100  # the largest number of iterations


def compute(rows, first):
    """For each point of some rows, count the iterations until it leaves the circle."""
    x = np.linspace(LEFT, RIGHT, WIDTH)
    y = np.linspace(TOP, BOTTOM, HEIGHT)[first : first + len(rows), None]
    point = x + 1j * y
    z = np.zeros_like(point)
    rows[:] = 0
    for _ in range(MOST):
        inside = z.real**2 + z.imag**2 <= 4
        if not inside.any():
            break
        rows += inside
        z = np.where(inside, z * z + point, z)


def worker(bands):
    """Compute bands until there is none left."""
    while (task := bands.get()) is not None:
        block, first = task
        compute(block.array((-1, WIDTH), "u2"), first)
        del block, task  # from here on, only the sender has these bytes


def mandelbrot(workers):
    """Compute the picture in worker processes, in the memory of an arena of this process."""
    arena = arenapy.Bump(HEIGHT * WIDTH * 2, arenapy.Shared())
    picture = arena.alloc(HEIGHT * WIDTH * 2)
    context = multiprocessing.get_context("spawn")
    bands = context.Queue()
    processes = [context.Process(target=worker, args=(bands,)) for _ in range(workers)]
    for process in processes:
        process.start()
    row = WIDTH * 2
    for first in range(0, HEIGHT, BAND):
        bands.put((picture[first * row : (first + BAND) * row], first))
    for _ in processes:
        bands.put(None)
    for process in processes:
        process.join()
        if process.exitcode:
            raise RuntimeError(f"a worker failed with exit code {process.exitcode}")
    return picture.array((HEIGHT, WIDTH), "u2")


if __name__ == "__main__":
    picture = mandelbrot(int(sys.argv[1]) if len(sys.argv) > 1 else 2)
    print(f"{(picture == MOST).mean():.2%} of the points are in the set")
    for line in picture[::32, ::10]:
        print("".join(" .:-=+*#%@"[min(count * 10 // (MOST + 1), 9)] for count in line))
