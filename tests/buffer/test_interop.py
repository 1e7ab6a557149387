"""What other libraries export from arenapy's memory, and keep, stays what it is.

Each export is all that is left of a block: its allocator is reset and filled with other bytes,
trimmed, dropped; its regions refuse to close. With the export its bytes go back.
"""

import ctypes
import gc
import importlib.util
import pickle
import weakref

import numpy as np
import pytest
from every import adds_up

from arenapy import Bump, Existing, Host, Pool, Shared, Slab

NBYTES = 3000
PATTERN = (np.arange(NBYTES) % 251).astype("u1")
HAS = {name: importlib.util.find_spec(name) is not None for name in ("pyarrow", "pandas")}


def pa():
    import pyarrow

    return pyarrow


def pd():
    import pandas

    return pandas


def typed(buffer, dtype="f8"):
    return buffer.array((-1,), dtype)


def frame(array):
    """A table over columns of a two-dimensional array."""
    return pd().DataFrame(array.reshape(3, -1).T, columns=list("abc"), copy=False)


def arrow_array(array):
    found = pa().array(array)
    assert found.buffers()[1].address == array.ctypes.data, "it was copied"
    return found, lambda found: memoryview(found.buffers()[1])[:NBYTES]


def arrow_strings(buffer):
    """Their characters are the block's."""
    offsets = pa().array([0, 1000, NBYTES], pa().int32()).buffers()[1]
    found = pa().Array.from_buffers(pa().binary(), 2, [None, offsets, pa().py_buffer(buffer)])
    return found, lambda found: b"".join(found.to_pylist())


def arrow_table(array):
    table = pa().table({"x": pa().array(array)})
    return table, lambda table: memoryview(table["x"].chunk(0).buffers()[1])[:NBYTES]


def reverse(found):
    return bytes(found[::-1])


#: name: a function of a Buffer that gives an export, and what reads it
EXPORTS = {
    "memoryview": lambda b: (memoryview(b), bytes),
    "slice of a memoryview": lambda b: (memoryview(b)[::-1], reverse),
    "cast memoryview": lambda b: (memoryview(b).cast("d"), lambda view: view.tobytes()),
    "PickleBuffer": lambda b: (pickle.PickleBuffer(b), lambda pickled: pickled.raw()),
    "ctypes": lambda b: ((ctypes.c_uint8 * NBYTES).from_buffer(b), bytes),
    "frombuffer": lambda b: (np.frombuffer(b, "f8"), bytes),
    "asarray": lambda b: (np.asarray(b), bytes),
    "ndarray": lambda b: (np.ndarray(NBYTES, "u1", b), bytes),
    "from_dlpack": lambda b: (np.from_dlpack(b.view((-1,), "f8")), bytes),
    "from_dlpack of a slice": lambda b: (np.from_dlpack(b[:])[::-1], reverse),
    "capsule": lambda b: (b.__dlpack__(), lambda capsule: PATTERN),
    "array interface": lambda b: (b.__array_interface__ and b.view(), bytes),
    "view of an array": lambda b: (typed(b).reshape(3, -1).T, lambda array: bytes(array.T)),
    "records": lambda b: (
        b.array((-1,), [("x", "u1"), ("y", "u1", 2)]),
        lambda found: found.tobytes(),
    ),
    "flat": lambda b: (b.array().flat, lambda flat: flat.base),
}
WITH_PYARROW = {
    "py_buffer": lambda b: (pa().py_buffer(b), bytes),
    "py_buffer of a view": lambda b: (pa().py_buffer(b.view((-1,), "f8")), bytes),
    "slice of a py_buffer": lambda b: (pa().py_buffer(b).slice(0), bytes),
    "foreign_buffer": lambda b: (pa().foreign_buffer(b.address, NBYTES, memoryview(b)), bytes),
    "pyarrow.array": lambda b: arrow_array(typed(b)),
    "pyarrow strings": arrow_strings,
    "pyarrow table": lambda b: arrow_table(typed(b)),
    "pyarrow tensor": lambda b: (
        pa().Tensor.from_numpy(typed(b)),
        lambda tensor: tensor.to_numpy(),
    ),
    "pyarrow reader": lambda b: (pa().BufferReader(b), lambda file: (file.seek(0), file.read())[1]),
    "pyarrow to numpy": lambda b: (pa().array(typed(b)).to_numpy(), bytes),
}
WITH_PANDAS = {
    "DataFrame": lambda b: (frame(typed(b)), lambda found: found.to_numpy().T.tobytes()),
    "slice of a DataFrame": lambda b: (frame(typed(b)).iloc[:], lambda f: f.to_numpy().T.tobytes()),
    "Series": lambda b: (pd().Series(typed(b), copy=False), lambda series: series.to_numpy()),
    "slice of a Series": lambda b: (
        pd().Series(typed(b), copy=False).iloc[::-1],
        lambda series: reverse(series.to_numpy()),
    ),
    "Index": lambda b: (pd().Index(typed(b), copy=False), lambda index: index.to_numpy()),
}
NEEDS = dict.fromkeys(WITH_PYARROW, "pyarrow") | dict.fromkeys(WITH_PANDAS, "pandas")
EXPORTS |= WITH_PYARROW | WITH_PANDAS

