"""A plugin of pytest that runs CuPy's own tests with their arrays in Pools, one for each device.

CuPy's wheel has no tests. In the ``tests`` folder of its sources, at the tag of the installed
version: ``PYTHONPATH=TREE/tests/gpu pytest -p cupy_in_pool cupy_tests/core_tests``, where TREE is
this tree. The folder's own settings come from ``pyproject.toml`` beside it.
"""

import cupy
import pytest

import arenapy
from arenapy import cuda
from arenapy.interop import cupy as arenapy_cupy

DEVICES = range(cupy.cuda.runtime.getDeviceCount())
POOLS = [arenapy.Pool(source=cuda.Device(i)) for i in DEVICES]


@pytest.hookimpl(trylast=True)
def pytest_configure(config):
    arenapy_cupy.use(*POOLS)


def pytest_sessionfinish():
    for pool in POOLS:
        pool.check()


def pytest_terminal_summary(terminalreporter):
    for pool in POOLS:
        terminalreporter.write_line(f"{pool.stats().total_allocations} allocations in {pool!r}")
