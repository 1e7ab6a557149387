"""Batches a second from a DataLoader: in a Slab of Shared memory, and with `pin_memory=True`.

Both loaders have workers that stay, and take turns. Each batch is copied to the device.
"""

import statistics
import sys
import time
from pathlib import Path

if not __package__:  # run as a script; behind what is installed
    sys.path.append(str(Path(__file__).resolve().parents[2]))

import arenapy
from arenapy.interop import torch as arenapy_torch
from asv_benches.gpu.latency import imported

WORKERS, PREFETCH, BATCH = 8, 4, 64
BATCHES = 150
ROUNDS = 5


class Images:
    """Images that are decoded already, so that nothing but the way of the batches is measured."""

    def __init__(self, images):
        self.images = images

    def __len__(self):
        return BATCH * BATCHES

    def __getitem__(self, i):
        return self.images[i % len(self.images)], i % 1000


def rate(torch, loader):
    """Batches a second, from the first one on."""
    start = None
    for images, labels in loader:
        images = images.to("cuda", non_blocking=True)
        labels = labels.to("cuda", non_blocking=True)
        if start is None:
            torch.cuda.synchronize()
            start = time.perf_counter()
    torch.cuda.synchronize()
    return (len(loader) - 1) / (time.perf_counter() - start)


def report():
    """Print a line for each kind of image."""
    torch = imported("torch")
    for shape, dtype in (((3, 64, 64), torch.uint8), ((3, 224, 224), torch.uint8),
                         ((3, 224, 224), torch.float32)):  # fmt: skip
        data = Images(torch.randint(0, 255, (128, *shape)).to(dtype))
        nbytes = BATCH * data.images[0].nbytes
        slab = arenapy.Slab(nbytes + (1 << 16), WORKERS * PREFETCH + 4, arenapy.Shared())
        loaders = {
            "slab": {"collate_fn": arenapy_torch.collate(slab)},
            "pin_memory": {"pin_memory": True},
        }
        loaders = {
            name: torch.utils.data.DataLoader(
                data, batch_size=BATCH, num_workers=WORKERS, prefetch_factor=PREFETCH,
                persistent_workers=True, **options,
            )
            for name, options in loaders.items()
        }  # fmt: skip
        found = {name: [] for name in loaders}
        for i in range(ROUNDS + 1):
            for name, loader in loaders.items():
                one = rate(torch, loader)
                if i:  # the first round warms up
                    found[name].append(one)
        ours, theirs = (statistics.median(rates) for rates in found.values())
        print(
            f"batches of {nbytes / 1e6:.1f} MB: {ours:.0f} a second, with pin_memory=True "
            f"{theirs:.0f}, {ours / theirs:.2f}",
            flush=True,
        )


if __name__ == "__main__":
    report()
