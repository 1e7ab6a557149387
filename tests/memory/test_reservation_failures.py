"""`Reservation` where limits or the kernel say no: the error explains it, and nothing changes."""

import errno
import gc
import os
import resource
import signal
import sys
import threading
from pathlib import Path

import pytest
from children import in_child
from kernel_view import OWN_FAULTS, is_mapped, resident, vm_flags
from reserved import MIB, SIZE, accessible, read, reserve, rss, write

from arenapy import Bump, Pool
from arenapy.errors import OutOfMemory

# The package's attribute of this name is the function.
from arenapy.linux import limits as memory_info
from arenapy.linux import vm
from arenapy.linux.limits import Limit
from arenapy.memory.sources import Host


def test_a_tight_cgroup_is_named_and_nothing_changes(monkeypatch):
    group = Limit("cgroup /sys/fs/cgroup/job (memory.max)", 8 * MIB, 0, "raise its max")
    monkeypatch.setattr(memory_info, "read_limits", lambda _proc: [group])
    monkeypatch.setattr("arenapy.memory.reservation.AHEAD", 0)
    reservation = reserve()
    reservation.commit(0, 4 * MIB)
    with pytest.raises(OutOfMemory, match=r"10 MiB.*job \(memory.max\) has 8 MiB.*prefault=False"):
        reservation.commit(4 * MIB, 10 * MIB)
    assert not accessible(reservation, 4 * MIB)
    lazy = reserve(prefault=False)
    lazy.commit(0, 10 * MIB)
    assert accessible(lazy, 0)


@pytest.mark.parametrize(
    ("number", "error", "match"),
    [
        (errno.ENOMEM, OutOfMemory, "cannot fault in .* 4 MiB .*prefault=False"),
        (errno.EFAULT, OSError, "Bad address"),
        (133, OSError, "hardware"),
    ],
)
@pytest.mark.no_sanitizer
@pytest.mark.parametrize("lock", [False, True])
@pytest.mark.parametrize("before", [False, True])
def test_failed_commit_is_undone(number, error, match, lock, before, populate_error, monkeypatch):
    """The first slices succeed: what they faulted in goes back, and the lock with it."""
    monkeypatch.setattr("arenapy.memory.reservation.AHEAD", 0)
    reservation = reserve(lock=lock, threads=1)
    reservation.commit(0, 2 * MIB)
    if before:
        reservation.commit(2 * MIB, 4 * MIB)
        reservation.decommit(2 * MIB, 4 * MIB)
    write(reservation, 0, 2 * MIB)
    populate_error(number, 1)
    with pytest.raises(error, match=match) as caught:
        reservation.commit(2 * MIB, 4 * MIB)
    assert getattr(caught.value, "errno", number) in (number, None)
    assert rss(reservation) == 2 * MIB
    assert accessible(reservation, 2 * MIB)  # as after `decommit`
    assert "lo" not in vm_flags(reservation.region.address + 2 * MIB)
    assert read(reservation, 0, 2 * MIB) == b"Z" * 2 * MIB
    reservation.commit(2 * MIB, 4 * MIB)
    assert write(reservation, 0, 6 * MIB) <= OWN_FAULTS


def test_commit_that_fails_half_way_gives_back_what_it_had(monkeypatch):
    reservation = reserve()
    real = vm.prefault

    def half(address, nbytes, **options):
        real(address, nbytes // 2, **options)
        raise OSError(errno.ENOMEM, "out of it")

    with monkeypatch.context() as patch:
        patch.setattr(vm, "prefault", half)
        with pytest.raises(OutOfMemory, match="out of it"):
            reservation.commit(0, 8 * MIB)
    assert rss(reservation) == 0


def test_ctrl_c_is_undone(populate_error):
    reservation = reserve()
    populate_error(errno.EAGAIN)
    timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        reservation.commit(0, SIZE)
    timer.join()
    assert rss(reservation) == 0


@pytest.mark.parametrize(
    "make", [Pool, lambda: Bump(4096, Host(grow=True), 1 << 30)], ids=["Pool", "Bump"]
)
def test_a_second_signal_while_what_the_first_interrupted_is_given_back(make, monkeypatch):
    """A handler runs where a function of Python begins. A profiler stands for it."""
    arena = make()
    arena.alloc(100)
    (region,) = arena.regions
    before = resident(region.address, 64 * MIB)
    prefault = vm.prefault

    def second(frame, event, argument):
        if event == "call":
            sys.setprofile(None)
            raise KeyboardInterrupt("second")

    def interrupted(address, nbytes, **how):
        prefault(address, nbytes, **how)
        sys.setprofile(second)
        raise KeyboardInterrupt("first")

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(vm, "prefault", interrupted)
        try:
            arena.alloc(32 * MIB)
        finally:
            sys.setprofile(None)
    assert resident(region.address, 64 * MIB) <= before
    arena.alloc(32 * MIB)
    arena.check()


def test_other_refusals_of_the_kernel(monkeypatch):
    def refuse(*_args):
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    made = []
    real = vm.reserve
    monkeypatch.setattr(vm, "reserve", lambda *a, **k: made.append(real(*a, **k)) or made[-1])
    monkeypatch.setattr(vm, "advise", refuse)
    with pytest.raises((OSError, MemoryError), match=r"allocate memory|refused to map"):
        Host().reserve(SIZE).commit(0, 2 * MIB)
    gc.collect()
    assert len(made) == 1 and not is_mapped(made[0].address)


MAX_MAPPINGS = int(Path("/proc/sys/vm/max_map_count").read_text())


@pytest.mark.skipif(MAX_MAPPINGS > 200_000, reason="to have that many mappings takes long")
@pytest.mark.no_sanitizer
@pytest.mark.full
def test_too_many_mappings(run_script):
    out = run_script("""
        import gc
        from arenapy.linux import vm
        from arenapy.errors import OutOfMemory
        from arenapy.memory.sources import Host, Shared
        reservation, region = Host().reserve(64 << 20), Shared().region(1)
        mapping = vm.reserve(1 << 30)
        address = mapping.address
        try:
            for page in range(0, 1 << 30, 2 * vm.PAGE_SIZE):
                vm.protect(address + page, vm.PAGE_SIZE, True)   # two mappings more
        except OSError:
            pass
        for make in (
            Host().region, Shared().region, lambda n: reservation.commit(4 << 20, n),
            lambda n: reservation.commit(16 << 20, n),
        ):
            try:
                print(make(2 << 20))
            except OutOfMemory as error:
                print(error)
        mapping.unmap()
        for offset in (4, 16):
            reservation.commit(offset << 20, 2 << 20)
    """)
    lines = out.splitlines()
    assert len(lines) == 4
    for line in lines:
        assert f"mappings of at most {MAX_MAPPINGS}" in line
        assert "2 MiB" in line
        assert "vm.max_map_count" in line


@pytest.mark.no_sanitizer  # which may map memory of its own meanwhile
def test_a_limit_that_has_room_for_the_part_alone():
    """RLIMIT_DATA counts what is accessible, also what is not committed yet."""

    def grow():
        reservation = reserve()
        status = Path("/proc/self/status").read_text()
        room = (int(status.partition("VmData:")[2].split()[0]) << 10) + 16 * MIB
        resource.setrlimit(resource.RLIMIT_DATA, (room, room))
        for offset in range(0, 8 * MIB, 2 * MIB):
            reservation.commit(offset, 2 * MIB)
            write(reservation, offset, 2 * MIB, 7)

    assert in_child(grow) == 0
