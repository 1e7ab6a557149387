"""The package of docs/cython_template, once it is built and installed: its result is NumPy's."""

import numpy as np
import pytest

import arenapy

running_median = pytest.importorskip("running_median").running_median


@pytest.mark.parametrize("width", [1, 2, 5, 64, 1000])
def test_medians_are_those_of_numpy(width):
    values = np.random.default_rng(1).integers(0, 50, 1000).astype("f8")
    medians = np.empty(len(values) - width + 1)
    arena = arenapy.Bump(1 << 16)
    running_median(values, medians, arena)
    windows = np.lib.stride_tricks.sliding_window_view(values, width)
    np.testing.assert_array_equal(medians, np.median(windows, axis=-1))
    assert arena.used == 0, "the scratch memory came back"
    arena.check()


def test_an_arena_that_is_full_changes_nothing():
    arena = arenapy.Bump(4096)
    with pytest.raises(MemoryError, match="1000 values"):
        running_median(np.ones(1000), np.empty(1), arena)
    assert arena.used == 0
