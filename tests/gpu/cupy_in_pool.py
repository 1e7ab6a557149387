"""A plugin of pytest that runs CuPy's own tests with their arrays in a Pool.

CuPy's wheel has no tests. In the ``tests`` folder of its sources, at the tag of the installed
version: ``PYTHONPATH=TREE/tests/gpu pytest -p cupy_in_pool cupy_tests/core_tests``, where TREE is
this tree.
"""

import pytest

import arenapy
from arenapy import cuda
from arenapy.interop import cupy as arenapy_cupy

POOL = arenapy.Pool(source=cuda.Device())


@pytest.hookimpl(trylast=True)
def pytest_configure(config):
    arenapy_cupy.use(POOL)


def pytest_terminal_summary(terminalreporter):
    POOL.check()
    terminalreporter.write_line(f"{POOL.stats().total_allocations} allocations in {POOL!r}")
