"""On a real GPU: blocks that are allocated in a capture, whose graph is launched many times."""

import gc
import time

import pytest
from cuda_support import until
from real_gpu import content, done, judge
from test_gpu_graphs import GLOBAL, RELAXED, THREAD_LOCAL, begin, destroy, end, launch

from arenapy import Pool, Slab, cuda

KIB, MIB = 1 << 10, 1 << 20
LAUNCHES = 1000
BLOCK = 256 * KIB
N = 8  # blocks of a graph
SOURCES = {"device": cuda.Device, "driver pool": cuda.DriverPool}


class Named:
    """A stream of the driver's alone."""

    def __init__(self, handle):
        self.handle = handle

    def __cuda_stream__(self):
        return 0, self.handle


def fill_and_count(gpu, pool, stream, n=N, allocate_for=None):
    """In a capture: n blocks are written, then checked, and dropped in the middle of it; where."""
    allocate_for = allocate_for or stream
    blocks = [pool.alloc(BLOCK, stream=allocate_for) for _ in range(n)]
    addresses = [block.address for block in blocks]
    for i, block in enumerate(blocks):
        gpu.write_slowly(stream, block.address, BLOCK, i)
    for i, block in enumerate(blocks):
        gpu.count_wrong(stream, block.address, BLOCK, i)
    return addresses


@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.parametrize("blocking", [False, True])
def test_a_thousand_launches_beside_other_streams(gpu, blocking, safe):
    """Which allocate, write and drop meanwhile; and the pool is trimmed. Of memory that was
    allocated for another stream nobody knows that the graph has it."""
    captured = Named(gpu.stream(blocking=True)) if blocking else cuda.Stream()
    others = [cuda.Stream(), cuda.Stream(), 1]
    # A blocking stream's capture bars the legacy stream, on which a pool allocates for all others.
    pool = Pool(64 * MIB, cuda.Device(), stream=None if safe else others[1])
    begin(gpu, captured, GLOBAL if safe else RELAXED)
    addresses = fill_and_count(gpu, pool, captured, allocate_for=None if safe else others[0])
    again = fill_and_count(gpu, pool, captured) if safe else addresses
    assert {*again} == {*addresses}, "the second half of the capture has the bytes of the first"
    graph, executable = end(gpu, captured)
    for i in range(LAUNCHES):
        launch(gpu, executable, captured)
        for k, other in enumerate(others):
            block = pool.alloc(BLOCK, stream=other)
            assert not safe or block.address not in addresses
            gpu.write_slowly(other, block.address, BLOCK, 1000 + k)
            del block
        if i % 100 == 0 and safe:
            pool.trim(), pool.check()
    gpu.synchronize()
    judge(gpu, safe)
    destroy(gpu, graph, executable)
    gpu.synchronize()
    until(lambda: not pool.stats().pending_bytes)
    pool.check()


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("mode", [GLOBAL, THREAD_LOCAL, RELAXED])
@pytest.mark.parametrize("blocking", [False, True])
def test_a_pool_grows_in_a_capture(gpu, blocking, mode, source):
    captured = Named(gpu.stream(blocking=True)) if blocking else cuda.Stream()
    pool = Pool(None, SOURCES[source]())
    begin(gpu, captured, mode)
    addresses = fill_and_count(gpu, pool, captured, 100)
    assert len({*addresses}) == 100
    graph, executable = end(gpu, captured)
    for _ in range(10):
        launch(gpu, executable, captured)
    assert gpu.how_many_wrong() == 0
    destroy(gpu, graph, executable)
    gpu.synchronize()
    until(lambda: not pool.stats().pending_bytes)


