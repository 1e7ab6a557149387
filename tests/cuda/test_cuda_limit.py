"""At the limit of an allocator: what becomes free at the very moment, and what is in lanes.

A call of the driver is the moment at which something else happens (`before_call`): another stream
gets done, or another thread lets go.
"""

import itertools
import re

import pytest
from cuda_support import (
    LEGACY,
    MIB,
    backwards,
    content,
    let_wait,
    new_stream,
    sample,
    samples,
    slowly_fill,
)
from helpers import in_threads

from arenapy import Bump, Host, OutOfMemory, Pool, Slab, cuda

ONES = {
    "bump": lambda source: Bump(2 * MIB, source),
    "bump that may grow": lambda source: Bump(2 * MIB, source, max_bytes=4 * MIB),
    "slab": lambda source: Slab(2 * MIB, 1, source),
    "slab that may grow": lambda source: Slab(2 * MIB, 1, source, max_count=4),
    "pool": lambda source: Pool(2 * MIB, source, 2 * MIB),
    "pool that may grow": lambda source: Pool(64 * MIB, source, 2 * MIB),
}


class Moment:
    """Does something before the n-th call of the driver from now."""

    def __init__(self, driver, n, what):
        self.left, self.what = n, what
        driver.before_call = self

    def __call__(self, name):
        self.left -= 1
        if self.left == 0:
            self.what()


@pytest.mark.parametrize("name", ONES)
@pytest.mark.parametrize("host", [False, True])
def test_a_stream_that_is_done_at_any_moment(gpu, name, host):
    """The whole of it is at work, and then it is not: never is that an error."""
    source, s = cuda.Managed() if host else cuda.Device(), new_stream(gpu)
    one = ONES[name](source)
    gpu.fails["cuMemAlloc"] = gpu.fails["cuMemAllocManaged"] = 2  # out of memory
    for n in itertools.count(1):
        b = one.alloc(2 * MIB)
        b.record_stream(s)
        slowly_fill(gpu, s, b, 1)
        if isinstance(one, Bump):
            b.release()
        del b
        moment = Moment(gpu, n, gpu.drain)
        one.alloc(2 * MIB).release()
        gpu.before_call = None
        gpu.drain()
        if moment.left > 0:  # it was over before
            break
    assert n > 3
    one.check()


@pytest.mark.parametrize("name", ["slab", "pool"])
@pytest.mark.parametrize(
    ("most", "call"), [(2, "cuStreamWaitEvent"), (64, "cuStreamWaitEvent"), (64, "cuMemAlloc")]
)
def test_a_block_that_another_thread_lets_go_of(gpu, name, most, call):
    """While this one asks for more memory in vain, or for a stream to wait."""
    one = {
        "slab": lambda source: Slab(MIB, 2, source, max_count=most),
        "pool": lambda source: Pool(most * MIB, source, 2 * MIB),
    }[name](cuda.Device())
    kept, pending, s = one.alloc(MIB), one.alloc(MIB), new_stream(gpu)
    pending.record_stream(s)
    slowly_fill(gpu, s, pending, 1)
    del pending
    gpu.fails.update(cuMemAlloc=2, cuStreamWaitEvent=400)
    with pytest.raises(OutOfMemory):
        one.alloc(MIB)
    address = kept.address

    def before(name):
        if name == call and not kept.closed:
            in_threads(kept.release)

    gpu.before_call = before
    assert one.alloc(MIB).address == address
    gpu.before_call = None
    one.check()


def test_a_callback_that_frees_and_says_that_it_did_not(gpu):
    kept, asked = [], []

    def free(nbytes):
        asked.append(nbytes)
        kept.clear()

    pool = Pool(2 * MIB, cuda.Device(), on_oom=free)
    kept.append(pool.alloc(2 * MIB))
    assert pool.alloc(2 * MIB).nbytes == 2 * MIB
    assert asked == [2 * MIB]


# Stream caches ------------------------------------------------------------------------------


@pytest.mark.parametrize("who", ["own", "another"])
def test_what_is_pending_in_a_lane_is_waited_for(gpu, who):
    """A block of one stream's, that a second one still reads, when a third one needs the memory."""
    s, t, other = new_stream(gpu), new_stream(gpu), new_stream(gpu)
    pool = Pool(8 * MIB, cuda.Device())
    b = pool.alloc(7 * MIB, stream=s)
    b.fill(1, stream=s)
    let_wait(gpu, t, s)
    seen = samples(gpu, t, b)
    b.record_stream(t)
    del b
    stream = other if who == "another" else LEGACY
    again = pool.alloc(7 * MIB, stream=None if who == "own" else other)
    assert gpu.queue, "streams wait, and not the caller"
    slowly_fill(gpu, stream, again, 2)
    backwards(gpu)
    assert seen == [{1}] and sample(content(again)) == {2}
    pool.check()


def test_what_is_pending_in_a_lane_is_no_error_at_any_moment(gpu):
    s, t = new_stream(gpu), new_stream(gpu)
    pool = Pool(8 * MIB, cuda.Device())
    for n in itertools.count(1):
        b = pool.alloc(7 * MIB, stream=s)
        b.record_stream(t)
        slowly_fill(gpu, t, b, 1)
        del b
        moment = Moment(gpu, n, gpu.drain)
        pool.alloc(7 * MIB).release()
        gpu.before_call = None
        gpu.drain()
        if moment.left > 0:
            break
    pool.check()
    pool.trim()
    assert pool.stats().pending_bytes == 0


@pytest.mark.parametrize(
    ("source", "nbytes"),
    [(cuda.Device, 64), (cuda.Device, 4096), (cuda.Device, 3 * MIB), (Host, 3 * MIB)],
)
def test_a_limit_below_one_region_says_what_to_set(gpu, source, nbytes):
    with pytest.raises(OutOfMemory, match="more than max_bytes") as error:
        Pool(4096, source()).alloc(nbytes)
    enough = int(re.search(r"set it to (\d+) or more", str(error.value))[1])
    assert Pool(enough, source()).alloc(nbytes).nbytes == nbytes
    if source is cuda.Device:
        assert enough % (2 * MIB) == 0
