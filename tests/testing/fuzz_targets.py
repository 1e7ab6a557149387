"""What fuzz_coverage.py attacks, and what test_corpus.py runs the corpus with."""

import numpy as np
from hypothesis import strategies as st

from arenapy import Pool, numpy_memory
from arenapy.testing import (
    AllocatorMachine,
    BufferRules,
    BumpMachine,
    OneOf,
    PoolMachine,
    SlabMachine,
    operation,
)
from arenapy.testing.own import DEFAULT_ALIGN, PLAIN
from arenapy.testing.strategies import PAGE


class Bumps(BumpMachine):
    pass


class Slabs(SlabMachine):
    pass


class Pools(PoolMachine):
    pass


class Buffers(BufferRules, PoolMachine):
    pass


class NumpyArrays(AllocatorMachine):
    """Arrays whose data are in a pool; one that is resized goes through the handler's realloc."""

    default_align = DEFAULT_ALIGN
    alignments = st.none()
    bad_request = None  # NumPy answers by itself
    configs = st.fixed_dictionaries(
        {
            "max_bytes": st.none() | st.integers(1, 64).map(lambda n: n * PAGE),
            "rounding": st.sampled_from(["step", "class"]),
        }
    )

    def make(self, max_bytes, rounding):
        pool = Pool(max_bytes, PLAIN, rounding=rounding)
        return pool, numpy_memory(pool, on_full="error")

    def allocate(self, state, nbytes, align):
        with state[1]:
            return np.empty(nbytes, "u1")

    def zeroed(self, state, nbytes):
        with state[1]:
            return np.zeros(nbytes, "u1")

    def address(self, block):
        return block.ctypes.data

    def free(self, state, block):
        """It is dropped after this."""

    def look(self):
        super().look()
        self.call(self.state[0].check)

    @operation("live", which=OneOf("live"), nbytes="sizes")
    def resize(self, which, nbytes):
        serial, known = self.pick_live(which)
        array, before = known.block, known.nbytes
        expected = bytes(array[: min(before, nbytes)])
        try:
            array.resize(nbytes, refcheck=False)
        except MemoryError:
            assert array.nbytes == before, "a refusal changed the array"
            return
        assert bytes(array[: len(expected)]) == expected, "what was kept is not what was there"
        self.gone(serial)
        self.admit(array, nbytes)


#: By the name of a folder of tests/testing/corpus.
MACHINES = {
    "bump": Bumps,
    "slab": Slabs,
    "pool": Pools,
    "buffer": Buffers,
    "numpy": NumpyArrays,
}
