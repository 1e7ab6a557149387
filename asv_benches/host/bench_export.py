"""The cost of others' views of a block: memoryviews, arrays, DLPack, pickles that copy nothing.

Each export is made and dropped at once, of one block that stays; the first export of a block costs
more, since its root then takes notes: "of a new block" has both.

What this does not show: the bytes being used through the view, which costs what any memory does.
"""

import pickle

import numpy as np

import arenapy
from asv_benches.host.bench_latency import ARENA, pyarrow
from asv_benches.support.rounds import Line, Way, Ways, medians, timed

BYTES = 4096
DLPACK, NP_DLPACK = "np.from_dlpack(b)", "np.from_dlpack(array)"
EXPORTS = {
    "memoryview(b)": Way("memoryview(b)"),
    "memoryview(bytearray)": Way("memoryview(plain)"),
    "memoryview(arena.alloc(64))": Way(
        "memoryview(alloc(64))", "arena.reset(); alloc = arena.alloc"
    ),
    "np.asarray(b)": Way("asarray(b)", "asarray = np.asarray"),
    "np.frombuffer(b)": Way("frombuffer(b, 'u1')", "frombuffer = np.frombuffer"),
    "np.frombuffer(bytearray)": Way("frombuffer(plain, 'u1')", "frombuffer = np.frombuffer"),
    "pyarrow.py_buffer(b)": Way("py_buffer(b)", "py_buffer = pyarrow.py_buffer"),
    "pyarrow.py_buffer(bytearray)": Way("py_buffer(plain)", "py_buffer = pyarrow.py_buffer"),
    "b.array()": Way("array()", "array = b.array"),
    "b[64:128]": Way("b[64:128]"),
    "memoryview(bytearray)[64:128]": Way("view[64:128]", "view = memoryview(plain)"),
}
EXCHANGES = {
    DLPACK: Way("from_dlpack(b)", "from_dlpack = np.from_dlpack"),
    NP_DLPACK: Way("from_dlpack(ndarray)", "from_dlpack = np.from_dlpack"),
    "b.__dlpack__()": Way("give()", "give = b.__dlpack__"),
    "array.__dlpack__()": Way("give()", "give = ndarray.__dlpack__"),
    "b.__array_interface__": Way("b.__array_interface__"),
    "array.__array_interface__": Way("ndarray.__array_interface__"),
    "pickle, out of band: b": Way("dumps(b, 5, buffer_callback=kept)", "dumps = pickle.dumps"),
    "pickle, out of band: array": Way(
        "dumps(ndarray, 5, buffer_callback=kept)", "dumps = pickle.dumps"
    ),
}


def namespace():
    """The names that the statements use; what is not installed is None."""
    arena = arenapy.Bump(ARENA)
    names = {"arena": arena, "np": np, "pyarrow": pyarrow, "pickle": pickle}
    names["holder"] = other = arenapy.Bump(1 << 20)  # `arena` is reset
    names["b"] = other.alloc(BYTES)
    names["plain"] = bytearray(BYTES)
    names["ndarray"] = np.zeros(BYTES, "u1")
    names["kept"] = lambda buffer: False  # out of band
    return names


Export = timed("Export", "Make and drop a view of a block", EXPORTS, namespace)
Exchange = timed("Exchange", "Export by DLPack, array interface and pickle", EXCHANGES, namespace)


def lines(quick):
    """The report's lines."""
    names = namespace()
    for group in (EXPORTS, EXCHANGES):
        here = {name: way for name, way in group.items() if not way.missing(names)}
        for name, seconds in medians(here, names, Ways.CALLS, 31 if quick else 301).items():
            yield Line("export", name, seconds * 1e9, "ns")