@pytest.mark.parametrize("when", ["before the launch", "afterwards", "in the next capture"])
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize(
    "make", [Pool, lambda nbytes, source: Slab(BLOCK, nbytes // BLOCK, source)]
)
def test_a_program_that_asks_only_in_captures(gpu, make, source, when):
    """Of one stream: it is captured whenever the allocator looks for what is over. Room for 16
    blocks: the driver says of a graph that it is gone some time after it is."""
    captured, one, block = cuda.Stream(), make(4 * MIB, SOURCES[source]()), None
    for i in range(300):
        begin(gpu, captured)
        block = None
        try:
            block = one.alloc(BLOCK, stream=captured)
        except BaseException:
            end(gpu, captured)  # else all later tests would be in the capture
            raise
        gpu.write_slowly(captured, block.address, BLOCK, i)
        gpu.count_wrong(captured, block.address, BLOCK, i)
        block.fill(1, stream=captured)
        graph, executable = end(gpu, captured)
        if when == "before the launch":
            block = None
        launch(gpu, executable, captured)
        destroy(gpu, graph, executable)
        gpu.synchronize()
        time.sleep(0.003)
        if when == "afterwards":
            block = None
    assert gpu.how_many_wrong() == 0
    one.check()


@pytest.mark.parametrize("blocking", [False, True])
@pytest.mark.parametrize("safe", [True, False])
def test_a_graph_comes_after_who_had_its_bytes(gpu, safe, blocking):
    """On the allocator's own stream, the legacy one, which a capture of a blocking stream bars. The
    graph is launched on a stream that waits for nobody."""
    captured, other = Named(gpu.stream(blocking=blocking)), cuda.Stream()
    pool = Pool(2 * MIB, cuda.Device(), 2 * MIB)
    for i in range(3):
        former = pool.alloc(2 * MIB)
        address = former.address
        gpu.write_slowly(1, address, BLOCK, 0xBAD, 100_000)
        if safe:
            former.release()
        begin(gpu, captured)
        block = pool.alloc(2 * MIB, stream=captured) if safe else None
        assert block is None or block.address == address
        gpu.write_slowly(captured, address, BLOCK, i)
        graph, executable = end(gpu, captured)
        launch(gpu, executable, other)
        gpu.synchronize()
        gpu.count_wrong(other, address, BLOCK, i)
        gpu.synchronize()
        destroy(gpu, graph, executable)
        del former, block
        gpu.synchronize()
        until(lambda: not pool.stats().pending_bytes)
    judge(gpu, safe)


@pytest.mark.alone
def test_a_graph_that_outlives_its_pool(gpu):
    stream = cuda.Stream()
    pool = Pool(None, cuda.Device())
    begin(gpu, stream)
    fill_and_count(gpu, pool, stream)
    graph, executable = end(gpu, stream)
    del pool
    gc.collect()
    other = Pool(None, cuda.Device())
    for i in range(LAUNCHES):
        launch(gpu, executable, stream)
        block = other.alloc(BLOCK)
        gpu.write_slowly(1, block.address, BLOCK, i)
        del block
        if i % 100 == 0:
            gc.collect(), other.stats(), other.trim()
    assert gpu.how_many_wrong() == 0
    before = cuda.memory_info().free_bytes
    destroy(gpu, graph, executable)
    gpu.synchronize()
    until(lambda: other.stats() and cuda.memory_info().free_bytes > before)


def test_an_executable_graph_that_is_updated(gpu):
    """It has the blocks of the graph that it was updated from, and no longer those of the first."""
    stream = cuda.Stream()
    pool = Pool(None, cuda.Device())
    graphs = []
    for value in range(2):
        begin(gpu, stream)
        block = pool.alloc(2 * MIB, stream=stream)
        gpu.write_slowly(stream, block.address, BLOCK, value)
        gpu.count_wrong(stream, block.address, BLOCK, value)
        del block
        graphs.append(done(gpu.driver.cuStreamEndCapture(stream.handle)))
    executable = done(gpu.driver.cuGraphInstantiate(graphs[0], 0))
    launch(gpu, executable, stream)
    done(gpu.driver.cuGraphExecUpdate(executable, graphs[1]))
    launch(gpu, executable, stream)
    for graph in graphs:
        done(gpu.driver.cuGraphDestroy(graph))
    gpu.synchronize()
    until(lambda: pool.stats().pending_bytes == 2 * MIB)
    for i in range(100):
        launch(gpu, executable, stream)
        block = pool.alloc(2 * MIB)
        gpu.write_slowly(1, block.address, BLOCK, 1000 + i)
        del block
    assert gpu.how_many_wrong() == 0
    done(gpu.driver.cuGraphExecDestroy(executable))
    gpu.synchronize()
    until(lambda: not pool.stats().pending_bytes)


def test_streams_that_join_a_capture(gpu):
    """Each has blocks of its own: in the graph they may run at the same time."""
    streams = [cuda.Stream(), cuda.Stream()]
    pool = Pool(None, cuda.Device())
    begin(gpu, streams[0], RELAXED)
    streams[1].wait(streams[0].record())
    addresses = [{*fill_and_count(gpu, pool, stream)} for stream in streams * 2]
    assert addresses[0] == addresses[2] and addresses[1] == addresses[3]
    assert not addresses[0] & addresses[1]
    streams[0].wait(streams[1].record())
    graph, executable = end(gpu, streams[0])
    for _ in range(LAUNCHES):
        launch(gpu, executable, streams[0])
    assert gpu.how_many_wrong() == 0
    destroy(gpu, graph, executable)
    gpu.synchronize()
    until(lambda: not pool.stats().pending_bytes)


def test_a_result_that_outlives_the_capture(gpu):
    stream = cuda.Stream()
    pool = Pool(None, cuda.Device())
    begin(gpu, stream)
    block = pool.alloc(BLOCK, stream=stream)
    block.fill(0, stream=stream)
    gpu.add_to(stream, block.address, BLOCK, 7)
    graph, executable = end(gpu, stream)
    launch(gpu, executable, stream)
    stream.synchronize()
    assert (content(block, "u4") == 7).all()
    destroy(gpu, graph, executable)
    assert (content(block, "u4") == 7).all()


@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
def test_cuda_core_builds_a_graph(gpu, core, mode):
    """By its GraphBuilder, whose Buffers come from a pool."""
    device = core.Device(0)
    stream, other = device.create_stream(), device.create_stream()
    pool = Pool(None, cuda.Device())
    resource = cuda.memory_resource(pool)
    builder = stream.create_graph_builder() if mode != "global" else device.create_graph_builder()
    builder.begin_building(mode)
    handles = set()
    for i in range(20):
        buffer = resource.allocate(BLOCK, stream=builder)
        address = int(buffer.handle)
        handles.add(address)
        gpu.write_slowly(int(builder.stream.handle), address, BLOCK, i)
        gpu.count_wrong(int(builder.stream.handle), address, BLOCK, i)
        buffer.close(builder)
    assert len(handles) <= 2
    graph = builder.end_building().complete()
    for i in range(LAUNCHES):
        graph.launch(stream)
        buffer = resource.allocate(BLOCK, stream=other)
        assert int(buffer.handle) not in handles
        gpu.write_slowly(int(other.handle), int(buffer.handle), BLOCK, 1000 + i)
        buffer.close(other)
    assert gpu.how_many_wrong() == 0
    graph.close(), builder.close()
    gpu.synchronize()
    until(lambda: not pool.stats().pending_bytes)


def test_the_benchmark_runs(gpu):
    from asv_benches.gpu import bench_graphs

    lines = list(bench_graphs.report(quick=True))
    assert lines and all(line.value > 0 for line in lines)
