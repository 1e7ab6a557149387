"""The operating system layer: each call's effect is read back from the kernel."""

import ctypes
import errno
import mmap
import os
import signal
import threading
import time
import zlib
from pathlib import Path

import pytest
from children import in_child
from kernel_view import OWN_FAULTS, faults_of, is_mapped, smaps, write_pages

from arenapy import Region
from arenapy.linux import vm
from arenapy.linux.limits import huge_pools
from arenapy.linux.reserved_space import Mapping

MIB = 1 << 20
PAGE = vm.PAGE_SIZE
MADV_POPULATE_WRITE = 23  # not in the mmap module before Python 3.13
EHWPOISON = 133  # a page of memory is broken; not in errno before Python 3.14

needs_populate = pytest.mark.skipif(not vm.can_populate(), reason="needs MADV_POPULATE_WRITE")


def threads_of_the_kernel():
    """All threads of this process, those of libraries included."""
    return len(os.listdir("/proc/self/task"))


def all_ended_beyond(count):
    """Are there no more threads than that? (A joined one is listed for an instant longer.)"""
    deadline = time.monotonic() + 5
    while threads_of_the_kernel() > count and time.monotonic() < deadline:
        time.sleep(0.001)
    return threads_of_the_kernel() <= count


@pytest.fixture
def mapping():
    """Call it as `vm.map_memory`; it unmaps at the end and gives the address."""
    mapped = []

    def make(nbytes, **options):
        mapped.append(vm.map_memory(nbytes, **options))
        return mapped[-1].address

    yield make
    for one in mapped:
        one.unmap()


@pytest.fixture
def memfd():
    files = []

    def make(nbytes, name=b"arenapy test"):
        files.append(vm.memfd(name, nbytes))
        return files[-1].fileno()

    yield make
    for file in files:
        file.close()


# ---- mappings


