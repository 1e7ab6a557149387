"""Sources over what is there already: `File` and `Existing`."""

import array
import contextlib
import copy
import ctypes
import errno
import mmap
import os
import pickle
import resource
import sys
from multiprocessing import shared_memory
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from kernel_view import closed_in_child, nothing_leaks, vm_flags

from arenapy import Bump, Pool, Slab, numpy_memory, pickling
from arenapy.errors import OutOfMemory
from arenapy.linux import vm
from arenapy.memory.sources import Existing, File

PAGE = vm.PAGE_SIZE
HUGE_PAGES = 4  # that a test needs


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


# ---- files


def test_file_read_only(path):
    region = File(path).region()
    assert content(region) == path.read_bytes()
    assert region.readonly
    assert region.nbytes == path.stat().st_size
    assert "wr" not in vm_flags(region.address)


def test_file_read_write(path):
    region = File(str(path), "r+").region(100)
    assert region.nbytes == 100
    assert not region.readonly
    ctypes.memset(region.address, 0xEE, 2)
    assert path.read_bytes()[:3] == b"\xee\xee\x02"
    region.close()
    assert closed_in_child(File(path, "r+"))


def test_file_copy_on_write(path):
    before = path.read_bytes()
    source = File(os.fsencode(path), "c")
    one, two = source.region(), source.region()  # each has its own bytes
    ctypes.memset(one.address, 0xEE, 2)
    assert content(one, 3) == b"\xee\xee\x02"
    assert content(two) == path.read_bytes() == before
    assert not closed_in_child(source)


def test_file_new(tmp_path):
    path = tmp_path / "new"
    region = File(path, "w+").region(3 * PAGE + 1)
    status = path.stat()
    assert status.st_size == 3 * PAGE + 1
    assert status.st_blocks * 512 >= status.st_size  # no hole: the disk cannot run out later
    assert not content(region).strip(b"\0")
    ctypes.memset(region.address, 1, 1)
    region.close()
    assert path.read_bytes()[:2] == b"\1\0"
    assert content(File(path, "w+").region(PAGE), 1) == b"\0"  # emptied
    assert path.stat().st_size == PAGE


def test_a_link_to_a_file_that_is_not_there_yet(tmp_path):
    link, target = tmp_path / "current", tmp_path / "today"
    link.symlink_to("today")
    with pytest.raises(FileNotFoundError, match="a link to a file that is not there"):
        File(link, "w+").region(PAGE)
    assert link.is_symlink() and not target.exists()
    target.touch()
    region = File(link, "w+").region(PAGE)
    assert os.path.samestat(target.stat(), os.fstat(region.fd))


@pytest.mark.parametrize("old", [0, PAGE, 3 * PAGE])
def test_a_file_beyond_the_limit_of_the_process_is_kept(tmp_path, old):
    """The kernel asks for that limit only where a file grows, as an emptied one does."""
    path = tmp_path / "file"
    path.write_bytes(b"\1" * old)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 * PAGE - 1, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            File(path, "w+").region(2 * PAGE)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == b"\1" * old


@pytest.mark.parametrize("mode", ["r+", "w+"])
def test_writable_file_has_one_region_at_a_time(path, mode):
    source = File(path, mode)
    region = source.region(PAGE)
    ctypes.memset(region.address, 3, 1)
    with pytest.raises(OutOfMemory, match=r"File\(.*already has a region"):
        source.region(PAGE)
    assert content(region, 1) == b"\3"  # in particular, not emptied
    region.close()
    region = source.region(PAGE)
    del region
    assert source.region(PAGE).nbytes == PAGE


def test_file_errors(path, tmp_path, nothing_leaks):
    size = path.stat().st_size
    empty = tmp_path / "empty"
    empty.touch()
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(ValueError, match=r"empty'\)? is empty"):
        File(empty).region()
    for mode in ("r", "r+", "c"):
        with pytest.raises(OutOfMemory, match=f"{size + 1} bytes.*{size}.*posix_fallocate.*w\\+"):
            File(path, mode).region(size + 1)
    for mode in ("r", "w+"):
        for other in (tmp_path, tmp_path / "fifo"):
            with pytest.raises(ValueError, match="not a regular file"):
                File(other, mode).region(1)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        File(tmp_path / "nowhere", "r+").region()
    with pytest.raises(ValueError, match="needs nbytes"):
        File(tmp_path / "nowhere", "w+").region()
    assert not (tmp_path / "nowhere").exists()
    with pytest.raises(ValueError, match=r"mode='w'.*'r', 'r\+', 'c', 'w\+'"):
        File(path, "w")
    with pytest.raises(TypeError, match="path=3"):
        File(3)


