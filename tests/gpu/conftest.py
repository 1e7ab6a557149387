"""A GPU, and the libraries that use it beside arenapy: a test without them is skipped."""

import contextlib
import fcntl
import os

import pytest
from real_gpu import Gpu, need_gpu
from turns import locked

os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # JAX would take most of the device


@pytest.fixture(autouse=True)
def share_of_the_device(request):
    """No other process runs a test beside one that fills the device or reads what it has free."""
    alone = request.node.get_closest_marker("alone")
    with contextlib.ExitStack() as until_the_end:
        with locked(
            "gpu-turn", fcntl.LOCK_EX
        ):  # whoever comes later waits for one that will be alone
            device = locked("gpu", fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
            until_the_end.enter_context(device)
        yield


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
