"""Compute mean, deviation and maximum of a file that is larger than the GPU's memory.

    python out_of_core_gpu.py FILE       # a file of float32
    python out_of_core_gpu.py            # makes a file first

The program needs a GPU and CuPy. It reads the file in chunks. While a kernel works on one chunk,
the next chunks are read into pinned memory and copied to the device. A file of any size needs the
memory of three chunks on the host and of four chunks on the device.
"""

import sys
import tempfile

import cupy
import numpy as np

from arenapy import cuda

CHUNK = 64 << 20  # bytes


def moments(path, chunk_bytes=CHUNK, progress=None):
    """Return the number of values in a file of float32, and their mean, deviation and maximum."""
    count, largest = 0, -np.inf
    total = square = 0.0
    for chunk in cuda.chunks(path, chunk_bytes, "f4", depth=3, progress=progress):
        values = cupy.asarray(chunk)  # without a copy
        count += values.size
        total += values.sum(dtype="f8")  # stays on the device, so the host does not wait
        square += cupy.square(values, dtype="f8").sum()
        largest = cupy.maximum(largest, values.max())
        del values  # or the array would keep the chunk in use
    mean = float(total) / count
    return count, mean, np.sqrt(float(square) / count - mean**2), float(largest)


def make_file(path, n=100_000_000):
    """Write normally distributed numbers with the mean 3."""
    random = np.random.default_rng(1)
    with open(path, "wb") as file:
        for start in range(0, n, 1 << 22):
            values = random.standard_normal(min(1 << 22, n - start), "f4")
            (values + 3).tofile(file)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        path = sys.argv[1] if len(sys.argv) > 1 else f"{folder}/data.f4"
        if len(sys.argv) == 1:
            make_file(path)
        count, mean, deviation, largest = moments(path, progress=sys.stderr.isatty())
    print(f"{count:,} values: mean {mean:.4f}, deviation {deviation:.4f}, largest {largest:.4f}")