@pytest.mark.parametrize("mode", ["r", "r+", "w+"])
def test_the_name_of_a_folder_is_not_that_of_a_file(path, mode):
    """open() says of "name/" that it is no folder, and changes nothing."""
    before = Path(path).read_bytes()
    with pytest.raises((NotADirectoryError, IsADirectoryError)):
        File(f"{path}/", mode).region(4096)
    assert Path(path).read_bytes() == before


def test_new_file_without_room_is_removed(tmp_path, nothing_leaks):
    path = tmp_path / "large"
    with pytest.raises(OSError, match=r"cannot reserve .* on disk") as caught:
        File(path, "w+").region(1 << 60)
    assert caught.value.errno in (errno.EFBIG, errno.ENOSPC)
    assert not path.exists()


@pytest.mark.parametrize(
    "refused",
    [
        lambda path: File(path, "w+").region(1 << 60),
        lambda path: Bump(1 << 16, File(path, "w+"), stream=3),
        lambda path: Bump(1 << 16, File(path, "w+"), strict=np.array([1, 2])),
        lambda path: Slab(100, 1 << 50, File(path, "w+")),
        lambda path: Pool(1 << 20, File(path, "w+"), initial_bytes=1 << 21),
    ],
)
def test_a_refused_call_does_not_empty_a_file(path, refused):
    before = path.read_bytes()
    with pytest.raises((OSError, ValueError, TypeError)):
        refused(path)
    assert path.read_bytes() == before


def test_a_pool_that_begins_with_less_than_a_page_of_a_file(path):
    """It is served, as from other sources: once the file is empty, it is too late to refuse it."""
    pool = Pool(1 << 20, File(path, "w+"), initial_bytes=10)
    assert path.stat().st_size == pool.stats().reserved_bytes == PAGE
    x = pool.empty(8, "u1")
    x[:] = 7
    assert path.read_bytes().count(7) == 8
    with pytest.raises(OutOfMemory):  # x has the page
        pool.alloc(PAGE + 1)


@pytest.mark.no_sanitizer
def test_a_mapping_that_fails_does_not_empty_a_file(run_script, path):
    run_script(f"""
        import resource
        from pathlib import Path
        from arenapy import File, OutOfMemory
        path = Path({str(path)!r})
        used = int(Path("/proc/self/statm").read_text().split()[0]) * 4096
        resource.setrlimit(resource.RLIMIT_AS, (used + (50 << 20), resource.RLIM_INFINITY))
        before = path.read_bytes()
        try:
            File(path, "w+").region(200 << 20)
            raise AssertionError("it was mapped")
        except OutOfMemory:
            pass
        assert path.read_bytes() == before
    """)


def test_only_the_new_file_is_removed(tmp_path):
    """A path is asked for its name once."""
    precious = tmp_path / "precious"
    precious.write_bytes(b"precious")

    names = [str(tmp_path / "new"), str(precious), str(precious)]

    class Path(os.PathLike):
        def __fspath__(self):
            return names.pop(0)

    with pytest.raises(OSError, match="cannot reserve"):
        File(Path(), "w+").region(1 << 60)
    assert [*tmp_path.iterdir()] == [precious]


def once_it_is_open(monkeypatch, act):
    """Have somebody do this when the next `File` has opened its file, and no more."""
    opened = File._open

    def open_it(self, path, files):
        monkeypatch.setattr(File, "_open", opened)
        file = opened(self, path, files)
        act()
        return file

    monkeypatch.setattr(File, "_open", open_it)


