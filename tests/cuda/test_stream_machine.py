"""`arenapy.testing` attacks arenapy's allocators of CUDA memory, on the simulated driver."""

import ctypes

import pytest
from cuda_support import HOST_VISIBLE, SOURCES, a_gpu
from driver_streams import DriverStreams
from gpu_machines import (
    OwnBump,
    OwnPool,
    OwnSlab,
    PlainBump,
    PlainPool,
    PlainSlab,
    UntoldPool,
    own_kind,
    streamed,
)
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

ROOM = 1 << 30


class SimulatedGpu:
    """What machines for a GPU need of one."""

    def __init__(self, driver):
        self.driver = driver

    def streams_for(self, machine, make_stream):
        return DriverStreams(self.driver)

    def upload(self, address, data):
        self.driver.drain()
        ctypes.memmove(address, data, len(data))

    def download(self, address, nbytes):
        self.driver.drain()
        return ctypes.string_at(address, nbytes)

    def synchronize(self):
        self.driver.drain()


def run(machine, **options):
    few = max(10, settings.default.max_examples // 4)
    how = settings(max_examples=few, stateful_step_count=30, **options)
    run_state_machine_as_test(machine, settings=how)
    assert machine.tally.steps > 100


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("machine", [PlainBump, PlainSlab, PlainPool])
@pytest.mark.sampled
def test_contents(machine, source):
    with a_gpu(leaks=True) as driver:  # Hypothesis keeps the class, and so the source
        body = {"gpu": SimulatedGpu(driver), "host": source in HOST_VISIBLE}
        run(type(machine.__name__, (machine,), {**body, "source": SOURCES[source]()}))


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("kind", [OwnBump, OwnSlab, OwnPool])
@pytest.mark.sampled
def test_streams(kind, source):
    with a_gpu() as driver:
        made = own_kind(kind, SOURCES[source], host=source in HOST_VISIBLE)
        run(streamed(made, SimulatedGpu(driver), kind.__name__))


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.full
def test_a_pool_that_is_told_of_no_stream_is_found(source):
    with a_gpu(leaks=True) as driver:
        driver.memory.sizes = ROOM, ROOM  # a failure's traceback keeps its pool
        made = own_kind(UntoldPool, SOURCES[source], host=source in HOST_VISIBLE)
        machine = streamed(made, SimulatedGpu(driver), "UntoldPool")
        with pytest.raises(AssertionError, match=r"does not come after|is to use it|was freed"):
            run(machine, phases=[Phase.generate])
        machine.tally.findings.clear()  # Hypothesis keeps the class
        driver.drain()
        driver.errors.clear()  # which it made
