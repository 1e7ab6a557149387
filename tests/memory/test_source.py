"""Sources: what each option does, read back from the kernel, and each error.

Limits that cannot be lowered for one test alone are lowered in a process of their own.
"""

import copy
import ctypes
import errno
import gc
import os
import pickle
import re
import resource
import signal
import threading
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from children import in_child
from kernel_view import (
    OWN_FAULTS,
    closed_in_child,
    faults_of,
    is_mapped,
    nothing_leaks,
    numa_map,
    resident,
    vm_flags,
    write_pages,
)

from arenapy.errors import OutOfMemory

# The package's attribute of this name is the function.
from arenapy.linux import limits as memory_info
from arenapy.linux import vm
from arenapy.linux.limits import HugePool, Limit
from arenapy.memory import host_request as request
from arenapy.memory.region import Region
from arenapy.memory.sources import Existing, File, Host, Shared, Source

MIB = 1 << 20
PAGE = vm.PAGE_SIZE
PREFAULTING = [Host(), Host(huge_pages=None), Shared(), Shared(huge_pages=None)]


def assert_prefaulted(region):
    """Each page is there, and may be written: not the shared page of zeros, as after a read."""
    assert resident(region.address, region.nbytes) == -(-region.nbytes // PAGE) * PAGE
    assert faults_of(write_pages, region.address, region.nbytes) <= OWN_FAULTS


def content(region, nbytes=None):
    return ctypes.string_at(region.address, nbytes or region.nbytes)


@pytest.fixture(name="nothing_leaks")
def _nothing_leaks(monkeypatch):
    with nothing_leaks(monkeypatch):
        yield


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "data.bin"
    path.write_bytes(bytes(range(256)) * 64)
    return path


# ---- every source


@pytest.mark.parametrize("source", [*PREFAULTING, Existing(bytearray(1)), File("x")], ids=repr)
def test_is_a_source(source):
    assert isinstance(source, Source)


@pytest.mark.parametrize("source", PREFAULTING, ids=repr)
@pytest.mark.parametrize("nbytes", [1, PAGE + 1, 3 * MIB + 5])
@pytest.mark.no_sanitizer
def test_region_is_prefaulted_and_as_large_as_asked(source, nbytes):
    region = source.region(nbytes)
    assert isinstance(region, Region)
    assert region.nbytes == nbytes
    assert region.page_size == PAGE
    assert region.address % PAGE == 0
    assert region.kind == type(source).__name__.lower()
    assert not region.readonly
    assert_prefaulted(region)
    assert not content(region).strip(b"\0x")


@pytest.mark.parametrize("source", [Host(prefault=False), Shared(prefault=False)], ids=repr)
def test_without_prefault_pages_come_on_touch(source):
    region = source.region(64 * PAGE)
    # A fault may map several pages.
    assert faults_of(write_pages, region.address, region.nbytes) >= 4


@pytest.mark.parametrize(
    ("nbytes", "error"),
    [
        (0, ValueError),
        (-1, ValueError),
        (1 << 63, ValueError),
        (1 << 100, ValueError),
        (1.0, TypeError),
        ("1", TypeError),
        (True, TypeError),
    ],
)
@pytest.mark.parametrize("make", [Host, Shared, lambda: Existing(bytearray(9)), None])
def test_bad_size_names_it(make, nbytes, error, path):
    source = make() if make else File(path)
    with pytest.raises(error, match=re.escape(f"nbytes={nbytes!r}")):
        source.region(nbytes)


def test_numpy_ints_are_sizes():
    assert Host().region(np.int64(PAGE)).nbytes == PAGE


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"huge_pages": "4M"}, ValueError, "'4M'.*'auto', '2M', '1G', None"),
        ({"huge_pages": 2}, ValueError, "huge_pages=2"),
        ({"huge_pages": ["2M"]}, ValueError, "huge_pages="),
        ({"prefault": 1}, TypeError, "prefault=1"),
        ({"lock": "yes"}, TypeError, "lock='yes'"),
        ({"numa_node": 512}, ValueError, "numa_node=512 has no memory"),
        ({"numa_node": -1}, ValueError, "numa_node=-1"),
        ({"numa_node": "0"}, TypeError, "numa_node='0'"),
        ({"guard": None}, TypeError, "guard=None"),
        ({"fork": "copy"}, ValueError, "fork='copy'.*'inherit', 'skip'"),
        ({"threads": 0}, ValueError, "threads=0"),
        ({"threads": 1.5}, TypeError, "threads=1.5"),
        ({"no_such": 1}, TypeError, "no_such"),
    ],
)
def test_bad_option_is_refused_at_construction(options, error, match):
    with pytest.raises(error, match=match):
        Host(**options)
    if not options.keys() & {"guard", "fork", "threads"}:
        with pytest.raises(error, match=match):
            Shared(**options)


