"""A GPU, and the libraries that use it beside arenapy: a test without them is skipped."""

import pytest
from real_gpu import Gpu, need_gpu


@pytest.fixture
def gpu():
    need_gpu()
    with Gpu() as one:
        yield one


@pytest.fixture
def cupy(gpu):
    return pytest.importorskip("cupy")


@pytest.fixture
def torch(gpu):
    return pytest.importorskip("torch")


@pytest.fixture
def core(gpu):
    """cuda.core, its first device current."""
    core = pytest.importorskip("cuda.core")
    core.Device(0).set_current()
    return core
