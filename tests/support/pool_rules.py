"""The sizes of a Pool, by the design's words and this file's own arithmetic.

Nothing here asks arenapy: what the tests expect must not come from what they test.
"""

from helpers import round_up

KIB, MIB = 1 << 10, 1 << 20
#: The table of the design, in KiB; class 20 has no bound.
BOUNDS = [
    bound * KIB
    for bound in (
        4, 8, 16, 32, 64, 128, 256,
        512, 768, 1024, 2048, 4096, 8192, 16384,
        32768, 65536, 131072, 262144, 393216, 524288,
    )
]  # fmt: skip
CLASSES = len(BOUNDS) + 1
FINE = 64  # bytes, the granularity up to FINE_UP_TO
FINE_UP_TO = 512
COARSE = 2 * MIB  # the granularity above COARSE_ABOVE, and of class 20
COARSE_ABOVE = 16 * MIB


def class_of(nbytes):
    """The first class whose bound is not below `nbytes`."""
    return next((index for index, bound in enumerate(BOUNDS) if nbytes <= bound), CLASSES - 1)


def step_of(nbytes):
    """The block for `nbytes` bytes under rounding="step"."""
    nbytes = max(nbytes, 1)
    if nbytes <= FINE_UP_TO:
        return round_up(nbytes, FINE)
    if nbytes > COARSE_ABOVE:
        return round_up(nbytes, COARSE)
    doubling = 1  # the largest power of two below nbytes
    while doubling * 2 < nbytes:
        doubling *= 2
    return round_up(nbytes, doubling // 8)


def block_of(nbytes, rounding):
    """The bytes of the block that serves `nbytes` at the default alignment."""
    if rounding == "step":
        return step_of(nbytes)
    index = class_of(nbytes)
    return BOUNDS[index] if index < len(BOUNDS) else round_up(nbytes, COARSE)


def interesting_sizes(most):
    """Sizes at and beside every edge up to `most`: classes, steps, pages."""
    edges = {0, FINE_UP_TO, 4 * KIB, COARSE_ABOVE, *BOUNDS}
    doubling = FINE_UP_TO
    while doubling < most:
        edges.update(doubling + eighth * doubling // 8 for eighth in range(8))
        doubling *= 2
    edges.update(64 * k for k in range(9))
    return sorted({n + d for n in edges for d in (-1, 0, 1) if 0 <= n + d <= most})