def test_sources_are_values():
    assert Host(lock=True) == Host(lock=True) != Host()
    assert hash(Shared("a")) == hash(Shared("a"))
    with pytest.raises(AttributeError):
        Host().lock = True
    for source in (Host(threads=2), Shared("a"), File("x", "r+")):
        assert pickle.loads(pickle.dumps(source)) == copy.deepcopy(source) == source


# ---- options


@pytest.mark.parametrize("make", [Host, Shared])
def test_huge_pages_option(make):
    auto, none = make(huge_pages="auto"), make(huge_pages=None)
    large = auto.region(5 * MIB)
    assert large.address % (2 * MIB) == 0
    assert "hg" in vm_flags(large.address)
    assert "hg" not in vm_flags(none.region(5 * MIB).address)
    assert "hg" not in vm_flags(auto.region(MIB).address)  # cannot have one
    assert large.huge_fraction == vm.huge_bytes(large.address, 5 * MIB) / (5 * MIB)
    assert auto.region(4 * MIB - 100).huge_fraction <= 1


@pytest.mark.no_sanitizer
def test_guard_pages_lie_around():
    region = Host(guard=True).region(PAGE + 1)
    low, high = region.address - PAGE, region.address + 2 * PAGE
    for guard in (low, high):
        flags = vm_flags(guard)
        assert flags
        assert not flags & {"rd", "wr"}
    assert {"rd", "wr"} <= vm_flags(high - 1)
    assert in_child(lambda: ctypes.memset(high - 1, 1, 1)) == 0
    assert in_child(lambda: ctypes.memset(high, 1, 1)) == -signal.SIGSEGV
    region.close()
    assert not any(is_mapped(at) for at in (low, low + PAGE, high))


@pytest.mark.parametrize("prefault", [True, False])
@pytest.mark.parametrize("make", [Host, Shared])
def test_lock(make, prefault):
    def locked():
        return int(re.search(r"VmLck:\s+(\d+)", Path("/proc/self/status").read_text())[1]) << 10

    gc.collect()  # other tests' regions
    before = locked()
    region = make(lock=True, prefault=prefault).region(4 * PAGE)
    assert "lo" in vm_flags(region.address)
    assert locked() >= before + 4 * PAGE
    region.close()
    assert locked() == before


@pytest.mark.parametrize(
    ("limit", "error", "number"),
    [(0, "PermissionError", errno.EPERM), (64 << 10, "OutOfMemory", None)],
)
def test_lock_beyond_the_limit(run_script, limit, error, number):
    out = run_script(f"""
        import ctypes, os, resource
        from pathlib import Path
        from arenapy.memory.sources import Host, Shared
        Shared().region(1).close()    # imports what may not be readable to others
        resource.setrlimit(resource.RLIMIT_MEMLOCK, ({limit}, {limit}))
        if os.getuid() == 0:          # root may lock regardless
            os.setresuid(65534, 65534, 65534)
        pages = lambda: int(Path("/proc/self/statm").read_text().split()[0])
        before = pages(), os.listdir("/proc/self/fd")
        for source in (Host(lock=True), Shared(lock=True)):
            try:
                source.region(1 << 20)
            except Exception as error:
                print(type(error).__name__, getattr(error, "errno", None), error)
        assert os.listdir("/proc/self/fd") == before[1]
        assert pages() - before[0] < 256
    """)
    lines = out.splitlines()
    assert len(lines) == 2
    for line in lines:
        assert line.startswith(f"{error} {number} ")
        for part in ("1 MiB", "RLIMIT_MEMLOCK is", "ulimit -l", "lock=False"):
            assert part in line
    assert ("64 KiB" if limit else "0 bytes") in lines[0]


