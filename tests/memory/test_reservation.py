"""`Host.reserve` and `Shared.reserve`: each option, and what commit and decommit do.

It is read back from the kernel.
"""

import ctypes
import gc
import re
import signal
from functools import partial

import pytest
from children import in_child
from helpers import in_threads
from hypothesis import given
from hypothesis import strategies as st
from kernel_view import OWN_FAULTS, is_mapped, numa_map, resident, smaps, vm_flags
from reserved import MIB, PAGE, SIZE, accessible, both, read, reserve, rss, write

from arenapy import Bump, Pool
from arenapy.errors import OutOfMemory

# The package's attribute of this name is the function.
from arenapy.linux import limits as memory_info
from arenapy.linux import vm
from arenapy.linux.limits import HugePool, Limit
from arenapy.memory import host_request as request
from arenapy.memory.sources import Existing, File, Host, Shared

# ---- what it is


@both
def test_reservation_is_a_region_without_memory(source):
    reservation = reserve(5 * MIB + 1, source=source)
    region = reservation.region
    assert reservation.nbytes == region.nbytes == 6 * MIB
    assert reservation.page_size == region.page_size == PAGE
    assert region.address % (2 * MIB) == 0
    kind = source.__name__.lower()
    assert (region.kind, region.readonly, region.closed) == (kind, False, False)
    assert rss(reservation) == 0
    assert not accessible(reservation, 0)


@pytest.mark.no_sanitizer
@both
def test_more_than_there_is_can_be_reserved_but_not_committed(source, monkeypatch):
    nbytes = 16 * memory_info.memory_info().total
    reservation = reserve(nbytes, source=source)
    reservation.commit(reservation.nbytes - 2 * MIB, 2 * MIB)
    assert resident(reservation.region.address + reservation.nbytes - 4 * MIB, 4 * MIB) == 2 * MIB
    assert write(reservation, reservation.nbytes - 2 * MIB, 2 * MIB) <= OWN_FAULTS
    monkeypatch.delattr(vm, "protect")
    with pytest.raises(OutOfMemory, match="prefault=False"):
        reservation.commit(0, reservation.nbytes - 2 * MIB)