@pytest.mark.parametrize("mode", ["r", "r+", "c"])
@pytest.mark.parametrize("size", [0, 100, 3 * PAGE])
def test_a_file_is_as_long_as_its_last_owner_left_it(path, monkeypatch, mode, size):
    """Who waits for the lock has seen the size of before."""
    lock_file = vm.lock_file

    def lock_later(fd, writes):
        monkeypatch.setattr(vm, "lock_file", lock_file)
        os.truncate(path, size)  # as the owner does; then it ends
        return False

    monkeypatch.setattr(vm, "lock_file", lock_later)
    if size:
        assert File(path, mode).region().nbytes == size
    else:
        with pytest.raises(ValueError, match="is empty"):
            File(path, mode).region()
    assert path.stat().st_size == size


def grow_bump(file):
    arena = Bump(1 << 16, file, max_bytes=1 << 20)
    kept = arena.zeros(5000)
    while True:
        yield kept
        kept = arena.zeros(1 << 16)


def grow_slab(file):
    slab = Slab(4096, 4, file, max_count=64)
    kept = slab.alloc_many(3)
    while True:
        yield kept
        kept += slab.alloc_many(3)


def grow_pool(file):
    pool = Pool(1 << 20, file)
    while True:
        kept = pool.zeros(1000)
        yield kept
        del kept
        pool.trim()


@pytest.mark.parametrize("mode", ["r+", "w+"])
@pytest.mark.parametrize("grow", [grow_bump, grow_slab, grow_pool])
@pytest.mark.parametrize("way", ["another folder", "another file"])
def test_an_allocator_that_grows_changes_no_other_file(tmp_path, monkeypatch, grow, mode, way):
    here, there = tmp_path / "here", tmp_path / "there"
    for folder in (here, there):
        folder.mkdir()
        (folder / "file").write_bytes(b"precious" * (1 << 18))
    monkeypatch.chdir(here)
    growing = grow(File("file", mode))
    next(growing)
    if way == "another folder":
        os.chdir(there)
    else:
        os.rename("file", "run.1")
        os.rename(there / "file", "file")
        there = here
    with contextlib.suppress(OutOfMemory):
        next(growing)
    assert (there / "file").read_bytes() == b"precious" * (1 << 18)


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))]
)
@pytest.mark.parametrize("kind", [str, os.fsencode, Path])
def test_a_copy_of_a_source_is_of_the_same_file(tmp_path, monkeypatch, copied, kind):
    there = tmp_path / "there"
    there.mkdir()
    (there / "file").write_bytes(b"precious")
    monkeypatch.chdir(tmp_path)
    source = File(kind("file"), "w+")
    os.chdir(there)
    again = copied(source)
    assert again == source != File(kind("file"), "w+")
    again.region(PAGE)
    assert (there / "file").read_bytes() == b"precious"
    assert (tmp_path / "file").stat().st_size == PAGE


def test_absolute_paths_are_equal_in_all_folders(path, tmp_path, monkeypatch):
    before = File(path)
    monkeypatch.chdir(tmp_path)
    assert before == File(path) and hash(before) == hash(File(path))


def test_another_file_of_the_name_is_refused(tmp_path):
    path = tmp_path / "file"
    source = File(path, "w+")
    source.region(PAGE)
    path.rename(tmp_path / "other")
    path.touch()
    for one in (source, copy.deepcopy(source)):
        with pytest.raises(OutOfMemory, match="another file than"):
            one.region(PAGE)
    assert path.stat().st_size == 0


@pytest.mark.parametrize("mode", ["r+", "c"])
def test_a_file_that_is_full_is_out_of_memory(tmp_path, mode):
    path = tmp_path / "file"
    path.write_bytes(bytes(1 << 20))
    asked = []
    pool = Pool(source=File(path, mode), initial_bytes=1 << 20, on_oom=lambda n: asked.append(n))
    with pytest.raises(OutOfMemory):
        pool.alloc(2 << 20)
    assert asked
    with numpy_memory(pool):
        assert np.ones(1 << 18)[-1] == 1
    with pytest.raises(OutOfMemory):
        File(path, mode).region(2 << 20)