def test_numa_node():
    node = memory_info.numa_nodes()[0] if memory_info.numa_nodes() else None
    if node is None:
        pytest.skip("a kernel without NUMA")
    for source in (Host(numa_node=node), Shared(numa_node=node)):
        region = source.region(MIB)
        line = numa_map(region.address)
        assert f"bind:{node}" in line
        assert f"N{node}={MIB // PAGE}" in line


def test_numa_node_that_the_kernel_refuses(monkeypatch, nothing_leaks):
    monkeypatch.setattr(request, "numa_nodes", lambda: (0, 1023))
    with pytest.raises(OSError, match=r"numa_node=1023: .* the nodes 0, 1023") as caught:
        Shared(numa_node=1023).region(PAGE)
    assert caught.value.errno == errno.EINVAL


@pytest.mark.usefixtures("hugetlb")
def test_a_child_has_no_pages_of_hugetlbfs():
    """A copy whose pages run out would be a SIGBUS."""
    for size in ("2M", "1G"):
        with pytest.raises(ValueError, match=f"fork='inherit' with huge_pages='{size}'"):
            Host(huge_pages=size, fork="inherit")
    pools = memory_info.huge_pools()
    if 2 * MIB not in pools or not pools[2 * MIB].free:
        pytest.skip("hugetlbfs has no pages")
    assert closed_in_child(Host(huge_pages="2M"))


def test_fork_option():
    kept, skipped = Host(), Host(fork="skip")
    regions = kept.region(PAGE), skipped.region(PAGE)
    assert ["dc" in vm_flags(region.address) for region in regions] == [False, True]
    assert not closed_in_child(kept)
    assert closed_in_child(skipped)
    assert closed_in_child(Shared())


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.no_sanitizer
def test_threads_option(threads, monkeypatch):
    seen = []
    real = vm.prefault
    monkeypatch.setattr(
        vm, "prefault", lambda *args, **options: (seen.append(options), real(*args, **options))
    )
    region = Host(threads=threads).region(8 * MIB)
    assert seen[0]["threads"] == threads
    assert_prefaulted(region)


def test_shared_is_a_sealed_memfd_by_name():
    region = Shared("pictures").region(PAGE + 1)
    link = os.readlink(f"/proc/self/fd/{region.fd}")
    assert "memfd:pictures" in link
    assert vm.file_nbytes(region.fd) == 2 * PAGE
    assert not os.get_inheritable(region.fd)
    for size in (PAGE, 4 * PAGE):
        with pytest.raises(PermissionError):
            os.ftruncate(region.fd, size)
    with vm.map_memory(PAGE, fd=region.fd, shared=True) as mapping:
        ctypes.memset(region.address, 7, 1)
        assert ctypes.string_at(mapping.address, 1) == b"\7"
    fd = region.fd
    region.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


@pytest.mark.parametrize(
    ("name", "error"), [("a\0b", ValueError), ("é" * 125, ValueError), (b"x", TypeError)]
)
def test_bad_shared_name(name, error):
    with pytest.raises(error, match="name="):
        Shared(name)
    assert Shared("x" * 249).region(1).nbytes == 1


# ---- limits


@pytest.mark.parametrize("source", [Host(), Host(prefault=False, lock=True), Shared()], ids=repr)
def test_more_than_there_is_is_refused_before_anything_is_mapped(
    source, monkeypatch, nothing_leaks
):
    def never(*_args, **_options):
        raise AssertionError("mapped")

    monkeypatch.setattr(vm, "map_memory", never)
    monkeypatch.setattr(vm, "memfd", never)
    total = memory_info.memory_info().total
    with pytest.raises(OutOfMemory) as caught:
        source.region(total)
    for part in (f"({total} bytes)", type(source).__name__, "free of", "prefault=False"):
        assert part in str(caught.value)
    assert isinstance(caught.value, MemoryError)


