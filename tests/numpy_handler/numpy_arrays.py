"""Ways in which NumPy comes to memory for an array's data, for the tests of its handler.

Each of `MAKERS` is a function of a number of elements and a seed. What it gives must not depend on
where the memory is: the same call under NumPy's own handler gives the same contents.
"""

import contextlib
import ctypes
import gc
import tempfile
import threading

import numpy as np
from every import adds_up, anonymous_memory
from numpy._core.multiarray import get_handler_name
from numpy.dtypes import StringDType
from sources import Regions

from arenapy import Existing, File, Host, Pool, Shared, handles

STRUCT = np.dtype([("a", "i2"), ("b", "f8"), ("c", "S5")])  # unaligned
ALIGN = 64
MIB = 1 << 20
ROOM = 64 * MIB

#: name: a pool, given a directory of its own
POOLS = {
    "host": lambda path: Pool(),
    "by class": lambda path: Pool(rounding="class"),
    "debug": lambda path: Pool(debug=True),
    "timed": lambda path: Pool(trim_after=0.0),
    "shared": lambda path: Pool(ROOM, Shared()),
    "file": lambda path: Pool(ROOM, File(path / "memory", "w+")),
    "existing": lambda path: Pool(source=Existing(anonymous_memory()), initial_bytes=4 * MIB),
    "user": lambda path: Pool(source=Regions()),
    "user, odd by 1": lambda path: Pool(source=Regions(skew=1)),
}


def values(n, seed):
    """`n` numbers that look random, from no generator that allocates otherwise."""
    return (np.arange(n, dtype="u4") * np.uint32(2654435761) + np.uint32(seed)) >> np.uint32(7)


def as_text(n, seed):
    return " ".join(str(value) for value in values(n, seed).tolist())


def from_text_file(n, seed):
    """fromfile(sep=) grows what it reads into, and does so without the GIL."""
    with tempfile.TemporaryFile("w+") as file:
        file.write(as_text(n, seed))
        file.seek(0)
        return np.fromfile(file, dtype="f8", sep=" ")


def from_file(n, seed):
    with tempfile.TemporaryFile() as file:
        values(n, seed).tofile(file)
        file.seek(0)
        return np.fromfile(file, dtype="u4")


def resized(n, seed):
    """Larger, then smaller, then larger: what is kept is kept, and what is new is zero."""
    array = values(n, seed)
    array.resize((3 * n + 5,), refcheck=False)
    array.resize((2 * n + 1,), refcheck=False)
    array.resize((5 * n + 100,), refcheck=False)
    return array


def resized_away(n, seed):
    array = values(n, seed)
    array.resize((0,), refcheck=False)
    array.resize((n + 1,), refcheck=False)
    return array


def empty(n, seed):
    array = np.empty(n, "f8")
    array[:] = values(n, seed)
    return array


def objects(n, seed):
    """Empty ones are None, which NumPy tells by zeroed memory."""
    array = np.empty(n, object)
    array[::2] = values(n, seed).tolist()[::2]
    return array


def strings(n, seed):
    """Short ones lie in the array, longer ones in an arena of the dtype's."""
    array = np.empty(n, StringDType())
    array[::3] = [str(value) * (1 + value % 9) for value in values(n, seed).tolist()[::3]]
    return array


def structured(n, seed):
    array = np.zeros(n, STRUCT)
    array["b"] = values(n, seed)
    array["c"][::2] = b"abc"
    return array


def sorted_structured(n, seed):
    """Sorting what has no comparison of its own takes buffers from the handler."""
    array = structured(n, seed)
    array.sort(order=["c", "b"])
    return array


def appended(n, seed):
    array = np.empty(0, "u4")
    for part in np.array_split(values(n, seed), 5):
        array = np.append(array, part)
    return array


