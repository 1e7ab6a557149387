"""Every call of the system and of the C library that can fail is made to, one at a time.

`fault_operations` says what is done, `fault_runner` which errors a call has, `fault_table` what
comes of it. After each failure the allocator passes its check, a call that raised changed nothing,
the same done again succeeds, and no mapping, block, descriptor or lock is left behind.
"""

import errno
import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from cuda_support import MIB, a_gpu, new_stream
from fault_operations import OPERATIONS
from fault_runner import attempt, calls_of, errors_of
from fault_table import CANNOT_FAIL, ERRORS, TABLE
from faults import FAILED, PACKAGE, PYTHON_CALLS, SYSCALLS, Faults, compiled
from injection import is_one_of, row_of

from arenapy import File, Pool, cuda
from arenapy.linux import vm

pytestmark = [
    # It replaces mlock, and maps and allocates for itself by what is failed here.
    pytest.mark.no_sanitizer,
]

#: Of what all tests here have injected, for those that ask whether nothing was left out.
injected = Counter()
rows_used = set()


@pytest.fixture(scope="module")
def faults(tmp_path_factory):
    return Faults(compiled(tmp_path_factory.mktemp("faults")))


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.sampled
def test_each_call_can_fail(faults, tmp_path, name):
    wrong = []
    for call, count in calls_of(faults, name, tmp_path).items():
        for nth in range(count):
            for error in errors_of(name, call, nth):
                at = f"{call} {nth} {error}"
                row = row_of(TABLE, name, call, error)
                outcome = attempt(faults, name, tmp_path, call, nth, error)
                problems = list(outcome.problems)
                if row is None:
                    problems.append("the table has no row for it")
                elif not outcome.failed:
                    # How much too much address space is given back depends on where it lay.
                    if call != "munmap":
                        problems.append("it was not called this time")
                elif not is_one_of(TABLE[row].outcomes, outcome.error, outcome.text):
                    problems.append(f"{outcome[:2]} and not one of {TABLE[row].outcomes}")
                if outcome.failed:
                    injected[call] += 1
                    rows_used.add(row)
                wrong += [f"{at}: {problem}" for problem in problems]
    assert not wrong, "\n".join(wrong)


@pytest.mark.full
def test_calls_of_the_first_use(tmp_path):
    """Of the import, too: each in a process that has not done it yet."""
    script = Path(__file__).with_name("fault_first_use.py")
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", str(script), str(compiled(tmp_path))],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    wrong = []
    for line in done.stdout.splitlines():
        call, _nth, error, failed, exception, text = json.loads(line)
        row = row_of(TABLE, "first use", call, error)
        if row is None or not failed or not is_one_of(TABLE[row].outcomes, exception, text):
            wrong.append(line)
        injected[call] += 1
        rows_used.add(row)
    assert not wrong, "\n".join(wrong)
    assert {"strdup", "__register_atfork", "membarrier"} <= {*injected}


def test_every_function_that_is_imported_is_known(faults):
    """A new one has to be failed, or to be named among those that cannot fail, with the reason."""
    modules = [str(path) for path in Path(PACKAGE).rglob("*.so")]
    assert len(modules) > 40
    command = ["nm", "--dynamic", "--undefined-only", *modules]
    listing = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    words = [line.split() for line in listing.splitlines() if line.startswith(" ")]
    imported = {plain(name.partition("@")[0]) for kind, name in words if kind == "U"}
    ours = {name for name in imported if not re.match("_?Py|__(asan|ubsan|gcov|sanitizer)_", name)}
    harmless = [name for names in CANNOT_FAIL.values() for name in names]
    assert ours <= {*faults.functions, *harmless}
    assert not set(harmless) & set(faults.fallible())
    assert set(faults.fallible()) - SELDOM <= ours  # none that is not there any more


def plain(name):
    """As the source has it: distributions make some calls fortified, or of a C standard."""
    found = re.fullmatch(r"__isoc\d+_(\w+)|__(\w+)_chk", name)
    return (found[1] or found[2]) if found else name


#: Only free-threaded builds call them, or only where a call before them failed too.
SELDOM = {"posix_memalign", "pthread_key_create", "pthread_setspecific"}


@pytest.mark.long
def test_nothing_is_left_out(faults, request):
    """Each function was failed in some operation, and each row says what came of some failure."""
    run = [item.name for item in request.session.items if item.path == request.path]
    if len(run) < len(OPERATIONS):
        pytest.skip("only some of the operations were run")
    assert {*ERRORS} - SELDOM <= {*injected}
    functions = {name.removesuffix("64") for name in faults.fallible()}
    assert functions - {"syscall"} <= {call.partition("(")[0] for call in ERRORS}
    assert {*PYTHON_CALLS, *SYSCALLS.values()} - {"futex"} <= {*ERRORS}
    unused = [TABLE[i] for i in range(len(TABLE)) if i not in rows_used]
    assert [row for row in unused if not set(row.calls.split("|")) <= SELDOM] == []
    print(sum(injected.values()), "faults:", dict(injected))


def test_a_file_is_locked_although_a_signal_interrupts_that(faults, tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(4096))
    with faults.noting(), faults.armed("fcntl(OFD_SETLK)", 0, errno.EINTR):
        region = File(path, "r+").region()
    with open(path, "rb") as file:
        assert vm.first_lease(file.fileno(), 0, (1 << 63) - 1) == (1 << 62, 1)
    del region


@pytest.mark.parametrize("nth", range(3))
@pytest.mark.full
def test_a_stream_gets_its_first_blocks_without_memory_for_their_records(faults, nth):
    """There is the block without the others that come with it, or an error. None is lost."""
    with a_gpu() as gpu:
        pool, s = Pool(4 * MIB, cuda.Device()), new_stream(gpu)
        pool.alloc(300).release()
        block = None
        with faults.noting(), faults.armed("realloc", nth, errno.ENOMEM):
            try:
                block = pool.alloc(300, stream=s)
            except MemoryError:
                assert nth == 0
            failed = sum(call.state == FAILED for call in faults.armed_calls())
        assert failed == (nth < 2)
        assert pool.stats().active_allocations == (block is not None)
        pool.check()
        del block
        pool.trim(), gpu.drain(), pool.trim()
        assert pool.stats().reserved_bytes == 0