def test_a_tight_cgroup_is_named(monkeypatch):
    group = Limit("cgroup /sys/fs/cgroup/job (memory.max)", 8 * MIB, 0, "raise its max")
    monkeypatch.setattr(memory_info, "read_limits", lambda _proc: [group])
    assert Host().region(4 * MIB).nbytes == 4 * MIB
    with pytest.raises(OutOfMemory, match=r"job \(memory.max\) has 8 MiB free.*raise its max"):
        Host().region(9 * MIB)
    assert Host(prefault=False).region(9 * MIB).nbytes == 9 * MIB


@pytest.mark.parametrize("make", [Host, Shared])
def test_what_the_kernel_refuses_to_map(make, nothing_leaks):
    with pytest.raises((OutOfMemory, OSError), match="4 EiB"):
        make(prefault=False).region(1 << 62)


@pytest.mark.parametrize("prefault", [True, False])
def test_address_space_limit_is_named(run_script, prefault):
    out = run_script(f"""
        import resource
        from arenapy.errors import OutOfMemory
        from arenapy.memory.sources import Host, Shared
        from pathlib import Path
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20),) * 2)
        for source in (Host(prefault={prefault}), Shared(prefault={prefault})):
            try:
                source.region(128 << 20)
            except OutOfMemory as error:
                print(error)
            assert source.region(1 << 20).nbytes == 1 << 20
    """)
    lines = out.splitlines()
    assert len(lines) == 2
    for line in lines:
        assert "RLIMIT_AS" in line
        assert "128 MiB" in line
        assert "ulimit -v" in line
        assert "prefault=False" not in line  # would not help: mappings count, touched or not


def test_data_limit_binds_private_memory_only(run_script):
    out = run_script("""
        import resource
        from pathlib import Path
        from arenapy.errors import OutOfMemory
        from arenapy.memory.sources import Host, Shared
        used = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_DATA, (used + (64 << 20),) * 2)
        print(Shared().region(96 << 20).nbytes)
        try:
            Host().region(96 << 20)
        except OutOfMemory as error:
            print("RLIMIT_DATA" in str(error))
    """)
    assert out.split() == [str(96 * MIB), "True"]


@pytest.mark.usefixtures("hugetlb")
@pytest.mark.parametrize("make", [Host, Shared])
@pytest.mark.parametrize(("choice", "size"), [("2M", 2 * MIB), ("1G", 1024 * MIB)])
def test_hugetlb(make, choice, size, nothing_leaks):
    pool = memory_info.huge_pools().get(size)
    source = make(huge_pages=choice, prefault=False)
    if pool is None:
        with pytest.raises(OSError, match=choice) as caught:
            source.region(1)
        assert caught.value.errno == errno.EOPNOTSUPP
    elif pool.free:
        region = source.region(1)
        assert (region.nbytes, region.page_size) == (1, size)
        assert vm.huge_bytes(region.address, size) == size  # there, although prefault=False
        assert "ht" in vm_flags(region.address)
        region.close()
    elif not pool.surplus:
        with pytest.raises(OutOfMemory) as caught:
            source.region(size + 1)
        for part in (choice, "needs 2 pages", "0 are free", "nr_hugepages", 'huge_pages="auto"'):
            assert part in str(caught.value)


@pytest.mark.parametrize("make", [Host, Shared])
@pytest.mark.no_sanitizer
def test_hugetlb_is_prefaulted_whatever_the_option_says(make, monkeypatch):
    """A page missing later would be a SIGBUS. Ordinary pages stand for huge ones."""
    monkeypatch.setattr(request, "huge_pools", lambda: {2 * MIB: HugePool(2 * MIB, 9, 9, 0)})
    map_memory, memfd = vm.map_memory, vm.memfd
    monkeypatch.setattr(
        vm,
        "map_memory",
        lambda nbytes, **options: map_memory(nbytes, **{**options, "page_size": 0}),
    )
    monkeypatch.setattr(vm, "memfd", lambda name, nbytes, _page_size: memfd(name, nbytes))
    region = make(huge_pages="2M", prefault=False).region(2 * MIB)
    assert_prefaulted(region)


