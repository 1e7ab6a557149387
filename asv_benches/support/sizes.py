"""Sizes of blocks: units, what people call them, and arrays of them as the loops in C want them."""

import numpy as np

KIB = 1 << 10
MIB = 1 << 20


def text(nbytes):
    """A size as people write it."""
    if nbytes >= KIB:
        return f"{nbytes // MIB} MiB" if nbytes >= MIB else f"{nbytes // KIB} KiB"
    return f"{nbytes} B"


def sizes(*nbytes):
    """An array of sizes, as the loops want them."""
    return np.array(nbytes, "u8")


def mixed(least, most, count=4096, seed=0):
    """So many random sizes, as many of them in each doubling as in any other."""
    logarithms = np.random.default_rng(seed).uniform(np.log(least), np.log(most), count)
    return np.exp(logarithms).astype("u8")