@pytest.mark.parametrize(("moment", "asks"), [(1e9, [2, 1, 4, 4]), (-1.0, [2, 2, 1, 4, 4])])
@both
def test_what_is_free_is_asked_again_after_a_share_or_a_moment(source, monkeypatch, moment, asks):
    asked = []
    monkeypatch.setattr(
        request, "check_request", lambda n, *a, **k: asked.append(n // MIB) or 64 * MIB
    )
    monkeypatch.setattr("arenapy.memory.reservation.MOMENT", moment)
    reservation = reserve(16 * MIB, source=source)
    for offset, nbytes in ((0, 2), (2, 2), (4, 1), (5, 4), (9, 4)):  # a share is 4 MiB
        reservation.commit(offset * MIB, nbytes * MIB)
    assert asked == asks


def test_others_cannot_reserve():
    for source in (File("x"), Existing(bytearray(1))):
        assert not hasattr(source, "reserve")


@pytest.mark.parametrize("choice", ["2M", "1G"])
def test_hugetlb_is_mapped_region_by_region(choice, monkeypatch):
    pools = {size: HugePool(size, 9, 9, 0) for size in (2 * MIB, 1024 * MIB)}
    monkeypatch.setattr(request, "huge_pools", lambda: pools)
    assert Host(huge_pages=choice).reserve(1) is None


@pytest.mark.parametrize("name", ["RLIMIT_AS", "vm.overcommit_memory=2 (CommitLimit)"])
def test_none_where_a_limit_counts_addresses(name, monkeypatch):
    limit = Limit(name, 1 << 60, 0, "raise it", counts_mappings=True)
    monkeypatch.setattr("arenapy.memory.reservation.read_limits", lambda: [limit])
    assert Host().reserve(SIZE) is None


@pytest.mark.parametrize("kind", ["RLIMIT_AS", "RLIMIT_DATA"])
@pytest.mark.no_sanitizer
def test_none_under_a_resource_limit(run_script, kind):
    out = run_script(f"""
        import resource
        from arenapy.memory.sources import Host
        print(Host().reserve(1 << 30) is None)
        resource.setrlimit(resource.{kind}, (1 << 40,) * 2)
        print(Host().reserve(1 << 30) is None, Host().region(1 << 20).nbytes)
    """)
    assert out.split() == ["False", "True", str(MIB)]


def test_none_if_there_are_not_that_many_addresses():
    for nbytes in (1 << 62, (1 << 63) - 1):
        assert Host().reserve(nbytes) is None
        with pytest.raises(OutOfMemory, match=r"grow=True needs [48] EiB"):
            Shared().reserve(nbytes)


@pytest.mark.parametrize(("kind", "nbytes"), [("AS", 1 << 40), ("FSIZE", 1 << 25)])
@pytest.mark.no_sanitizer
@pytest.mark.full
def test_a_limit_on_addresses_or_on_files_is_named(run_script, kind, nbytes):
    """Other limits do not count shared memory before it has pages."""
    run_script(f"""
        import resource
        from arenapy import Bump, OutOfMemory, Pool, Shared
        resource.setrlimit(resource.RLIMIT_DATA, (1 << 40,) * 2)
        assert Shared().reserve(1 << 30).nbytes == 1 << 30
        resource.setrlimit(resource.RLIMIT_{kind}, ({nbytes},) * 2)
        source = Shared(grow=True)
        for make in (lambda: Bump(4096, source, 1 << 30), lambda: Pool(1 << 30, source).alloc(1)):
            try:
                make()
            except OutOfMemory as error:
                assert "grow=True" in str(error) and "RLIMIT_{kind}" in str(error), error
            else:
                raise AssertionError("it did not refuse")
        assert Shared().region(1 << 20).nbytes == 1 << 20
    """)


@pytest.mark.parametrize("nbytes", [0, -1, 1 << 63])
@both
def test_bad_size_names_it(source, nbytes):
    with pytest.raises(ValueError, match=re.escape(f"nbytes={nbytes!r}")):
        source().reserve(nbytes)
    with pytest.raises(TypeError, match=r"nbytes=1\.5"):
        source().reserve(1.5)


# ---- commit, decommit


@pytest.mark.no_sanitizer
@pytest.mark.parametrize("options", [
    {}, {"huge_pages": None}, {"threads": 3}, {"lock": True}, {"source": Shared},
    {"source": Shared, "lock": True},
])  # fmt: skip
@pytest.mark.parametrize("nbytes", [PAGE, 2 * MIB, 6 * MIB])
@pytest.mark.sampled
@pytest.mark.full
def test_committed_memory_does_not_fault(nbytes, options):
    reservation = reserve(**options)
    for _ in range(3):
        reservation.commit(4 * MIB, nbytes)
        assert rss(reservation) == nbytes
        assert write(reservation, 4 * MIB, nbytes) <= OWN_FAULTS
        assert not accessible(reservation, 4 * MIB - 1)
        assert not accessible(reservation, 4 * MIB + nbytes)
        reservation.decommit(4 * MIB, nbytes)
        assert rss(reservation) == 0
        assert accessible(reservation, 4 * MIB)
    reservation.commit(4 * MIB, nbytes)
    assert not read(reservation, 4 * MIB, nbytes).strip(b"\0")


@both
def test_parts_are_independent_and_committing_upwards_is_one_mapping(source):
    reservation = reserve(source=source)
    for offset in range(0, 16 * MIB, 2 * MIB):
        reservation.commit(offset, 2 * MIB)
        write(reservation, offset, 2 * MIB, offset // MIB + 1)
    address = reservation.region.address
    one = smaps(address)["range"]
    assert one[0] == address and one[1] >= address + 16 * MIB
    for offset in range(0, 16 * MIB, 4 * MIB):
        reservation.decommit(offset, 2 * MIB)
    assert smaps(address)["range"] == one
    assert rss(reservation) == 8 * MIB
    for offset in range(2 * MIB, 16 * MIB, 4 * MIB):
        assert read(reservation, offset, 2 * MIB) == bytes([offset // MIB + 1]) * 2 * MIB


# A part is as large as a page of the kernel's choice can be: else it may fill in what is missing.
KINDS = [
    ({"huge_pages": None}, PAGE),
    ({"huge_pages": None, "lock": True}, 3 * PAGE),
    ({}, 2 * MIB),
    ({"guard": True, "lock": True}, 2 * MIB),
    ({"source": Shared, "huge_pages": None}, PAGE),
    ({"source": Shared, "huge_pages": None, "lock": True}, 3 * PAGE),
    ({"source": Shared}, 2 * MIB),
]


@given(st.lists(st.integers(0, 7), max_size=24), st.sampled_from(KINDS))
def test_any_order_of_commits_and_decommits(parts, kind):
    """Against a model: which parts there are, and what was written to each."""
    options, part = kind
    reservation = reserve(8 * part, **options)
    there = {}
    for serial, i in enumerate(parts, 1):
        if i in there:
            assert read(reservation, i * part, part) == bytes([there.pop(i)]) * part
            reservation.decommit(i * part, part)
        else:
            reservation.commit(i * part, part)
            assert read(reservation, i * part, part) == bytes(part)
            write(reservation, i * part, part, serial)
            there[i] = serial
    for i, serial in there.items():
        assert read(reservation, i * part, part) == bytes([serial]) * part
    assert rss(reservation) == len(there) * part


@pytest.mark.parametrize("ahead", [0, 4 * MIB])
@both
def test_what_is_not_committed_nor_shortly_behind_it_is_a_segfault(source, monkeypatch, ahead):
    monkeypatch.setattr("arenapy.memory.reservation.AHEAD", ahead)
    reservation = reserve(source=source)
    reservation.commit(0, 2 * MIB)
    assert in_child(lambda: write(reservation, 0, 2 * MIB + ahead)) == 0
    assert in_child(lambda: write(reservation, 0, 2 * MIB + ahead + 1)) == -signal.SIGSEGV


@pytest.mark.parametrize(
    ("offset", "nbytes"),
    [(0, 0), (-PAGE, PAGE), (0, -PAGE), (1, PAGE), (0, 1), (SIZE, PAGE), (PAGE, SIZE)],
)
@both
def test_what_is_no_part(source, offset, nbytes):
    reservation = reserve(source=source)
    for call in (reservation.commit, reservation.decommit):
        with pytest.raises(ValueError, match=f"offset={offset}, nbytes={nbytes}: .*{SIZE}"):
            call(offset, nbytes)
        with pytest.raises(TypeError, match="offset='0'"):
            call("0", PAGE)
    assert rss(reservation) == 0


# ---- options


def test_huge_pages_option():
    auto, none = reserve(), reserve(huge_pages=None)
    assert "hg" in vm_flags(auto.region.address)
    assert "hg" not in vm_flags(none.region.address)
    auto.commit(0, 4 * MIB)
    assert "hg" in vm_flags(auto.region.address)
    with Host().region(4 * MIB).buffer() as whole:
        given_whole = vm.huge_bytes(whole.address, 4 * MIB)
    if given_whole == 4 * MIB:  # not where memory is fragmented, or they are off
        assert vm.huge_bytes(auto.region.address, 4 * MIB) == 4 * MIB


@both
def test_without_prefault_pages_come_on_touch(source):
    reservation = reserve(prefault=False, huge_pages=None, source=source)
    reservation.commit(0, MIB)
    assert rss(reservation) == 0
    assert write(reservation, 0, MIB) >= 4  # a fault may map several pages
    assert rss(reservation) == MIB


@pytest.mark.no_sanitizer  # its munlock does nothing
@pytest.mark.parametrize("prefault", [True, False])
@both
def test_lock(source, prefault):
    reservation = reserve(lock=True, prefault=prefault, source=source)
    assert "lo" not in vm_flags(reservation.region.address)
    reservation.commit(0, 2 * MIB)
    assert "lo" in vm_flags(reservation.region.address)
    write(reservation, 0, 2 * MIB)
    assert rss(reservation) == 2 * MIB
    reservation.decommit(0, 2 * MIB)
    assert rss(reservation) == 0
    reservation.commit(0, 2 * MIB)
    assert "lo" in vm_flags(reservation.region.address)
    assert "lo" not in vm_flags(reservation.region.address + 2 * MIB)


@both
def test_lock_beyond_the_limit(source, run_script):
    out = run_script(
        """
        import os, resource
        from arenapy.errors import OutOfMemory
        from arenapy.memory.sources import Host, Shared
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (3 << 20,) * 2)
        source = SOURCE(lock=True)
        if os.getuid() == 0:          # root may lock regardless
            os.setresuid(65534, 65534, 65534)
        reservation = source.reserve(1 << 30)
        reservation.commit(0, 2 << 20)
        for _ in range(2):
            try:
                reservation.commit(2 << 20, 2 << 20)
            except OutOfMemory as error:
                print(error)
        reservation.decommit(0, 2 << 20)
        reservation.commit(0, 2 << 20)     # counts once
    """.replace("SOURCE", source.__name__)
    )
    lines = out.splitlines()
    assert len(lines) == 2
    for part in ("2 MiB", "RLIMIT_MEMLOCK is 3 MiB", "ulimit -l", "lock=False"):
        assert part in lines[0] and part in lines[1]


@pytest.mark.no_sanitizer  # its own mappings may come to lie there
def test_guard_pages_lie_around():
    reservation = reserve(guard=True)
    reservation.commit(0, SIZE)
    address = reservation.region.address
    assert address % (2 * MIB) == 0
    for guard in (address - 1, address + SIZE):
        assert smaps(guard)["permissions"] == "---p"
    assert in_child(lambda: write(reservation, SIZE, 1)) == -signal.SIGSEGV
    assert in_child(lambda: write(reservation, -1, 1)) == -signal.SIGSEGV
    reservation.region.close()
    assert not any(is_mapped(at) for at in (address - PAGE, address, address + SIZE))


@both
def test_numa_node(source, monkeypatch):
    nodes = memory_info.numa_nodes()
    if not nodes:
        pytest.skip("a kernel without NUMA")
    reservation = reserve(numa_node=nodes[0], source=source)
    reservation.commit(0, 2 * MIB)
    line = numa_map(reservation.region.address)
    assert f"bind:{nodes[0]}" in line
    assert re.search(rf"N{nodes[0]}=\d+", line)
    monkeypatch.setattr(request, "numa_nodes", lambda: (0, 1023))
    with pytest.raises(OSError, match=r"numa_node=1023: .* the nodes 0, 1023"):
        source(numa_node=1023).reserve(SIZE)


def test_shared_memory_that_others_wrote_to_meanwhile_is_zero_again():
    """A stray write into a part without memory, by another process or by this one."""
    reservation = reserve(source=Shared)
    reservation.commit(0, 2 * MIB)
    reservation.decommit(0, 2 * MIB)
    assert in_child(lambda: write(reservation, PAGE, PAGE)) == 0
    assert rss(reservation) == PAGE
    reservation.commit(0, 2 * MIB)
    assert not read(reservation, 0, 2 * MIB).strip(b"\0")


def refuses(reservation):
    for call in (reservation.commit, reservation.decommit):
        with pytest.raises(ValueError, match="is closed; reserve again"):
            call(2 * MIB, PAGE)


def test_fork_option():
    kept, skipped = reserve(), reserve(fork="skip")
    for reservation in (kept, skipped):
        reservation.commit(0, 2 * MIB)
        write(reservation, 0, 2 * MIB)
    assert "dc" not in vm_flags(kept.region.address)
    assert {"dc"} <= vm_flags(skipped.region.address) & vm_flags(skipped.region.address + SIZE - 1)

    def use(reservation):
        assert read(reservation, 0, 1) == b"Z"
        reservation.commit(2 * MIB, 2 * MIB)
        write(reservation, 0, 4 * MIB, 1)

    assert in_child(lambda: use(kept)) == 0
    assert in_child(lambda: use(skipped)) == -signal.SIGSEGV
    assert in_child(lambda: refuses(skipped)) == 0
    assert read(kept, 0, 2 * MIB) == b"Z" * 2 * MIB
    assert rss(kept) == rss(skipped) == 2 * MIB


@pytest.mark.no_sanitizer
def test_threads_option(monkeypatch):
    seen = []
    real = vm.prefault
    monkeypatch.setattr(
        vm, "prefault", lambda *args, **options: (seen.append(options), real(*args, **options))
    )
    reserve(threads=3).commit(0, 8 * MIB)
    reserve().commit(0, 8 * MIB)
    assert [options["threads"] for options in seen] == [3, 0]


# ---- its end


@pytest.mark.parametrize("options", [{}, {"guard": True}, {"source": Shared}])
def test_unmapped_with_the_region_and_not_before(options):
    reservation = reserve(**options)
    reservation.commit(0, 2 * MIB)
    region, address = reservation.region, reservation.region.address
    gc.disable()  # there is no cycle for it to find
    try:
        del reservation
        ctypes.memset(address, 1, 2 * MIB)
        del region
        assert not is_mapped(address)
    finally:
        gc.enable()


@both
def test_after_the_region_is_closed(source):
    reservation = reserve(source=source)
    reservation.region.close()
    refuses(reservation)


@both
def test_threads_commit_parts_of_their_own(source):
    reservation = reserve(source=source)

    def work(first):
        for _ in range(20):
            reservation.commit(first, 2 * MIB)
            write(reservation, first, 2 * MIB, first // MIB)
            assert read(reservation, first, 2 * MIB) == bytes([first // MIB]) * 2 * MIB
            reservation.decommit(first, 2 * MIB)

    in_threads(*(partial(work, 4 * MIB * i) for i in range(4)))
    assert rss(reservation) == 0


@pytest.mark.parametrize("allocator", [Bump, Pool])
@pytest.mark.parametrize("source", [Host, Shared])
def test_nobody_knows_where_memory_is_once_the_allocator_is_gone(allocator, source):
    one = allocator(64 * MIB, source(grow=True))
    one.alloc(1).release()
    (region,) = one.regions
    del one
    gc.collect()
    with pytest.raises(ValueError, match="gone"):
        region.buffer()
    with pytest.raises(ValueError, match="gone"):
        Bump(MIB, Again(region))


class Again:
    """A source that has kept a region."""

    def __init__(self, kept):
        self.kept = kept

    def region(self, nbytes):
        return self.kept