MAKERS = {
    "empty": empty,
    "zeros": lambda n, seed: np.zeros((n, 2)),
    "zeros of objects": lambda n, seed: np.zeros(n, object),
    "ones": lambda n, seed: np.ones(n, "f4"),
    "full": lambda n, seed: np.full((2, n), seed, "i8"),
    "full_like": lambda n, seed: np.full_like(values(n, seed), seed),
    "arange": lambda n, seed: np.arange(seed, seed + n),
    "array": lambda n, seed: np.array(values(n, seed).tolist()),
    "copy": lambda n, seed: values(n, seed).copy(),
    "fortran copy": lambda n, seed: values(2 * n, seed).reshape(2, n).copy("F"),
    "astype": lambda n, seed: values(n, seed).astype("c16"),
    "concatenate": lambda n, seed: np.concatenate([values(n, seed), values(n, seed + 1)]),
    "appended": appended,
    "arithmetic": lambda n, seed: values(n, seed) * 1.5 + values(n, 1) - seed,
    "sum": lambda n, seed: values(3 * n, seed).reshape(3, n).sum(axis=0),
    "cast in place": lambda n, seed: np.add(values(n, seed), 1, out=np.zeros(n), casting="unsafe"),
    "sort": lambda n, seed: np.sort(values(n, seed)[::-1], kind="stable"),
    "argsort": lambda n, seed: np.argsort(values(n, seed), kind="stable"),
    "sorted by bytes": lambda n, seed: np.sort(values(n, seed).astype("S12")),
    "sorted by record": sorted_structured,
    "unique": lambda n, seed: np.unique(values(n, seed) % 17),
    "fancy": lambda n, seed: values(n, seed)[np.arange(n)[::-1]],
    "mask": lambda n, seed: values(n, seed)[values(n, seed) % 3 > 0],
    "structured": structured,
    "objects": objects,
    "strings": strings,
    "datetimes": lambda n, seed: values(n, seed).astype("M8[s]"),
    "unicode": lambda n, seed: values(n, seed).astype("U11"),
    "void": lambda n, seed: np.zeros(n, "V7"),
    "half": lambda n, seed: (values(n, seed) % 1000).astype("f2"),
    "fromstring": lambda n, seed: np.fromstring(as_text(n, seed), dtype="f8", sep=" "),
    "fromfile of text": from_text_file,
    "fromfile": from_file,
    "fromiter": lambda n, seed: np.fromiter(values(n, seed).tolist(), "i8"),
    "fromiter with a count": lambda n, seed: np.fromiter(values(n, seed).tolist(), "i8", n),
    "fromfunction": lambda n, seed: np.fromfunction(lambda i, j: i * seed + j, (n, 2)),
    "resized": resized,
    "resized away": resized_away,
    "0 bytes": lambda n, seed: np.empty((n, 0)),
    "0 bytes of zeros": lambda n, seed: np.zeros((0, n), "i4"),
    "scalar": lambda n, seed: np.array(seed),
    "fft": lambda n, seed: np.fft.rfft(values(n, seed), 2 * n + 1),
    "dot": lambda n, seed: values(n, seed).astype("f8").reshape(n, 1) @ np.ones((1, 3)),
}

# What NumPy imports at a first call, it keeps; not in a pool of some test's.
for make in MAKERS.values():
    make(5, 1)


def owner_of(array):
    """The array that owns what `array` shows."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def is_ours(array):
    """Whether NumPy took the memory from arenapy's handler, according to NumPy."""
    return get_handler_name(owner_of(array)) == "arenapy"


def address_of(array):
    return array.__array_interface__["data"][0]


def same(array, other):
    """Whether two arrays are equal in type, shape and every element; NaN is equal to NaN."""
    if array.dtype != other.dtype or array.shape != other.shape:
        return False
    if array.dtype.hasobject or array.dtype == StringDType():
        return array.tolist() == other.tolist()
    return array.tobytes() == other.tobytes()


def raw(array):
    """The bytes of a contiguous array, read behind NumPy's back."""
    return ctypes.string_at(address_of(array), array.nbytes)


def live(pool):
    """How many blocks are live in a pool that is in order."""
    return adds_up(pool).active_allocations


def small_pool(nbytes=MIB):
    """A pool of `nbytes` bytes and no more, from the beginning."""
    return Pool(nbytes, Host(prefault=False), nbytes)


@contextlib.contextmanager
def three_pools():
    """Three pools, which must be empty in the end; and the world must be as it was."""
    start = threading.Thread.start
    made = [Pool(), Pool(), Pool()]
    yield made
    assert get_handler_name() == "default_allocator"
    assert threading.Thread.start is start
    gc.collect()
    assert [live(pool) for pool in made] == [0, 0, 0]


def where(pools):
    """The index of the pool that serves arrays here; None if NumPy does."""
    found = handles(np.empty(3))
    return None if found is None else pools.index(found.allocator)