@pytest.mark.parametrize("align", [0, 2 * MIB, 64 * MIB])
@pytest.mark.parametrize("guard", [False, True])
@pytest.mark.parametrize("nbytes", [1, PAGE, PAGE + 1, 2 * MIB, 5 * MIB + 3])
@pytest.mark.no_sanitizer  # whose allocator maps memory of its own there
def test_mapping_is_aligned_and_nothing_else_stays(nbytes, guard, align):
    mapping = vm.map_memory(nbytes, align=align, guard=guard)
    address, map_address, map_nbytes = mapping.address, mapping.map_address, mapping.map_nbytes
    pages = -(-nbytes // PAGE) * PAGE
    assert address % max(align, PAGE) == 0
    assert map_nbytes == pages + (2 * PAGE if guard else 0)
    assert map_address == address - (PAGE if guard else 0)
    write_pages(address, nbytes)
    if guard:
        assert smaps(address - 1)["permissions"] == "---p"
        assert smaps(address + pages)["permissions"] == "---p"
    mapping.unmap()
    assert not any(is_mapped(at) for at in (map_address, address, map_address + map_nbytes - 1))


def mapped_bytes():
    return int(Path("/proc/self/statm").read_text().split()[0]) * PAGE


@pytest.mark.no_sanitizer  # whose allocator maps memory of its own there
def test_failed_mapping_leaves_nothing():
    vm.map_memory(PAGE)  # whatever the first call needs
    before = mapped_bytes()
    with pytest.raises(OSError, match="Bad file descriptor") as caught:
        vm.map_memory(64 * MIB, fd=1 << 20, shared=True)
    assert caught.value.errno == errno.EBADF
    with pytest.raises(OSError, match="memory"):
        vm.map_memory(1 << 62)
    assert mapped_bytes() == before


@pytest.mark.parametrize("nbytes", [0, (1 << 63) + 1])
def test_sizes_that_cannot_be(nbytes):
    with pytest.raises(ValueError, match=f"cannot map {nbytes} bytes"):
        vm.map_memory(nbytes)
    with pytest.raises(OverflowError):
        vm.map_memory(-1)


@pytest.mark.usefixtures("hugetlb")
def test_hugetlb_without_pages_is_an_error_and_with_pages_is_huge(mapping):
    for size, pool in huge_pools().items():
        if pool.free:
            address = mapping(size, page_size=size, guard=True)
            vm.prefault(address, size)
            assert vm.huge_bytes(address, size) == size
            assert "ht" in smaps(address)["VmFlags"]
        elif not pool.surplus:
            with pytest.raises(OSError, match="memory") as caught:
                mapping(size, page_size=size)
            assert caught.value.errno == errno.ENOMEM


def test_bind_to_a_node_that_is_not_there(mapping):
    address = mapping(PAGE)
    with pytest.raises(OSError, match="Invalid argument"):
        vm.bind(address, PAGE, 1023)
    with pytest.raises(ValueError, match="1024"):
        vm.bind(address, PAGE, 1024)


def test_advise_error_is_an_oserror(mapping):
    with pytest.raises(OSError, match="Invalid argument"):
        vm.advise(mapping(PAGE) + 1, PAGE, mmap.MADV_DONTFORK)


# ---- memfds, files


def test_memfd_failure_closes_it():
    before = os.listdir("/proc/self/fd")
    with pytest.raises(OSError, match="Invalid argument"):
        vm.memfd(b"x", (1 << 64) - 1)
    with pytest.raises(OSError, match="Invalid argument"):
        vm.memfd(b"x" * 250, PAGE)
    assert os.listdir("/proc/self/fd") == before


def test_shared_maps_are_one_memory_and_private_ones_are_not(memfd, mapping):
    fd = memfd(2 * PAGE)
    one = mapping(2 * PAGE, fd=fd, shared=True)
    two = mapping(PAGE, fd=fd, shared=True, offset=PAGE)
    private = mapping(2 * PAGE, fd=fd)
    readonly = mapping(2 * PAGE, fd=fd, shared=True, writable=False)
    ctypes.memset(one + PAGE, 7, 1)
    ctypes.memset(private, 9, 1)
    assert ctypes.string_at(two, 1) == ctypes.string_at(readonly + PAGE, 1) == b"\x07"
    assert ctypes.string_at(one, 1) == b"\x00"
    assert smaps(readonly)["permissions"] == "r--s"


def test_file_nbytes_of_a_closed_descriptor():
    with pytest.raises(OSError, match="Bad file descriptor"):
        vm.file_nbytes(1 << 20)


def test_address_of():
    data = bytearray(b"abcdef")
    assert ctypes.string_at(vm.address_of(memoryview(data)[2:]), 4) == b"cdef"
    with pytest.raises(TypeError):
        vm.address_of(data)


# ---- prefault


@pytest.mark.parametrize("threads", [0, 1, 2, 5, 1000])
@pytest.mark.parametrize("error", [0, errno.EINVAL])
@pytest.mark.parametrize("nbytes", [1, 3 * MIB + 1])
@pytest.mark.no_sanitizer
def test_prefaulted_memory_does_not_fault(mapping, populate_error, nbytes, error, threads):
    fresh, ready = mapping(nbytes), mapping(nbytes)
    pages = -(-nbytes // PAGE)
    write_pages(fresh, 1)
    populate_error(error)
    vm.prefault(ready, nbytes, threads=threads, slice_nbytes=MIB // 4)
    assert faults_of(write_pages, fresh, nbytes) >= pages - 1
    assert faults_of(write_pages, ready, nbytes) <= OWN_FAULTS


@pytest.mark.parametrize("error", [0, errno.EINVAL])
@pytest.mark.parametrize("shared", [False, True])
def test_prefault_keeps_contents(memfd, mapping, populate_error, shared, error):
    fd = memfd(MIB)
    content = os.urandom(MIB)
    os.pwrite(fd, content, 0)
    address = mapping(MIB, fd=fd, shared=shared)
    populate_error(error)
    vm.prefault(address, MIB, threads=2, slice_nbytes=PAGE)
    assert ctypes.string_at(address, MIB) == content
    assert faults_of(write_pages, address, MIB) <= OWN_FAULTS


@pytest.mark.parametrize("error", [0, errno.EINVAL])
def test_prefault_of_a_readonly_map_reads(memfd, mapping, populate_error, error):
    def read(address, nbytes):
        return zlib.crc32((ctypes.c_char * nbytes).from_address(address))

    fd = memfd(8 * MIB)  # a fault maps at most 64 KiB around: 128 faults
    os.pwrite(fd, b"x" * 8 * MIB, 0)
    address = mapping(8 * MIB, fd=fd, shared=True, writable=False)
    populate_error(error)
    vm.prefault(address, 8 * MIB, writable=False)
    assert faults_of(read, address, 8 * MIB) <= OWN_FAULTS


@pytest.mark.full
def test_touching_does_not_lose_concurrent_writes(memfd, mapping, populate_error):
    """The fallback writes to pages that another thread is counting in."""
    fd = memfd(64 * PAGE)
    ours, theirs = (mapping(64 * PAGE, fd=fd, shared=True) for _ in range(2))
    cells = [ctypes.c_uint8.from_address(theirs + i * PAGE) for i in range(64)]
    stop = threading.Event()
    wrong = []

    def count():
        n = 0
        while not stop.is_set():
            n = (n + 1) & 255
            for cell in cells:
                cell.value = n
            wrong.extend(cell.value for cell in cells if cell.value != n)

    writer = threading.Thread(target=count)
    populate_error(errno.EINVAL)
    writer.start()
    for _ in range(300):
        vm.prefault(ours, 64 * PAGE, threads=4, slice_nbytes=PAGE)
    stop.set()
    writer.join()
    assert wrong == []


@pytest.mark.parametrize("error", [errno.EINTR, errno.EAGAIN])
@pytest.mark.parametrize("threads", [1, 3])
def test_interrupted_slices_are_done_again(mapping, populate_error, error, threads):
    address = mapping(4 * MIB)
    populate_error(error, 50)
    vm.prefault(address, 4 * MIB, threads=threads, slice_nbytes=MIB // 2)
    assert faults_of(write_pages, address, 4 * MIB) <= OWN_FAULTS


@pytest.mark.parametrize("error", [errno.EFAULT, errno.ENOMEM, EHWPOISON])
@pytest.mark.parametrize("threads", [1, 3])
def test_failed_slice_is_an_oserror_and_ends_all_threads(mapping, populate_error, error, threads):
    before = threads_of_the_kernel()
    address = mapping(64 * MIB)
    populate_error(error, 1)
    with pytest.raises(OSError, match="Errno") as caught:
        vm.prefault(address, 64 * MIB, threads=threads, slice_nbytes=64 * PAGE)
    assert caught.value.errno == error
    assert all_ended_beyond(before)


@needs_populate
def test_populating_a_hole_is_efault_not_a_crash(tmp_path, mapping):
    path = tmp_path / "short"
    path.write_bytes(b"x")
    with open(path, "r+b") as file:
        address = mapping(4 * PAGE, fd=file.fileno(), shared=True)
        with pytest.raises(OSError, match="Bad address"):
            vm.prefault(address, 4 * PAGE)


def test_ctrl_c_stops_all_threads(mapping, populate_error):
    """Populating that never ends (each slice wants to be retried) ends at the signal."""
    before = threads_of_the_kernel()
    address = mapping(64 * MIB)
    populate_error(errno.EINTR)
    timer = threading.Timer(0.15, os.kill, (os.getpid(), signal.SIGINT))
    start = time.monotonic()
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        vm.prefault(address, 64 * MIB, threads=4)
    assert 0.1 < time.monotonic() - start < 30  # s: other programs may have the cores
    timer.join()
    assert all_ended_beyond(before)


def test_prefault_lets_other_threads_run(mapping, populate_error):
    """The GIL is released: a thread counts while this one is stuck."""
    address = mapping(MIB)
    populate_error(errno.EAGAIN)
    counted = []

    def count():
        counted.extend(range(10_000))
        vm.inject_populate_error(0)

    threading.Timer(0.05, count).start()
    vm.prefault(address, MIB)
    assert len(counted) == 10_000


# ---- what the kernel says


def test_huge_bytes_is_what_was_given(mapping):
    address = mapping(8 * MIB, align=2 * MIB)
    vm.advise(address, 8 * MIB, mmap.MADV_NOHUGEPAGE)
    vm.prefault(address, 8 * MIB)
    assert vm.huge_bytes(address, 8 * MIB) == 0
    other = mapping(8 * MIB, align=2 * MIB)
    vm.advise(other, 8 * MIB, mmap.MADV_HUGEPAGE)
    vm.prefault(other, 4 * MIB)
    given = int(smaps(other)["AnonHugePages"][0]) << 10
    if given == 4 * MIB:  # not where transparent huge pages are off or memory is fragmented
        assert vm.huge_bytes(other, 8 * MIB) == 4 * MIB
        assert vm.huge_bytes(other, 3 * MIB) == 3 * MIB
        assert vm.huge_bytes(other + 4 * MIB, 4 * MIB) == 0
        # A read maps the shared huge zero page, which backs nothing.
        ctypes.string_at(other + 4 * MIB, 1)
        assert vm.huge_bytes(other, 8 * MIB) == 4 * MIB


SMAPS = """\
7f0000000000-7f0000400000 rw-p 00000000 00:00 0
Size:               4096 kB
AnonHugePages:      {anon} kB
ShmemPmdMapped:     {shmem} kB
FilePmdMapped:         0 kB
Shared_Hugetlb:        0 kB
Private_Hugetlb:    {hugetlb} kB
VmFlags: rd wr
7f0000400000-7f0000600000 rw-p 00000000 00:00 0 [name: of it]
AnonHugePages:      2048 kB
VmFlags: rd wr
"""


@pytest.mark.parametrize(
    ("figures", "first", "nbytes", "huge"),
    [
        ((4096, 0, 0), 0, 4 * MIB, 4 * MIB),
        ((2048, 0, 0), 0, 4 * MIB, 2 * MIB),
        ((0, 2048, 2048), 0, 4 * MIB, 4 * MIB),
        ((2048, 0, 0), 0, 6 * MIB, 4 * MIB),
        ((4096, 0, 0), MIB, MIB, MIB),  # a part of what is all huge
        ((0, 0, 0), MIB, MIB, 0),
        ((2048, 0, 0), MIB, MIB, None),  # which half of it is huge, smaps does not say
        ((0, 0, 0), 16 * MIB, MIB, 0),
    ],
)
def test_smaps_fallback(tmp_path, figures, first, nbytes, huge):
    anon, shmem, hugetlb = figures
    path = tmp_path / "smaps"
    path.write_text(SMAPS.format(anon=anon, shmem=shmem, hugetlb=hugetlb))
    assert vm.smaps_huge_bytes(0x7F0000000000 + first, nbytes, str(path)) == huge


@pytest.mark.skipif(not vm.can_scan_pages(), reason="needs PAGEMAP_SCAN to compare with")
def test_smaps_agrees_with_the_scan(mapping):
    address = mapping(8 * MIB, align=2 * MIB, guard=True)  # guards: neighbours do not merge
    vm.advise(address, 8 * MIB, mmap.MADV_HUGEPAGE)
    vm.prefault(address, 6 * MIB)
    assert vm.smaps_huge_bytes(address, 8 * MIB) == vm.huge_bytes(address, 8 * MIB)


def test_can_populate_agrees_with_the_kernel(mapping):
    try:
        vm.advise(mapping(PAGE), PAGE, MADV_POPULATE_WRITE)
        works = True
    except OSError:
        works = False
    assert vm.can_populate() == works


# ---- leases


def test_lease_is_seen_by_other_descriptions_until_closed(memfd):
    fd = memfd(PAGE)
    file = vm.reopen(fd)
    ours = file.fileno()
    assert not os.get_inheritable(ours)
    vm.lease(ours, 100, 50)
    assert vm.first_lease(fd, 0, PAGE) == (100, 50)
    assert vm.first_lease(fd, 149, 1) == (100, 50)
    assert vm.first_lease(fd, 0, 100) is None
    assert vm.first_lease(fd, 150, PAGE) is None
    assert vm.first_lease(ours, 0, PAGE) is None  # a description does not see its own
    duplicate = os.dup(ours)
    file.close()
    assert vm.first_lease(fd, 0, PAGE) == (100, 50)  # the description is still open
    os.close(duplicate)
    assert vm.first_lease(fd, 0, PAGE) is None


def test_lease_errors():
    for offset, nbytes in ((-1, 1), (0, 0), (0, -1)):
        with pytest.raises(ValueError, match=f"{nbytes} bytes at {offset}"):
            vm.lease(0, offset, nbytes)
    for call in (vm.reopen, lambda fd: vm.lease(fd, 0, 1), lambda fd: vm.first_lease(fd, 0, 1)):
        with pytest.raises(OSError, match="Errno"):
            call(1 << 20)


# ---- owners


def test_a_mapping_ends_once(mapping):
    one = vm.map_memory(3 * PAGE, guard=True)
    address = one.address
    with one as same:
        assert same is one
        assert is_mapped(address)
    assert not is_mapped(address)
    assert one.map_nbytes == 0
    other = mapping(3 * PAGE, guard=True)  # where the first one was, if the kernel likes
    one.unmap()
    del one, same
    assert is_mapped(other)


@pytest.mark.parametrize("end", ["with", "drop", "close"])
def test_a_descriptor_ends_once(memfd, end):
    memory = memfd(PAGE)
    one = vm.reopen(memory)
    number = one.fileno()
    if end == "with":
        with one:
            pass
    elif end == "close":
        one.close()
    if end != "drop":
        assert one.fileno() == -1
        other = os.dup(memory)
        assert other == number
        one.close()
    del one
    if end == "drop":
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(number)
    else:
        os.fstat(other)
        os.close(other)


def test_a_region_takes_both_over_or_neither(memfd):
    one, file = vm.map_memory(PAGE), vm.reopen(memfd(PAGE))
    address, fd = one.address, file.fileno()
    with pytest.raises(ValueError, match="fork="):
        Region.from_address(address, PAGE, fork="other", mapping=one, descriptor=file)
    with pytest.raises(ValueError, match="page_size=0"):
        Region.from_address(address, PAGE, page_size=0, mapping=one, descriptor=file)
    assert (one.map_nbytes, file.fileno()) == (PAGE, fd)
    with one, file:
        region = Region.from_address(address, PAGE, mapping=one, descriptor=file)
    assert (one.map_nbytes, file.fileno(), region.fd) == (0, -1, fd)
    del one, file
    assert is_mapped(address)
    os.fstat(fd)
    region.close()
    assert not is_mapped(address)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_what_nobody_took_over_is_not_unmapped_in_a_forked_child():
    """It may not have been there (MADV_DONTFORK), and something else may be now."""
    one = vm.map_memory(PAGE)
    address = one.address
    assert in_child(lambda: (one.unmap(), is_mapped(address))[1]) == 0
    one.unmap()
    assert not is_mapped(address)


def test_owners_are_made_by_calls_only():
    for kind in (Mapping, vm.Descriptor):
        with pytest.raises(TypeError, match="internal"):
            kind()


def test_open_file_is_os_open(tmp_path):
    path = tmp_path / "file"
    for name in (path, os.fsencode(path)):
        with pytest.raises(FileNotFoundError) as caught:
            vm.open_file(name, os.O_RDONLY)
        assert caught.value.filename == os.fspath(name)
    with pytest.raises(ValueError, match="null byte"):
        vm.open_file("a\0b", os.O_RDONLY)
    before = os.umask(0o027)
    try:
        with vm.open_file(path, os.O_RDWR | os.O_CREAT | os.O_EXCL) as file:
            assert not os.get_inheritable(file.fileno())
            os.write(file.fileno(), b"abc")
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o640
    with pytest.raises(FileExistsError):
        vm.open_file(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    assert path.read_bytes() == b"abc"


def test_no_file_takes_the_number_of_a_closed_standard_file(run_script):
    """C code writes errors to number 2, whatever that is now."""
    run_script("""
        import os
        from arenapy.linux import vm

        kept = os.dup(2)
        for closed in [0], [1, 2], [0, 1, 2]:
            for number in closed:
                os.close(number)
            made = [vm.open_file("made", os.O_RDWR | os.O_CREAT), vm.memfd(b"made", 4096)]
            made.append(vm.reopen(made[1].fileno()))
            found = [file.fileno() for file in made]
            for number in closed:
                os.dup2(kept, number)
            assert min(found) > kept, found
            assert not any(os.get_inheritable(number) for number in found)
            for file in made:
                file.close()
    """)


def test_a_file_that_cannot_be_opened_is_not_made(run_script, tmp_path):
    """Of a full table, only the number of a standard file is free."""
    run_script(f"""
        import errno, os, resource
        from arenapy.linux import vm

        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
        files = [os.dup(2)]
        while files[-1] < 63:
            files.append(os.dup(2))
        os.close(0)
        try:
            vm.open_file({str(tmp_path / "made")!r}, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        except OSError as error:
            assert error.errno == errno.EMFILE
        else:
            raise AssertionError("there was no number for it")
        assert not os.path.exists({str(tmp_path / "made")!r})
    """)


def test_open_file_is_interrupted(tmp_path):
    """Opening a FIFO waits for its other end; a signal's exception ends that, or it goes on."""
    path = tmp_path / "fifo"
    os.mkfifo(path)
    seen = []

    def handle(*_arguments):
        seen.append(len(seen))
        if len(seen) == 2:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, handle)
    signal.setitimer(signal.ITIMER_REAL, 0.02, 0.02)
    try:
        with pytest.raises(KeyboardInterrupt):
            vm.open_file(path, os.O_RDONLY)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert len(seen) >= 2


def test_limits_are_those_of_the_process(run_script):
    run_script("""
        import resource
        from arenapy.linux import vm

        for kind in "RLIMIT_AS", "RLIMIT_DATA", "RLIMIT_FSIZE", "RLIMIT_MEMLOCK":
            number = getattr(resource, kind)
            soft, _ = resource.getrlimit(number)
            assert vm.soft_limit(kind) == (None if soft == resource.RLIM_INFINITY else soft)
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 40, hard))
        assert vm.soft_limit("RLIMIT_FSIZE") == 1 << 40
    """)