@pytest.mark.usefixtures("hugetlb")
@pytest.mark.parametrize("make", [Host, Shared])
def test_hugetlb_pages_gone_between_check_and_map(make, monkeypatch, nothing_leaks):
    """What the check saw is gone when the kernel is asked: still the error that explains it."""
    if any(pool.free or pool.surplus for pool in memory_info.huge_pools().values()):
        pytest.skip("hugetlbfs has pages")
    monkeypatch.setattr(request, "huge_pools", lambda: {2 * MIB: HugePool(2 * MIB, 9, 9, 0)})
    with pytest.raises(OutOfMemory, match=r"the kernel refused.*nr_hugepages"):
        make(huge_pages="2M").region(4 * MIB)


def test_hugetlb_without_support(monkeypatch):
    monkeypatch.setattr(request, "huge_pools", dict)
    with pytest.raises(OSError, match="no such pages in hugetlbfs") as caught:
        Host(huge_pages="1G").region(1)
    assert caught.value.errno == errno.EOPNOTSUPP


# ---- failures half way


@pytest.mark.parametrize(
    ("number", "error", "match"),
    [
        (errno.ENOMEM, OutOfMemory, "cannot fault in .* 64 MiB .*prefault=False"),
        (errno.EFAULT, OSError, "Bad address"),
        (133, OSError, "hardware"),
    ],
)
@pytest.mark.parametrize("make", [Host, Shared])
def test_failed_prefault_gives_everything_back(
    make, number, error, match, populate_error, nothing_leaks
):
    populate_error(number)
    with pytest.raises(error, match=match) as caught:
        make().region(64 * MIB)
    assert getattr(caught.value, "errno", number) in (number, None)


@pytest.fixture
def no_free_descriptor():
    lowest = os.dup(0)
    os.close(lowest)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_refusal_says_why_without_a_descriptor(monkeypatch, populate_error, no_free_descriptor):
    refused = OSError(errno.ENOMEM, "no memory")
    populate_error(errno.ENOMEM)
    with pytest.raises(OutOfMemory, match="cannot fault in"):
        Host().region(64 * MIB)
    monkeypatch.setattr(vm, "lock", Mock(side_effect=refused))
    with pytest.raises(OutOfMemory, match="cannot lock"):
        Host(lock=True).region(MIB)
    monkeypatch.setattr(vm, "map_memory", Mock(side_effect=refused))
    with pytest.raises(OutOfMemory, match="refused to map"):
        Host().region(MIB)


@pytest.mark.parametrize("make", [Host, Shared])
def test_ctrl_c_gives_everything_back(make, populate_error, nothing_leaks):
    populate_error(errno.EAGAIN)
    timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        make().region(64 * MIB)
    timer.join()


class Broken:
    """Stands for `Region` and cannot be made."""

    @staticmethod
    def from_address(*_args, **_options):
        raise RuntimeError("no region")


@pytest.mark.parametrize("name", ["host", "shared", "r", "r+", "c", "w+", "existing"])
def test_failed_region_gives_everything_back(name, path, monkeypatch, nothing_leaks):
    makers = {"host": Host, "shared": Shared, "existing": lambda: Existing(bytearray(16 * MIB))}
    source = makers[name]() if name in makers else File(path, name)
    with monkeypatch.context() as patch:
        patch.setattr("arenapy.memory.sources.Region", Broken)
        with pytest.raises(RuntimeError, match="no region") as caught:
            source.region(PAGE)
    # Nor is it taken for in use, although the traceback still has what the region would own.
    assert caught.tb
    assert source.region(PAGE).nbytes == PAGE
