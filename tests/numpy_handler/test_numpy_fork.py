"""Arrays under `numpy_memory` in a forked child: its own, the parent's, or not there.

Every program runs in an interpreter of its own, as in test_fork.py.
"""

import pytest
from test_numpy_exit import HOLD
from test_numpy_exit import MAKE as SOURCES
from test_numpy_exit import PRELUDE as START

pytestmark = [pytest.mark.sampled, pytest.mark.no_sanitizer]

MAKE = SOURCES | {
    "skipped": "pool = Pool(64 << 20, Host(fork='skip'))",
    "not for children": """
import mmap
private = mmap.mmap(-1, 256 << 20, flags=mmap.MAP_PRIVATE)
private.madvise(mmap.MADV_DONTFORK)
pool = Pool(source=Existing(private))
""",
}
PRELUDE = (
    START
    + """
def in_child(function):
    '''Run `function` in a forked child, which ends in good order; its failure is the parent's.'''
    child = os.fork()
    if not child:
        try:
            function()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        sys.exit(0)
    assert os.waitpid(child, 0)[1] == 0, "the child failed"
"""
)


@pytest.fixture
def program(run_script, make):
    """Run a program that has what `HOLD` has, of what `MAKE` makes."""
    return lambda source="", **how: run_script(PRELUDE + MAKE[make] + HOLD + source, **how)


@pytest.mark.parametrize("make", ["host", "limited", "hooked", "existing"])
def test_over_host_memory_the_child_has_its_own_copy(program):
    program("""
def child():
    assert well(array) and not zeros[::1000].any() and texts[0] == "short"
    array[:] = 0
    with memory:
        more = [ramp(n) for n in (10, 1000, 30_000)]
    assert all(map(well, more)) and handles(more[0]).allocator is pool
    array.resize(5000, refcheck=False)
    texts[2] = "new " * 99
    pool.check()
in_child(child)
assert well(array)
with memory:
    assert well(ramp(1000))
pool.check()
""")


@pytest.mark.parametrize("make", ["shared", "skipped", "not for children"])
@pytest.mark.parametrize("installed", [False, True])
def test_where_the_pool_is_closed_the_child_has_libcs_memory(program, installed):
    program(f"""
installed = {installed}
if installed:
    memory.install()
def make():
    with memory:
        return [ramp(1), ramp(1000), ramp(100_000), np.zeros(1000), np.zeros(5 << 20)]
def child():
    before = memory.stats()
    more = make() + ([ramp(1000)] if installed else [])
    assert all(well(one) for one in more[:3]) and not more[3].any()
    assert all(handles(one) is None for one in more)
    assert memory.stats().system_allocations >= before.system_allocations + 4
    more[1].resize(2000, refcheck=False)
    assert well(more[1][:1000]) and not more[1][1000:].any()
    more.clear()
    assert memory.stats().system_live == before.system_live
    # Those of objects and strings stay: NumPy writes to what they have before it frees them.
    del globals()["array"], globals()["view"], globals()["large"]
    os._exit(0)
in_child(child)
if installed:
    memory.uninstall()
assert well(array) and (large == 1).all() and texts[1] == "long " * 100
with memory:
    one = ramp(1000)
assert well(one) and handles(one).allocator is pool
array[:] += 1
del array, view, large, texts, things, one
pool.check()
""")


@pytest.mark.parametrize("make", ["shared"])
def test_over_shared_memory_the_child_sees_the_parents_array(program):
    program("""
def child():
    assert well(array)
    array[0] = 77
    try:
        array.resize(5000, refcheck=False)
    except (MemoryError, ValueError):
        pass
    else:
        assert array[0] == 77 and (array[1:1000] == ramp(1000)[1:]).all()
    os._exit(0)
in_child(child)
assert array[0] == 77 and (array[1:] == ramp(1000)[1:]).all() and array.size == 1000
""")


@pytest.mark.parametrize("make", ["skipped"])
def test_where_a_skipped_array_was_nothing_else_comes_to_lie_in_the_child(program):
    """Else the child would see, and write to, its own memory through the parent's array."""
    program("""
def child():
    kept = [np.empty(n, "u1") for n in (1 << 18, 1 << 20, 1 << 22, 1 << 24, 60 << 20)]
    with memory:
        kept += [np.zeros(n, "u1") for n in (1 << 18, 1 << 20, 1 << 22, 1 << 24, 60 << 20)]
    for one in kept:
        start = one.ctypes.data
        assert start + one.nbytes <= region.address or start >= region.address + region.nbytes
    os._exit(0)
in_child(child)
assert well(array)
""")


@pytest.mark.parametrize("make", ["skipped"])
def test_a_skipped_array_cannot_be_resized_in_the_child(program):
    """Its bytes are not there: an error, not a crash."""
    program("""
def child():
    try:
        array.resize(5000, refcheck=False)
    except MemoryError:
        pass
    else:
        raise AssertionError("resized what is not there")
    os._exit(0)
in_child(child)
assert well(array)
""")


@pytest.mark.parametrize("source", ["Host()", "Shared()", "Shared(grow=True)", "Host(fork='skip')"])
def test_a_handler_alone_takes_no_pool_from_a_child(run_script, source):
    run_script(
        PRELUDE
        + f"""
pool = Pool(64 << 20, {source})
memory = numpy_memory(pool)
def child():
    with memory:
        array = ramp(1000)
    assert well(array) and handles(array).allocator is pool
in_child(child)
"""
    )


@pytest.mark.parametrize("source", ["Host()", "Shared()", "Host(fork='skip')"])
def test_the_child_of_a_busy_program_is_not_locked(run_script, source):
    run_script(
        PRELUDE
        + f"pool = Pool(64 << 20, {source})"
        + """
stop = threading.Event()
memory = numpy_memory(pool)
def work():
    while not stop.is_set():
        with memory:
            assert well(ramp(1000)) and well(ramp(90_000))
def child():
    # No ufunc: without a GIL NumPy itself has a lock that another thread may hold at the fork.
    with memory:
        for n in (10, 200_000):
            array = np.empty(n, "u1")
            array.fill(7)
            assert array.tobytes() == b"\\7" * n and np.zeros(n).tobytes() == bytes(8 * n)
threads = [threading.Thread(target=work) for _ in range(3)]
for thread in threads:
    thread.start()
try:
    for _ in range(10):
        pid = os.fork()
        if not pid:
            try:
                child()
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
finally:
    stop.set()
    for thread in threads:
        thread.join()
pool.check()
""",
        quiet=False,
    )