ALLOCATORS = {
    "bump": lambda source: Bump(1 << 16, source),
    "slab": lambda source: Slab(4096, 8, source),
    "pool": lambda source: Pool(1 << 20, source, 1 << 16),
}
SOURCES = {
    "host": Host,
    "shared": Shared,
    "existing": lambda: Existing(bytearray(1 << 16)),
}


def overwrite(allocator):
    """Hand out all that is free, and fill it."""
    if isinstance(allocator, Bump):
        allocator.reset()
    blocks = []
    with pytest.raises(MemoryError):
        while True:
            blocks.append(allocator.alloc(NBYTES))
            blocks[-1].fill(0xEE)
    return len(blocks)


def live_bytes(allocator):
    stats = adds_up(allocator)
    if isinstance(allocator, Bump):
        return stats.live_bytes + stats.retired_bytes
    return stats.allocated_bytes


def lacking(name):
    return name in NEEDS and not HAS[NEEDS[name]]


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("kind", ALLOCATORS)
@pytest.mark.parametrize("name", EXPORTS)
@pytest.mark.sampled
def test_an_export_alone_keeps_the_bytes(name, kind, source):
    if lacking(name):
        pytest.skip(f"{NEEDS[name]} is not installed")
    allocator = ALLOCATORS[kind](SOURCES[source]())
    block = allocator.alloc(NBYTES)
    block.copy_from(PATTERN)
    export, read = EXPORTS[name](block)
    held = [export]
    del block, export

    def unchanged():
        return bytes(read(held[0])) == PATTERN.tobytes()

    assert unchanged()
    overwrite(allocator)
    assert unchanged() and live_bytes(allocator) >= NBYTES
    for region in allocator.regions:
        with pytest.raises(BufferError, match="exported"):
            region.close()
    if kind != "bump":
        allocator.trim()
    gone = weakref.ref(allocator)
    last = overwrite(allocator)
    if source == "host" and name != "capsule":
        del allocator, region
        gc.collect()
        assert gone() is None and unchanged()
        return
    assert unchanged()
    held.clear()
    gc.collect()
    if kind == "bump":
        allocator.reset()
    assert live_bytes(allocator) == 0
    assert overwrite(allocator) > last
    region.close()


def test_an_address_alone_is_no_export():
    """`foreign_buffer` keeps its base and exports nothing: the base has to be an export."""
    if not HAS["pyarrow"]:
        pytest.skip("pyarrow is not installed")
    arena = Bump(1 << 16)
    block = arena.alloc(NBYTES)
    foreign = pa().foreign_buffer(block.address, NBYTES, base=block)
    arena.reset()
    assert block.closed and foreign.size == NBYTES


@pytest.mark.full
def test_exports_at_exit(run_script):
    """All of them alive, as globals, in a cycle and a thread's, when the interpreter ends."""
    names = [name for name in EXPORTS if not lacking(name)]
    run_script(
        f"""
        import sys, threading
        sys.path.insert(0, {str(__file__.rpartition("/")[0])!r})
        from test_interop import *

        kept = []
        for name in {names}:
            for make in ALLOCATORS.values():
                allocator = make(Host())
                block = allocator.alloc(NBYTES)
                block.copy_from(PATTERN)
                kept.append(EXPORTS[name](block)[0])
        cycle = [kept[::2]]
        cycle.append(cycle)
        own = threading.local()
        own.some = kept[::3]
        sys.modules["sys"].kept = kept[1::2]
        """,
        flags=["-X", "dev"],
    )