@pytest.mark.parametrize("mode", ["r+", "w+"])
def test_a_refused_file_takes_no_room_on_the_disk(tmp_path, monkeypatch, mode):
    path = tmp_path / "sparse"
    path.touch()
    os.truncate(path, 1 << 20)
    there_is = os.fstatvfs
    monkeypatch.setattr(
        os, "fstatvfs", lambda fd: Mock(f_blocks=1 << 20, f_bfree=1, f_frsize=there_is(fd).f_frsize)
    )
    with pytest.raises(OSError, match="cannot reserve 1 MiB on disk"):
        File(path, mode).region(1 << 20)
    assert (path.stat().st_size, path.stat().st_blocks) == (1 << 20, 0)


def test_an_absolute_path_needs_no_current_folder(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # which it puts back at the end
    gone = tmp_path / "gone"
    gone.mkdir()
    os.chdir(gone)
    gone.rmdir()
    assert File(path).region().nbytes == path.stat().st_size
    entries = {entry.name: entry for entry in os.scandir(tmp_path)}  # of no class of paths
    assert File(entries[path.name]).region().nbytes == path.stat().st_size
    relative = [File("data", mode) for mode in ("r", "r+", "w+")]
    relative += [pickle.loads(pickle.dumps(one)) for one in relative]
    os.chdir(tmp_path)
    (tmp_path / "data").write_text("precious")
    for one in relative:
        with pytest.raises(FileNotFoundError, match="give an absolute path"):
            one.region(4)
    assert (tmp_path / "data").read_text() == "precious"


def test_a_new_file_that_another_region_has_by_then_is_not_removed(tmp_path, monkeypatch):
    path = tmp_path / "new"
    regions = []
    once_it_is_open(monkeypatch, lambda: regions.append(File(path, "w+").region(PAGE)))
    with pytest.raises((OutOfMemory, BlockingIOError)):
        File(path, "w+").region(PAGE)
    assert os.path.samestat(path.stat(), os.fstat(regions[0].fd))


def test_a_file_that_its_maker_removes_is_made_again(tmp_path, monkeypatch):
    """It was opened when it was there. What is written to it then would be in no file."""
    path = tmp_path / "new"
    path.touch()
    once_it_is_open(monkeypatch, path.unlink)
    region = File(path, "w+").region(PAGE)
    assert os.path.samestat(path.stat(), os.fstat(region.fd))


def test_a_file_that_its_maker_removes_before_it_is_opened_is_made_again(tmp_path, monkeypatch):
    path = tmp_path / "new"
    path.touch()
    asked = []

    def found(*words, really=os.stat, **options):
        if not asked:
            asked.append(path.unlink())
        return really(*words, **options)

    monkeypatch.setattr(os, "stat", found)
    region = File(path, "w+").region(PAGE)
    assert asked and os.path.samestat(path.stat(), os.fstat(region.fd))


def sparse(path, nbytes, written):
    """A file of holes, but for some bytes."""
    path.write_bytes(b"")
    os.truncate(path, nbytes)
    with path.open("r+b") as file:
        for at in written:
            file.seek(at)
            file.write(b"written")
    return path


@pytest.mark.parametrize("hole", ["all", "first", "last", "none"])
def test_what_is_written_to_is_on_disk(tmp_path, hole):
    """A mapped file that finds the disk full is a SIGBUS."""
    nbytes = 1 << 20
    whole = range(0, nbytes, PAGE)
    written = {"all": [], "first": whole[1:], "last": whole[:-1], "none": whole}[hole]
    path = sparse(tmp_path / "sparse", nbytes, written)
    before = path.read_bytes()
    had = path.stat().st_blocks
    for mode in ("r", "c"):
        File(path, mode).region()
    assert path.stat().st_blocks == had
    region = File(path, "r+").region(nbytes // 2)
    assert path.stat().st_blocks * 512 >= nbytes // 2
    del region
    region = File(path, "r+").region()
    assert path.stat().st_blocks * 512 >= nbytes
    assert content(region) == path.read_bytes() == before


def test_a_disk_that_is_full(run_script, tmp_path):
    out = run_script(f"""
        import ctypes, os, sys
        sys.path.insert(0, {os.path.dirname(__file__)!r})
        import mounts
        from arenapy import Bump, File
        disk = {str(tmp_path)!r}
        try:
            mounts.own_mounts()
            mounts.mount("tmpfs", disk, "size=1m")
        except mounts.Impossible as why:
            print("skip", why)
            sys.exit()
        path = os.path.join(disk, "sparse")
        with open(path, "wb") as file:
            file.write(b"there")
            file.truncate(4 << 20)
        try:
            File(path, "r+").region()
        except OSError as error:
            assert error.filename == path and "ask for less" in str(error), error
            assert "cannot reserve 4 MiB on disk" in str(error), error
        else:
            raise AssertionError("mapped without room for it")
        with open(path, "rb") as file:
            assert file.read(10) == b"there" + bytes(5)
        os.truncate(path, 0)
        os.truncate(path, 1 << 19)
        arena = Bump(1 << 19, File(path, "r+"))
        with open(os.path.join(disk, "filler"), "wb", 0) as filler:  # now the disk is full
            try:
                while True:
                    filler.write(bytes(4096))
            except OSError:
                pass
        arena.zeros(1 << 19, "u1")[:] = 7
        try:
            File(path + "2", "w+").region(1 << 19)
        except OSError as error:
            assert "cannot reserve" in str(error), error
        assert not os.path.exists(path + "2")
        del arena
        os.unlink(path)
        with open(path, "wb") as file:
            file.truncate(1 << 19)
        with open(os.path.join(disk, "filler"), "ab", 0) as filler:
            try:
                while True:
                    filler.write(bytes(4096))
            except OSError:
                pass
        for mode in "rc":  # to read a hole takes memory there
            try:
                File(path, mode).region()
            except OSError as error:
                assert "cannot reserve 512 KiB" in str(error), error
            else:
                raise AssertionError("mapped without memory for it")
        os.unlink(os.path.join(disk, "filler"))
        # What is refused has taken nothing of it.
        os.truncate(path, 4 << 20)
        with open(path, "r+b") as file:
            file.seek(2 << 20)
            file.write(bytes(8192))
        free, blocks = os.statvfs(disk).f_bfree, os.stat(path).st_blocks
        for mode in "rc":
            try:
                File(path, mode).region()
            except OSError as error:
                assert "cannot reserve 4 MiB" in str(error), error
            else:
                raise AssertionError("mapped without memory for it")
            assert (os.statvfs(disk).f_bfree, os.stat(path).st_blocks) == (free, blocks)
        os.truncate(path, 1 << 19)
        for mode in "rc":
            region = File(path, mode).region()
            assert ctypes.string_at(region.address, 1 << 19) == bytes(1 << 19)
        print("ran")
    """)
    if out.startswith("skip"):
        pytest.skip(out)


@pytest.fixture
def huge_pages(hugetlb):
    """Bytes of a huge page, some of which are free."""

    def figure(name):
        lines = Path("/proc/meminfo").read_text().splitlines()
        return int(dict(line.split(":") for line in lines).get(name, "0").split()[0])

    setting = Path("/proc/sys/vm/nr_hugepages")
    try:
        before = setting.read_text()
        if figure("HugePages_Free") < HUGE_PAGES:
            setting.write_text(str(int(before) + HUGE_PAGES - figure("HugePages_Free")))
    except OSError:
        pytest.skip("no huge pages are free, and only root can reserve some")
    try:
        if figure("HugePages_Free") < HUGE_PAGES:  # the kernel takes what it finds in one piece
            pytest.skip("the machine's memory is too fragmented for huge pages")
        yield figure("Hugepagesize") << 10
    finally:
        if setting.read_text() != before:
            setting.write_text(before)


@pytest.mark.no_sanitizer  # which maps memory of its own meanwhile
def test_a_file_of_huge_pages(run_script, tmp_path, huge_pages):
    """The kernel rounds what is mapped of it to huge pages, whatever it was asked for."""
    out = run_script(f"""
        import ctypes, gc, os, sys
        sys.path.insert(0, {os.path.dirname(__file__)!r})
        import mounts
        from arenapy import Bump, File, OutOfMemory
        disk, page = {str(tmp_path)!r}, {huge_pages}
        try:
            mounts.own_mounts()
            mounts.mount("hugetlbfs", disk)
            os.close(os.open(os.path.join(disk, "x"), os.O_CREAT))
            File(os.path.join(disk, "x"), "w+").region(1)
        except (mounts.Impossible, OSError) as why:
            print("skip", why)
            sys.exit()
        os.unlink(os.path.join(disk, "x"))

        def mappings():
            gc.collect()
            with open("/proc/self/maps") as lines:
                return [line for line in lines if "[heap]" not in line]

        path = os.path.join(disk, "memory")
        mappings()
        for nbytes in (1, 4096, 5000, page, page + 1):
            pages = -(-nbytes // page)
            before = mappings()
            region = File(path, "w+").region(nbytes)
            assert (region.nbytes, region.page_size) == (nbytes, page)
            assert region.address % page == 0
            assert os.stat(path).st_size == pages * page
            new = [line for line in mappings() if path in line]
            start, end = (int(at, 16) for at in new[0].split()[0].split("-"))
            assert len(new) == 1 and (start, end - start) == (region.address, pages * page)
            ctypes.memset(region.address, 7, nbytes)
            region.close()
            assert mappings() == before, "something else was unmapped, or not all was"
            for mode in ("r", "c", "r+"):
                region = File(path, mode).region()
                assert region.nbytes == pages * page
                assert ctypes.string_at(region.address, nbytes) == bytes([7]) * nbytes
                del region
        arena = Bump(page, File(path, "r+"))
        array = arena.zeros(page // 2, "u1")
        array[:] = 1
        child = os.fork()
        if not child:
            os._exit(0 if (array == 1).all() else 1)
        assert os.waitpid(child, 0)[1] == 0
        del array
        arena.reset()
        assert arena.stats().pending_bytes == 0
        del arena
        copies = Bump(page, File(path, "c"))
        child = os.fork()
        if not child:  # whose pages of a copy could run out
            try:
                copies.alloc(1)
            except ValueError as error:
                os._exit(0 if "fork" in str(error) else 2)
            os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
        del copies
        many = 1 << 40
        os.truncate(path, many)
        for mode in ("r", "c", "r+"):
            try:
                File(path, mode).region()
            except OutOfMemory as error:
                assert f"needs {{many // page}} pages of" in str(error), error
            else:
                raise AssertionError("more than there is")
        os.truncate(path, 0)
        try:
            File(path, "w+").region(many)
        except OSError as error:
            assert "huge pages" in str(error), error
        assert os.stat(path).st_blocks == 0
        print("ran")
    """)
    if out.startswith("skip"):
        pytest.skip(out)


def test_file_that_shrinks_is_a_clear_error(path):
    region = File(path).region()
    size = region.nbytes
    os.truncate(path, PAGE)
    assert vm.file_nbytes(region.fd) == PAGE
    with pytest.raises(BufferError, match=f"{PAGE}.*{size}"):
        region.buffer()


# ---- existing memory


@pytest.mark.parametrize(
    "obj",
    [
        bytearray(100),
        array.array("d", [1.0] * 10),
        np.zeros((3, 4), "i4"),
        memoryview(bytearray(100))[7:],
        (ctypes.c_int * 9)(),
        mmap.mmap(-1, PAGE),
    ],
    ids=lambda obj: type(obj).__name__,
)
def test_existing_is_the_memory_of_the_object(obj):
    view = memoryview(obj)
    region = Existing(obj).region()
    assert region.kind == "existing"
    assert region.nbytes == view.nbytes
    ctypes.memset(region.address, 0x41, region.nbytes)
    assert view.tobytes() == b"A" * view.nbytes


def test_existing_stays_exported_while_the_region_lives():
    data = bytearray(100)
    source = Existing(data)
    data += b"more"  # a recipe alone holds nothing
    region = source.region()
    assert region.nbytes == 104
    with pytest.raises(BufferError):
        data.append(1)
    region.close()
    data.append(1)
    region = source.region()
    del region
    data.append(1)


def test_existing_has_one_region_at_a_time():
    source = Existing(bytearray(100))
    region = source.region(50)
    with pytest.raises(OutOfMemory, match=r"bytearray of 100 bytes>\) already has a region"):
        source.region(50)
    region.close()
    assert source.region(100).nbytes == 100


def test_existing_errors():
    with pytest.raises(TypeError, match="int has none"):
        Existing(3)
    with pytest.raises(BufferError, match=r"bytes is read-only.*readonly=True"):
        Existing(b"abc")
    with pytest.raises(BufferError, match="ndarray is not C-contiguous"):
        Existing(np.zeros((4, 4))[:, ::2])
    with pytest.raises(BufferError, match="ndarray is not C-contiguous"):
        Existing(np.zeros((4, 4), order="F"))
    with pytest.raises(ValueError, match="bytearray is empty"):
        Existing(bytearray())
    with pytest.raises(TypeError, match="readonly=1"):
        Existing(b"abc", readonly=1)
    with pytest.raises(OutOfMemory, match="has 3 bytes, and the request is for 4"):
        Existing(bytearray(3)).region(4)


def unpickled_beside_another(memory):
    region = Existing(memory).region()
    try:
        pickling.rebuild_buffer(memory, None, False)
    finally:
        region.close()


@pytest.mark.parametrize(
    ("nbytes", "call"),
    [
        (0, Existing),
        (PAGE, lambda memory: Existing(memory).region("x")),
        (PAGE, lambda memory: Bump(2 * PAGE, Existing(memory))),
        (PAGE, unpickled_beside_another),
    ],
)
def test_an_error_does_not_keep_the_object_exported(nbytes, call):
    memory = bytearray(nbytes)
    try:
        call(memory)
    except (OutOfMemory, TypeError, ValueError, BufferError):
        memory.extend(b"x")  # while the traceback lives
    assert len(memory) == nbytes + 1


@pytest.mark.parametrize(
    "call",
    [
        lambda memory: Existing(memory).region(),
        lambda memory: pickling.rebuild_buffer(memory, None, False),
    ],
)
def test_an_error_once_a_region_is_there_does_not_end_its_export(call):
    """As of a debugger that is left there: it has seen the region."""
    memory, seen = bytearray(PAGE), []

    def trace(frame, event, result):
        if event == "return" and frame.f_code.co_name == "region_of":
            seen.append(result)
            raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        with pytest.raises(KeyboardInterrupt):
            call(memory)
    finally:
        sys.settrace(None)
    (region,) = seen
    with pytest.raises(BufferError):
        memory.extend(b"x")
    region.close()
    del region, seen[:]
    memory.extend(b"x")


def test_existing_read_only():
    data = b"abc" * 50
    region = Existing(data, readonly=True).region()
    assert region.readonly
    assert content(region) == data


def test_existing_shared_memory_is_not_the_childs():
    """After a fork both would hand out the same bytes."""
    assert not closed_in_child(Existing(bytearray(PAGE)))
    shared = shared_memory.SharedMemory(create=True, size=PAGE)
    try:
        assert closed_in_child(Existing(shared.buf))
    finally:
        shared.close()
        shared.unlink()


def test_an_interrupted_call_leaves_no_file(tmp_path):
    """Wherever a signal's exception strikes while the file is opened."""

    class Strike(BaseException):
        pass

    path = tmp_path / "new"
    open_file = vm.open_file

    def struck(*arguments, **options):  # the signal came during open(2)
        open_file(*arguments, **options)
        raise Strike

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vm, "open_file", struck)
        with pytest.raises(Strike):
            File(path, "w+").region(4096)
    assert not path.exists()
    path.write_bytes(b"old")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vm, "open_file", struck)
        with pytest.raises(Strike):
            File(path, "r+").region()
    assert path.read_bytes() == b"old"


@pytest.mark.parametrize(
    ("place", "make"),
    [
        ("arenapy.linux.vm.reserve_blocks", lambda path: File(path, "r+").region(1 << 20)),
        ("arenapy.linux.vm.map_memory", lambda path: File(path, "w+").region(1 << 20)),
        ("arenapy.linux.vm.areas", lambda path: Existing(mmap.mmap(-1, 1 << 20)).region(1 << 20)),
    ],
)
def test_a_time_limit_while_a_region_is_made_is_not_lost(place, make, tmp_path, monkeypatch):
    """A signal's handler may raise it anywhere, and it is an OSError."""
    path = tmp_path / "data"
    path.touch()
    os.truncate(path, 1 << 20)  # a hole
    monkeypatch.setattr(place, Mock(side_effect=TimeoutError("time limit")))
    with pytest.raises(TimeoutError, match=r"^time limit$"):
        make(path)
