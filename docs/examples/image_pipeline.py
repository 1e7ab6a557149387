"""Process a folder of images with NumPy. The arrays are in a pool.

    python image_pipeline.py FOLDER      # .npy files of uint8, height x width x 3
    python image_pipeline.py             # makes a few images first

For each image, the steps allocate about ten arrays of its size. The pool keeps this memory for the
next image. Without the pool, most of the memory would come from the system again, with page faults.
"""

import sys
import tempfile
from pathlib import Path

import numpy as np

import arenapy


def blurred(grey):
    """The mean of each pixel and its eight neighbours."""
    padded = np.pad(grey, 1, mode="edge")
    rows = padded[:-2] + padded[1:-1] + padded[2:]
    return (rows[:, :-2] + rows[:, 1:-1] + rows[:, 2:]) / 9


def edges(grey):
    """The slope of the brightness at each pixel."""
    down, right = np.gradient(grey)
    return np.hypot(down, right)


def thumbnail(image, factor):
    """Each pixel is the mean of `factor` x `factor` pixels."""
    height, width = (length // factor * factor for length in image.shape[:2])
    tiles = image[:height, :width].reshape(height // factor, factor, width // factor, factor, -1)
    return tiles.mean(axis=(1, 3)).astype("u1")


def process(path):
    """Return the thumbnail of an image, and the share of its pixels that are on an edge."""
    image = np.load(path)
    grey = image @ np.array([0.299, 0.587, 0.114], "f4")
    steep = edges(blurred(grey))
    return thumbnail(image, 8), float((steep > 10).mean())


def make_images(folder, count=8, height=480, width=640):
    """Write images of bright discs on a dark background."""
    random = np.random.default_rng(1)
    y, x = np.mgrid[:height, :width]
    for number in range(count):
        image = np.zeros((height, width, 3), "u1")
        for _ in range(10):
            centre, radius = random.uniform(0, [height, width]), random.uniform(20, 80)
            disc = (y - centre[0]) ** 2 + (x - centre[1]) ** 2 < radius**2
            image[disc] = random.integers(60, 255, 3)
        np.save(folder / f"{number:03}.npy", image)


def main(folder):
    """Process all images of the folder, and print the allocations and page faults."""
    (thumbnails := folder / "thumbnails").mkdir(exist_ok=True)
    pool = arenapy.Pool(max_bytes=1 << 30)
    with arenapy.numpy_memory(pool):
        for path in sorted(folder.glob("*.npy")):
            with arenapy.measure(pool) as m:
                small, share = process(path)
            np.save(thumbnails / path.name, small)
            print(f"{path.name}: {share:.1%} edges; {m.allocations} arrays, {m.faults} page faults")
    print(pool)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as made:
            make_images(Path(made))
            main(Path(made))
