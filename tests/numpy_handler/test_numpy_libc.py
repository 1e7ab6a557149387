"""`numpy_memory(libc="keep")`: glibc keeps what is freed, as long as anybody wants that.

What is set with mallopt is the process's, and glibc never quite forgets it: each test is a program.
Whether it is in force is read from a block of malloc's: glibc says in front of it if it is mapped.
"""

import os
import shlex
import subprocess
import sys
import sysconfig

import pytest
from hypothesis import settings

from arenapy import Pool, numpy_memory
from arenapy.linux.libc_malloc import foreign_malloc

glibc = pytest.mark.skipif(foreign_malloc() is not None, reason="malloc is not glibc's")

PRELUDE = """
import contextlib, ctypes, resource, sys, threading
import numpy as np
from arenapy import Pool, numpy_memory
from arenapy.linux import libc_malloc

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
LARGE = 48 << 20

def kept():
    '''Whether a large block comes from a heap, and not from the system for itself.'''
    block = libc.malloc(LARGE)
    mapped = ctypes.c_size_t.from_address(block - 8).value & 2
    libc.free(block)
    libc.malloc_trim(0)  # or the next one could come from the heap although mapping is on
    return not mapped

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def in_thread(act):
    found = []
    thread = threading.Thread(target=lambda: found.append(act()))
    thread.start()
    thread.join()
    return found[0]
"""


def test_arguments():
    pool = Pool(1 << 20)
    assert numpy_memory(pool).libc is None and "libc" not in repr(numpy_memory(pool))
    memory = numpy_memory(pool, libc="keep")
    assert memory.libc == "keep" and "libc='keep'" in repr(memory)
    for wrong in "Keep", "", True, "trim":
        with pytest.raises(ValueError, match=f"libc={wrong!r} is neither None nor 'keep'"):
            numpy_memory(pool, libc=wrong)


@glibc
@pytest.mark.no_sanitizer
@pytest.mark.full
def test_it_is_kept_while_anybody_wants_it(run_script):
    """Programs of everything that enters and leaves, in any order, beside those who do not ask."""
    run_script(
        PRELUDE
        + f"""
        from hypothesis import HealthCheck, event, given, settings, strategies as st

        OPTIONS = [{{}}, {{"libc": "keep"}}, {{"libc": "keep", "threads": True}},
                   {{"libc": "keep", "on_full": "error"}}, {{"threads": True}}]
        ACTIONS = ["enter", "leave", "install", "uninstall", "call", "raise", "generate", "thread"]

        class Planned(Exception):
            pass

        @settings(max_examples={4 * settings().max_examples}, deadline=None, database=None,
                  derandomize=True, suppress_health_check=list(HealthCheck))
        @given(st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, len(OPTIONS) - 1))))
        def programs(steps):
            pool = Pool(1 << 20)
            memories = [numpy_memory(pool, **options) for options in OPTIONS]
            entered, installed, generators = [], set(), []

            def right(more=()):
                held = [*entered, *installed, *more]
                wanted = sum(memories[at].libc is not None for at in held)
                assert libc_malloc.keepers() == wanted, (held, libc_malloc.keepers())
                assert kept() == (wanted > 0), held
                event(f"wanted by {{min(wanted, 3)}}")

            def work(at, error=None):
                right([at])
                if error:
                    raise error

            for action, at in steps:
                memory = memories[at]
                if action == "enter":
                    memory.__enter__()
                    entered.append(at)
                elif action == "leave" and (at in entered or at not in installed):
                    memory.__exit__(None, None, None)  # perhaps it was not entered: nothing
                    if at in entered:
                        entered.remove(at)
                elif action == "install" and at not in installed:
                    memory.install()
                    installed.add(at)
                elif action == "uninstall" and at in installed:
                    memory.uninstall()
                    installed.remove(at)
                elif action == "call":
                    memory(work)(at)
                elif action == "raise":
                    with contextlib.suppress(Planned):
                        memory(work)(at, Planned())
                elif action == "generate":
                    def numbers():
                        yield work(at)
                        yield work(at)
                    made = memory(numbers)()
                    next(made)
                    generators.append(made)
                elif action == "thread":
                    assert in_thread(kept) or not libc_malloc.keepers()
                right()
            for at in entered:
                memories[at].__exit__(None, None, None)
            for at in installed:
                memories[at].uninstall()
            entered.clear(), installed.clear()
            right()

        programs()
        """.replace("\n        ", "\n")
    )


SOLVE = """
few, many = np.eye(8) + 1, np.ones((8, 600_000))
square = np.random.default_rng(0).random((300, 300))

def calls():
    np.linalg.solve(few, many)  # workspace of 37 MiB
    np.linalg.svd(square)
    blocks = [libc.malloc(LARGE) for _ in range(2)]  # in a thread: more than one heap has room for
    for block in blocks[::-1]:
        ctypes.memset(block, 1, LARGE)
        libc.free(block)

def faults_of_calls():
    for _ in range(2):
        calls()
    before = faults()
    for _ in range(2):
        calls()
    return (faults() - before) / 2
"""


