"""Reserved address space: what the kernel says of it after each call."""

import ctypes
import errno
import os
import re
from pathlib import Path

import pytest
from kernel_view import OWN_FAULTS, faults_of, is_mapped, resident, smaps, vm_flags

from arenapy.linux import vm

MIB = 1 << 20
PAGE = vm.PAGE_SIZE
# MADV_DONTNEED_LOCKED; without it the part is unlocked, which splits the mapping.
LOCKED_PAGES_CAN_GO = tuple(map(int, re.findall(r"\d+", os.uname().release)[:2])) >= (5, 18)


def mapped_bytes():
    return int(Path("/proc/self/statm").read_text().split()[0]) * PAGE


def fill(address, nbytes):
    ctypes.memset(address, 0x5A, nbytes)


@pytest.fixture
def reserved():
    """Call it as `vm.reserve`; it unmaps at the end and gives the address."""
    mapped = []

    def make(nbytes, **options):
        mapped.append(vm.reserve(nbytes, **options))
        return mapped[-1].address

    yield make
    for mapping in mapped:
        mapping.unmap()


@pytest.mark.parametrize("guard", [False, True])
@pytest.mark.parametrize("align", [0, 2 * MIB, 64 * MIB])
@pytest.mark.parametrize("nbytes", [1, PAGE, 5 * MIB + 3])
@pytest.mark.no_sanitizer  # whose allocator maps memory of its own there
@pytest.mark.sampled
def test_reservation_is_aligned_and_nothing_else_stays(nbytes, align, guard):
    before = mapped_bytes()
    mapping = vm.reserve(nbytes, align=align, guard=guard)
    address, map_address, map_nbytes = mapping.address, mapping.map_address, mapping.map_nbytes
    assert mapped_bytes() - before == map_nbytes
    pages, margin = -(-nbytes // PAGE) * PAGE, PAGE if guard else 0
    assert address % max(align, PAGE) == 0
    assert (map_address, map_nbytes) == (address - margin, pages + 2 * margin)
    for at in (map_address, address, map_address + map_nbytes - 1):
        assert smaps(at)["permissions"] == "---p"
    assert "nr" in vm_flags(address)  # not charged for
    mapping.unmap()
    assert not any(is_mapped(at) for at in (map_address, address, map_address + map_nbytes - 1))


@pytest.mark.no_sanitizer  # whose allocator maps memory of its own there
def test_what_cannot_be_reserved():
    before = mapped_bytes()
    with pytest.raises(ValueError, match="cannot reserve 0 bytes"):
        vm.reserve(0)
    with pytest.raises(ValueError, match=f"cannot reserve {(1 << 64) - 1} bytes"):
        vm.reserve((1 << 64) - 1)
    for nbytes, align in ((1 << 62, 0), (1 << 63, 1 << 63)):
        with pytest.raises(OSError, match="memory") as caught:
            vm.reserve(nbytes, align=align)
        assert caught.value.errno == errno.ENOMEM
    assert mapped_bytes() == before


@pytest.mark.no_sanitizer
@pytest.mark.parametrize("error", [0, errno.EINVAL])
def test_committed_memory_does_not_fault(reserved, populate_error, error):
    populate_error(error)  # EINVAL: pages are touched instead
    address = reserved(64 * MIB)
    table = 0
    for grown in (PAGE, 3 * PAGE, MIB, 4 * MIB):  # in place, as tables grow
        vm.commit(address + table, grown - table)
        assert faults_of(fill, address + table, grown - table) <= OWN_FAULTS
        table = grown
    assert ctypes.string_at(address, table) == b"\x5a" * table
    assert smaps(address)["range"] == (address, address + table)  # one mapping, not four
    assert smaps(address + table)["permissions"] == "---p"


@pytest.mark.parametrize("locked", [False, True])
def test_decommit_gives_pages_back_and_splits_nothing(reserved, locked):
    address = reserved(8 * MIB)
    vm.commit(address, 4 * MIB)
    if locked:
        vm.lock(address, 4 * MIB)
    fill(address, 4 * MIB)
    assert resident(address, 4 * MIB) == 4 * MIB
    vm.decommit(address + MIB, 2 * MIB)
    assert resident(address, 4 * MIB) == 2 * MIB
    if not locked or LOCKED_PAGES_CAN_GO:
        assert smaps(address)["range"] == (address, address + 4 * MIB)
    assert ctypes.string_at(address + MIB - 1, 1) == ctypes.string_at(address + 3 * MIB, 1) == b"Z"
    vm.commit(address + MIB, 2 * MIB)
    assert faults_of(fill, address + MIB, 2 * MIB) <= OWN_FAULTS
    vm.decommit(address + MIB, 2 * MIB)
    assert not ctypes.string_at(address + MIB, 2 * MIB).strip(b"\0")


@pytest.mark.no_sanitizer
def test_failed_commit_leaves_no_page(reserved, populate_error):
    address = reserved(4 * MIB)
    vm.commit(address, MIB)
    fill(address, MIB)
    populate_error(errno.ENOMEM, 1)
    with pytest.raises(OSError, match="memory") as caught:
        vm.commit(address + MIB, MIB)
    assert caught.value.errno == errno.ENOMEM
    assert resident(address, 4 * MIB) == MIB
    vm.commit(address + MIB, MIB)
    assert faults_of(fill, address + MIB, MIB) <= OWN_FAULTS


@pytest.mark.no_sanitizer
@pytest.mark.parametrize("error", [errno.EINTR, errno.EAGAIN])
def test_interrupted_commit_is_done_again(reserved, populate_error, error):
    address = reserved(MIB)
    populate_error(error, 3)
    vm.commit(address, MIB)
    assert faults_of(fill, address, MIB) <= OWN_FAULTS


def test_protect(reserved):
    address = reserved(2 * MIB)
    for accessible, permissions in ((True, "rw-p"), (True, "rw-p"), (False, "---p")):
        vm.protect(address, MIB, accessible)
        assert smaps(address)["permissions"] == permissions


def test_what_is_no_reservation():
    with vm.reserve(2 * PAGE) as mapping:
        address = mapping.address
    for call in (vm.commit, vm.decommit, lambda *part: vm.protect(*part, True)):
        for at, code in ((address, errno.ENOMEM), (address + 1, errno.EINVAL)):
            with pytest.raises(OSError, match="Errno") as caught:
                call(at, PAGE)
            assert caught.value.errno == code
