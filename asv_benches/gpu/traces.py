"""The traces that GPU allocators are compared on: a torch training's, and random ones.

The random ones follow the rule of RMM's random_allocations benchmark: as long as fewer than
`allocations` were made, 73 of 100 steps allocate, if `most_bytes` allow it; the others, and those
that would be too much, free any of the live blocks. RMM draws sizes uniformly; one trace here draws
them log-normally, since programs ask for many small blocks and few large ones.
"""

from pathlib import Path

import numpy as np

from arenapy.trace import EVENT, OPERATIONS, Trace

MIB, GIB = 1 << 20, 1 << 30
ALLOCATE = 0.73
MAX_BYTES = 8 * GIB
ALLOCATIONS = 10_000
LARGEST_LOG_NORMAL = 512 * MIB

#: Made by torch_training_trace.py.
TRAINING = Path(__file__).resolve().parent / "torch_training.npz"
#: The same with --longer.
LONGER = TRAINING.with_name("torch_longer.npz")


def uniform(largest):
    """Sizes from 1 to `largest` bytes, all alike."""
    return lambda random, n: random.integers(1, largest, n, endpoint=True)


def log_normal(median, deviation):
    """Sizes of that median; the logarithms deviate so much."""

    def draw(random, n):
        sizes = median * np.exp(random.normal(0, deviation, n))
        return np.clip(sizes, 1, LARGEST_LOG_NORMAL).astype("i8")

    return draw


SIZES = {
    "uniform to 1 MiB": uniform(MIB),
    "uniform to 16 MiB": uniform(16 * MIB),
    "uniform to 64 MiB": uniform(64 * MIB),
    "log-normal": log_normal(256 << 10, 2.5),
}


def random_trace(seed, sizes, allocations=ALLOCATIONS, most_bytes=MAX_BYTES):
    """A trace by RMM's rule: the same for the same arguments.

    sizes : a key of SIZES, or a function of a generator and how many that gives bytes
    """
    random = np.random.default_rng(seed)
    draw = SIZES.get(sizes, sizes)
    wanted = draw(random, 2 * allocations).tolist()
    chances = random.random(2 * allocations).tolist()
    picks = random.random(2 * allocations).tolist()
    live, live_bytes, made = [], 0, 0
    out = []
    for nbytes, chance, pick in zip(wanted, chances, picks, strict=True):
        if made < allocations and (
            not live or (chance < ALLOCATE and live_bytes + nbytes < most_bytes)
        ):
            made += 1
            live.append((made, nbytes))
            live_bytes += nbytes
            out.append((OPERATIONS["alloc"], made, nbytes))
        elif live:
            i = int(pick * len(live))
            live[i], live[-1] = live[-1], live[i]
            number, nbytes = live.pop()
            live_bytes -= nbytes
            out.append((OPERATIONS["free"], number, nbytes))
    events = np.zeros(len(out), EVENT)
    events["operation"], events["address"], events["nbytes"] = np.array(out, "u8").T
    events["address"] <<= np.uint64(6)  # distinct: a name and no place
    events["thread"] = 1
    return Trace(events, f"random, seed {seed}")


#: Bytes of the blocks that stay in `growing_sequences`. torch has memory of its own for blocks of
#: up to 1 MiB, so only larger ones keep it from giving back the memory of an earlier batch.
SMALL, MEDIUM = (64 << 10, 512 << 10), (2 * MIB, 4 * MIB)


def growing_sequences(seed=0, phases=12, tensors=8, first=64 * MIB, kept=SMALL):
    """Batches of tensors, each batch larger than the one before, as of ever longer sequences.

    Beside each tensor a block of `kept` bytes is made, which stays. So no region of memory that was
    taken for a batch becomes free entirely, and none of its holes is large enough for the next
    batch.
    """
    random = np.random.default_rng(seed)
    out, made = [], 0
    for phase in range(phases):
        batch = []
        for _ in range(tensors):
            large = int(first * (1 + phase / 6) * random.uniform(0.95, 1.05))
            small = int(random.integers(*kept))
            for nbytes in (large, small):
                made += 1
                out.append((OPERATIONS["alloc"], made, nbytes))
            batch.append((made - 1, large))
        out += [(OPERATIONS["free"], number, nbytes) for number, nbytes in batch]
    events = np.zeros(len(out), EVENT)
    events["operation"], events["address"], events["nbytes"] = np.array(out, "u8").T
    events["address"] <<= np.uint64(6)
    events["thread"] = 1
    return Trace(events, f"growing sequences, seed {seed}")


def pack(trace, path):
    """Write a trace's blocks in little room: addresses become numbers, times microseconds."""
    of_blocks = np.isin(trace.events["operation"], [OPERATIONS["alloc"], OPERATIONS["free"]])
    events = trace.events[of_blocks]
    named = events["address"], events["stream"]
    (_, block), (streams, stream) = (np.unique(one, return_inverse=True) for one in named)
    ticks = events["time"] // np.uint64(1000)
    np.savez_compressed(
        path,
        kind=np.array(trace.kind),
        operation=events["operation"],
        block=block.astype("u4"),
        nbytes=events["nbytes"],
        step=np.diff(ticks, prepend=np.uint64(0)).astype("u4"),
        stream=stream.astype("u2"),
        first_stream_is_none=np.array(bool(len(streams) and streams[0] == 0)),
    )


def unpack(path):
    """Read a trace that `pack` wrote. As in any trace, streams begin with 1, and 0 is none."""
    with np.load(path) as found:
        events = np.zeros(len(found["operation"]), EVENT)
        events["operation"] = found["operation"]
        events["address"] = (found["block"].astype("u8") + np.uint64(1)) << np.uint64(6)
        events["nbytes"] = found["nbytes"]
        events["time"] = np.cumsum(found["step"], dtype="u8") * np.uint64(1000)
        events["stream"] = found["stream"] + (not found["first_stream_is_none"])
        events["thread"] = 1
        return Trace(events, str(found["kind"]))


def traces(quick=False):
    """{name: Trace}: the training's if it has been made, then the random ones."""
    found = {"torch training": unpack(TRAINING)} if TRAINING.exists() else {}
    allocations = ALLOCATIONS // 10 if quick else ALLOCATIONS
    for seed, name in enumerate(SIZES):
        found[name] = random_trace(seed, name, allocations)
    return found


def made_to_fragment(quick=False):
    """{name: Trace} of those that only a range which grows in place serves without waste.

    Two are made up, the training is recorded if the file is there. The sizes of a training's blocks
    grow with the length of its sequences, as in the others, but it has many of each size, and most
    of its blocks that stay are made before the first batch.
    """
    first = (8 if quick else 64) * MIB
    found = {
        "growing sequences": growing_sequences(first=first),
        "growing sequences, larger blocks stay": growing_sequences(first=first, kept=MEDIUM),
    }
    if LONGER.exists():
        found["torch training, longer batches"] = unpack(LONGER)
    return found
