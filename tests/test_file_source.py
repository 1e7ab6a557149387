"""Sources over what is there already: `File` and `Existing`."""

import array
import ctypes
import errno
import mmap
import os
from multiprocessing import shared_memory

import numpy as np
import pytest
from kernel_view import closed_in_child, nothing_leaks, vm_flags

from arenapy import vm
from arenapy.errors import OutOfMemory
from arenapy.source import Existing, File

PAGE = vm.PAGE_SIZE


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
        with pytest.raises(ValueError, match=f"{size + 1} bytes.*which has {size}.*w\\+"):
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


def test_new_file_without_room_is_removed(tmp_path, nothing_leaks):
    path = tmp_path / "large"
    with pytest.raises(OSError, match=r"cannot reserve .* on disk") as caught:
        File(path, "w+").region(1 << 60)
    assert caught.value.errno in (errno.EFBIG, errno.ENOSPC)
    assert not path.exists()


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
    with pytest.raises(OutOfMemory, match=r"Existing\(bytearray\) already has a region"):
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
    with pytest.raises(OutOfMemory, match="has 3 bytes, and 4"):
        Existing(bytearray(3)).region(4)


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
