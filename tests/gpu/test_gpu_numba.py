"""numba-cuda's device arrays in a Pool, on a real GPU; and numba's own tests with that Pool."""

import importlib.util
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from real_gpu import output_of


@pytest.fixture(autouse=True)
def numba_cuda(gpu):
    pytest.importorskip("numba_cuda")
    return pytest.importorskip("numba.cuda")


START = """
import warnings
warnings.simplefilter("ignore")
import gc
import numpy as np
if not hasattr(np, "row_stack"):  # NumPy 2.5 is without it, which numba-cuda 0.29 wants
    np.row_stack = np.vstack
from numba import cuda as numba_cuda
import arenapy
from arenapy import cuda
from arenapy.interop import numba as arenapy_numba
pool = arenapy.Pool({limit}, cuda.Device())
"""


def program(text, limit=None):
    """What a program prints, whose lines begin like this one's."""
    return output_of(START.format(limit=limit) + textwrap.dedent(text))


def test_arrays_are_in_the_pool():
    program("""
        before = numba_cuda.to_device(np.arange(1000))
        arenapy_numba.use(pool)
        x = numba_cuda.to_device(np.arange(1000, dtype="i8"))
        (block,) = [one for one in pool.blocks() if one.state == "live"]
        assert block.address == x.device_ctypes_pointer.value

        @numba_cuda.jit
        def add(x, n):
            i = numba_cuda.grid(1)
            if i < x.size:
                x[i] += n

        add[4, 256](x, 5)
        assert (x.copy_to_host() == np.arange(1000) + 5).all()
        part = x[100:200]
        del x
        gc.collect()
        assert (part.copy_to_host() == np.arange(105, 205)).all()
        assert (before.copy_to_host() == np.arange(1000)).all()
        del part, before
        gc.collect()
        numba_cuda.synchronize()
        pool.trim()
        pool.trim()
        assert pool.stats().reserved_bytes == 0, pool.stats()
        free, total = numba_cuda.current_context().get_memory_info()
        assert 0 < free <= total
    """)


def test_out_of_memory_is_numbas():
    program(
        """
        arenapy_numba.use(pool)
        try:
            numba_cuda.device_array(100 << 20, "u1")
        except numba_cuda.cudadrv.driver.CudaAPIError as error:
            assert error.code == 2 and "max_bytes=67108864" in str(error), error
        else:
            raise SystemExit("it was not raised")
        assert numba_cuda.device_array(1 << 20, "u1").size == 1 << 20
        """,
        limit=64 << 20,
    )


def test_arrays_that_are_dropped_under_kernels():
    """A pool with room for one array: the next one gets its bytes, on another stream."""
    program(
        """
        arenapy_numba.use(pool)

        @numba_cuda.jit
        def fill(x, value, rounds):
            i = numba_cuda.grid(1)
            for r in range(rounds):
                for j in range(i, x.size, numba_cuda.gridsize(1)):
                    x[j] = value

        @numba_cuda.jit
        def count(x, value, wrong):
            i = numba_cuda.grid(1)
            for j in range(i, x.size, numba_cuda.gridsize(1)):
                if x[j] != value:
                    numba_cuda.atomic.add(wrong, 0, 1)

        small = arenapy.Pool(4 << 20, cuda.Device(), 4 << 20)
        wrong = numba_cuda.to_device(np.zeros(1, "i4"))
        arenapy_numba.use(small)
        streams = [numba_cuda.stream() for _ in range(3)]
        for i in range(300):
            stream = streams[i % 3]
            x = numba_cuda.device_array(3 << 20, "u1")
            fill[8, 128, stream](x, i % 200, 5)
            count[8, 128, stream](x, i % 200, wrong)
            del x
        numba_cuda.synchronize()
        assert wrong.copy_to_host()[0] == 0, wrong.copy_to_host()
        small.check()
        """
    )


def test_numbas_own_tests():
    """Those of its memory and its plugins, with a Pool as its memory manager."""
    tests = Path(importlib.util.find_spec("numba_cuda").origin).parent / "numba/cuda/tests"
    if not tests.is_dir():
        pytest.skip("this numba-cuda has no tests")
    pytest.importorskip("filecheck")
    names = (
        "test_emm_plugins", "test_cuda_memory", "test_cuda_ndarray", "test_cuda_devicerecord",
        "test_cuda_array_slicing", "test_deallocations", "test_host_alloc", "test_managed_alloc",
        "test_pinned", "test_streams", "test_context_stack", "test_reset_device",
        "test_select_device",
    )  # fmt: skip
    names = [one for one in names if (tests / f"cudadrv/{one}.py").is_file()]
    assert "test_emm_plugins" in names
    code = START.partition("from numba")[0] + "import unittest\nunittest.main(module=None)"
    done = subprocess.run(
        [sys.executable, "-c", code, "-q",
         *(f"numba.cuda.tests.cudadrv.{one}" for one in names)],
        env=os.environ | {"NUMBA_CUDA_MEMORY_MANAGER": "arenapy.interop.numba"},
        capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip
    print(done.stderr[-6000:])
    # It fills what the driver says that the array's allocation has, so more than the array.
    wrong = {"test_host_alloc_pinned"}
    assert set(re.findall(r"^(?:ERROR|FAIL): (\w+)", done.stderr, re.M)) <= wrong, done.stderr
    assert int(re.search(r"^Ran (\d+) tests", done.stderr, re.M)[1]) > 100