@glibc
@pytest.mark.no_sanitizer
@pytest.mark.parametrize("where", ["here", "in a thread"])
@pytest.mark.sampled
@pytest.mark.full
def test_workspaces_are_not_faulted_in_anew(run_script, where):
    """With it next to none; without it thousands, which is why it is there."""
    found = run_script(
        PRELUDE
        + SOLVE
        + f"""
run = {"in_thread" if where == "in a thread" else "lambda act: act()"}
with numpy_memory(Pool(), threads=True):
    print(run(faults_of_calls))
with numpy_memory(Pool(), threads=True, libc="keep"):
    print(run(faults_of_calls))
""",
        env={"OPENBLAS_NUM_THREADS": "1"},
    )
    without, kept = map(float, found.split())
    assert kept < 4 and without > kept + 15, found  # 19 huge pages where all memory is in them


@glibc
@pytest.mark.no_sanitizer
def test_afterwards_large_blocks_go_back_again(run_script):
    """To the system, at once or with the end of the heap; blocks below 32 MiB stay."""
    run_script(
        PRELUDE
        + """
def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

before = resident()
with numpy_memory(Pool(1 << 20), libc="keep"):
    block = libc.malloc(LARGE * 4)
    ctypes.memset(block, 1, LARGE * 4)
    libc.free(block)
    assert resident() - before > LARGE * 3, "kept"
block = libc.malloc(1 << 20)
libc.free(block)
assert resident() - before < LARGE, "the end of the heap was given back"
libc.malloc_trim(0)
assert not kept()
small = libc.malloc(31 << 20)
assert not ctypes.c_size_t.from_address(small - 8).value & 2
libc.free(small)
"""
    )


OTHER = """
#include <stdlib.h>
void *__libc_malloc(size_t n);
void *malloc(size_t n) { return __libc_malloc(n); }
int mallopt(int what, int value) { abort(); }
"""


def other_malloc(folder):
    source, library = folder / "other.c", folder / "libother.so"
    source.write_text(OTHER)
    compiler = shlex.split(os.environ.get("CC", "cc"))
    subprocess.run([*compiler, "-shared", "-fPIC", "-o", library, source], check=True)
    return library


@glibc
@pytest.mark.no_sanitizer
def test_another_malloc_is_left_alone_and_named(run_script, tmp_path):
    library = other_malloc(tmp_path)
    found = run_script(
        PRELUDE
        + """
memory = numpy_memory(Pool(1 << 20), libc="keep")
with memory:
    assert libc_malloc.keepers() == 1
    assert not kept()
with memory:
    pass
memory.install().uninstall()
print(memory)
print(libc_malloc.foreign_malloc())
""",
        env={"LD_PRELOAD": str(library)},
    )
    assert f"libc='keep' without effect: malloc is {library}'s" in found
    assert found.splitlines()[-1] == str(library)


STUB = """
#include <stdlib.h>
int Py_BytesMain(int n, char **words);
int main(int n, char **words) {
    void *(*volatile allocate)(size_t) = malloc;
    free(allocate(1));
    return Py_BytesMain(n, words);
}
"""


@glibc
@pytest.mark.no_sanitizer
def test_an_executable_with_a_stub_of_malloc(tmp_path):
    """As Debian's python3: at a fixed address, with code that takes the address of malloc."""
    folder, library = map(sysconfig.get_config_var, ("LIBDIR", "INSTSONAME"))
    python = os.path.join(folder, library)
    if ".so" not in library or not os.path.exists(python):
        pytest.skip("this Python has no shared library")
    source, program = tmp_path / "stub.c", tmp_path / "stub"
    source.write_text(STUB)
    compiler = shlex.split(os.environ.get("CC", "cc"))
    flags = ["-fno-pie", "-no-pie", f"-Wl,-rpath,{folder}"]
    subprocess.run([*compiler, *flags, "-o", program, source, python], check=True)
    environment = {
        **os.environ, "PYTHONHOME": sys.base_prefix, "PYTHONPATH": os.pathsep.join(sys.path)
    }  # fmt: skip

    def run(text, **more):
        done = subprocess.run(
            [program, "-c", PRELUDE + text], env={**environment, **more},
            capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout

    run("""
at = ctypes.cast(libc.malloc, ctypes.c_void_p).value
first = min(int(line.partition("-")[0], 16) for line in open("/proc/self/maps"))
assert first <= at < first + (1 << 20), "there is no stub"
with numpy_memory(Pool(1 << 20), libc="keep"):
    assert kept()
""")
    found = run("print(libc_malloc.foreign_malloc())", LD_PRELOAD=str(other_malloc(tmp_path)))
    assert found == f"{tmp_path / 'libother.so'}\n"


def test_arrays_are_the_pools_all_the_same(run_script):
    """Also where it has no effect: under a sanitizer, say."""
    run_script(
        """
        import numpy as np
        from arenapy import Pool, handles, numpy_memory

        pool = Pool(8 << 20)
        with numpy_memory(pool, libc="keep"):
            assert handles(np.ones(1000)).allocator is pool
            large = np.ones(16 << 20, "u1")  # libc's
        assert handles(large) is None and large.all() and handles(np.ones(1000)) is None
        """
    )
