"""Limits are read from fake /proc, /sys and cgroup trees, and once from the real ones."""

import html
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from arenapy.errors import OutOfMemory

# The package's attribute of this name is the function.
from arenapy.linux import limits as module
from arenapy.linux.limits import (
    UNLIMITED,
    HugePool,
    MemoryInfo,
    check_request,
    format_bytes,
    huge_pools,
    memory_info,
    numa_nodes,
    read_limits,
)

pytestmark = pytest.mark.no_sanitizer  # it limits the address space

GIB = 1 << 30
MIB = 1 << 20
NO_LIMIT_V1 = 9223372036854771712


class Tree:
    """A fake /proc with cgroups below it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.proc = root / "proc"
        self.mount = root / "cgroup mount"  # mountinfo escapes the blank
        self.mount.mkdir()
        (self.proc / "self").mkdir(parents=True)
        self.meminfo(total=64 * GIB, available=32 * GIB)

    def write(self, path: Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def meminfo(self, total: int, available: int, extra: str = "") -> None:
        self.write(
            self.proc / "meminfo",
            f"MemTotal: {total >> 10} kB\nMemAvailable: {available >> 10} kB\n"
            f"SwapTotal: 2048 kB\nSwapFree: 1024 kB\nHugePages_Total: 7\n{extra}",
        )

    def mounted(self, version: int, name: str, root: str = "/") -> None:
        """This process is in the cgroup `name`, and `root` of the hierarchy is mounted."""
        controllers = "memory,hugetlb" if version == 1 else ""
        self.write(self.proc / "self/cgroup", f"3:cpu:/other\n0:{controllers}:{name}\n")
        point = str(self.mount).replace(" ", "\\040")
        kind, options = ("cgroup", "rw,memory") if version == 1 else ("cgroup2", "rw,nsdelegate")
        self.write(
            self.proc / "self/mountinfo",
            f"30 23 0:28 / /elsewhere rw shared:1 - cgroup cgroup rw,cpu\n"
            f"35 31 0:32 {root} {point} rw,relatime shared:9 master:1 - {kind} cgroup {options}\n",
        )

    def v1(self, group: str, limit: int, usage: int, files: int = 0, hierarchy: int = 0) -> None:
        folder = self.mount / group
        self.write(folder / "memory.limit_in_bytes", f"{limit}\n")
        self.write(folder / "memory.usage_in_bytes", f"{usage}\n")
        self.write(
            folder / "memory.stat",
            f"inactive_file 1\ntotal_inactive_file {files}\ntotal_active_file {files}\n"
            f"hierarchical_memory_limit {hierarchy or limit}\n",
        )

    def v2(self, group: str, limit: int | str, usage: int, files: int = 0) -> None:
        folder = self.mount / group
        self.write(folder / "memory.max", f"{limit}\n")
        self.write(folder / "memory.current", f"{usage}\n")
        self.write(folder / "memory.stat", f"anon 5\ninactive_file {files}\nactive_file {files}\n")

    def info(self) -> MemoryInfo:
        return module._memory_info(self.proc)


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def cgroups(tree: Tree) -> dict[str, tuple[int, int]]:
    """Directory to (limit, available) of each cgroup limit found."""
    return {
        limit.name.removeprefix("cgroup ").rsplit(" (", 1)[0]: (limit.nbytes, limit.available)
        for limit in read_limits(tree.proc)
        if limit.name.startswith("cgroup ")
    }


def test_without_cgroups_the_machine_binds(tree: Tree) -> None:
    info = tree.info()
    assert (info.total, info.used, info.available) == (64 * GIB, 32 * GIB, 32 * GIB)
    assert info.limit.name == "the machine (MemAvailable)"
    assert (info.swap_total, info.swap_free) == (2 * MIB, MIB)


def test_v1_counts_file_pages_of_the_subtree_as_free(tree: Tree) -> None:
    tree.mounted(1, "/job")
    tree.v1("job", limit=8 * GIB, usage=6 * GIB, files=GIB)
    assert cgroups(tree) == {f"{tree.mount}/job": (8 * GIB, 4 * GIB)}
    info = tree.info()
    assert info.available == 4 * GIB
    assert info.limit.used == 4 * GIB
    assert "job (memory.limit_in_bytes)" in info.limit.name


def test_v2_counts_file_pages_as_free(tree: Tree) -> None:
    tree.mounted(2, "/job")
    tree.v2("job", limit=8 * GIB, usage=6 * GIB, files=GIB)
    info = tree.info()
    assert info.available == 4 * GIB
    assert "job (memory.max)" in info.limit.name
    assert "memory.max" in info.limit.remedy


def test_reclaimable_never_makes_more_than_the_limit_free(tree: Tree) -> None:
    tree.mounted(2, "/job")
    tree.v2("job", limit=8 * GIB, usage=GIB, files=3 * GIB)  # read at different moments
    assert tree.info().available == 8 * GIB


def test_usage_over_the_limit_is_nothing_free(tree: Tree) -> None:
    tree.mounted(2, "/job")
    tree.v2("job", limit=GIB, usage=2 * GIB)
    assert tree.info().available == 0


@pytest.mark.parametrize("version", [1, 2])
def test_the_ancestor_with_least_free_binds(tree: Tree, version: int) -> None:
    tree.mounted(version, "/a/b/c")
    add = tree.v1 if version == 1 else tree.v2
    add("a/b/c", limit=16 * GIB, usage=GIB)  # 15 free
    add("a/b", limit=20 * GIB, usage=18 * GIB)  # 2 free: binds, although its limit is larger
    add("a", limit=30 * GIB, usage=20 * GIB)  # 10 free
    add(".", limit=NO_LIMIT_V1 if version == 1 else "max", usage=40 * GIB)
    assert [bound[1] // GIB for bound in cgroups(tree).values()] == [15, 2, 10]
    assert tree.info().available == 2 * GIB
    assert "/a/b (" in tree.info().limit.name


@pytest.mark.parametrize(("version", "unlimited"), [(1, NO_LIMIT_V1), (2, "max")])
def test_no_limit_is_none(tree: Tree, version: int, unlimited: int | str) -> None:
    tree.mounted(version, "/job")
    add = tree.v1 if version == 1 else tree.v2
    add("job", limit=unlimited, usage=GIB)
    assert cgroups(tree) == {}
    assert version == 2 or unlimited > UNLIMITED


def test_v1_invisible_ancestor_limit_is_honoured(tree: Tree) -> None:
    tree.mounted(1, "/docker/abc", root="/docker/abc")
    tree.v1(".", limit=NO_LIMIT_V1, usage=GIB, hierarchy=4 * GIB)
    assert cgroups(tree) == {str(tree.mount): (4 * GIB, 3 * GIB)}


def test_container_sees_its_own_group_at_the_mount_point(tree: Tree) -> None:
    """Without a cgroup namespace the mount's root is the container's group."""
    tree.mounted(2, "/docker/abc/worker", root="/docker/abc")
    tree.v2("worker", limit=2 * GIB, usage=GIB)
    tree.v2(".", limit=3 * GIB, usage=GIB)
    assert cgroups(tree) == {
        f"{tree.mount}/worker": (2 * GIB, GIB),
        str(tree.mount): (3 * GIB, 2 * GIB),
    }


@pytest.mark.parametrize("name", ["/../other", "/not/mounted", "/job-two"])
def test_a_group_outside_the_mount_is_the_mount_point(tree: Tree, name: str) -> None:
    tree.mounted(2, name, root="/job" if name == "/job-two" else "/")
    tree.v2(".", limit=2 * GIB, usage=GIB)
    assert cgroups(tree) == {str(tree.mount): (2 * GIB, GIB)}


def test_hybrid_hierarchy_reads_v1_where_memory_is(tree: Tree) -> None:
    """The usual hybrid: v2 is mounted without the memory controller."""
    tree.mounted(1, "/job")
    tree.v1("job", limit=2 * GIB, usage=GIB)
    with open(tree.proc / "self/cgroup", "a") as lines:
        lines.write("0::/\n")
    unified = tree.root / "unified"
    unified.mkdir()
    with open(tree.proc / "self/mountinfo", "a") as lines:
        lines.write(f"41 31 0:38 / {unified} rw - cgroup2 cgroup2 rw\n")
    assert cgroups(tree) == {f"{tree.mount}/job": (2 * GIB, GIB)}


def test_what_cannot_be_read_is_no_limit(tree: Tree) -> None:
    tree.mounted(2, "/a/b")
    tree.v2("a/b", limit=8 * GIB, usage=GIB)
    tree.v2("a", limit=4 * GIB, usage=GIB)
    limit = tree.mount / "a/b/memory.max"
    limit.unlink()
    limit.mkdir()  # reading a directory fails for root too
    (tree.mount / "a/memory.stat").unlink()
    assert cgroups(tree) == {f"{tree.mount}/a": (4 * GIB, 3 * GIB)}
    (tree.proc / "self/mountinfo").unlink()
    assert tree.info().available == 32 * GIB


def test_strict_overcommit_is_a_limit(tree: Tree) -> None:
    tree.meminfo(64 * GIB, 32 * GIB, f"CommitLimit: {GIB >> 10} kB\nCommitted_AS: 1024 kB\n")
    for mode, available in (("0", 32 * GIB), ("2", GIB - MIB)):
        tree.write(tree.proc / "sys/vm/overcommit_memory", f"{mode}\n")
        assert tree.info().available == available
    assert "overcommit" in tree.info().limit.name


def test_huge_pools(tmp_path: Path) -> None:
    assert huge_pools(tmp_path) == {}
    for size, nr, free, resv, extra, surplus in ((2048, 10, 6, 4, 3, 1), (1048576, 0, 0, 0, 0, 0)):
        folder = tmp_path / f"kernel/mm/hugepages/hugepages-{size}kB"
        folder.mkdir(parents=True)
        names = ("nr", "free", "resv", "nr_overcommit", "surplus")
        for name, value in zip(names, (nr, free, resv, extra, surplus), strict=True):
            (folder / f"{name}_hugepages").write_text(f"{value}\n")
    assert huge_pools(tmp_path) == {
        2 * MIB: HugePool(2 * MIB, reserved=10, free=2, surplus=2),
        GIB: HugePool(GIB, reserved=0, free=0, surplus=0),
    }


def test_numa_nodes(tmp_path: Path) -> None:
    assert numa_nodes(tmp_path) == ()
    folder = tmp_path / "devices/system/node"
    folder.mkdir(parents=True)
    (folder / "online").write_text("0-3\n")
    assert numa_nodes(tmp_path) == (0, 1, 2, 3)
    (folder / "has_memory").write_text("0,2-3\n")
    assert numa_nodes(tmp_path) == (0, 2, 3)


def test_a_node_is_a_limit_where_there_are_several(
    tree: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PROC", tree.proc)
    monkeypatch.setattr(module, "SYS", tree.root)
    node = tree.root / "devices/system/node"
    tree.write(
        node / "node1/meminfo",
        f"Node 1 MemTotal: {8 * MIB} kB\nNode 1 MemFree: {MIB} kB\n"
        f"Node 1 Active(file): {MIB} kB\nNode 1 Inactive(file): 0 kB\n",
    )
    tree.write(node / "online", "0-1")
    check_request(GIB, "x", "y", numa_node=1)
    with pytest.raises(OutOfMemory, match="NUMA node 1 has 2 GiB free of 8 GiB"):
        check_request(3 * GIB, "x", "y", numa_node=1)
    check_request(3 * GIB, "x", "y")


def test_check_request_names_everything(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PROC", tree.proc)
    tree.mounted(2, "/job")
    tree.v2("job", limit=8 * GIB, usage=4 * GIB)
    check_request(4 * GIB - 16 * MIB, "a region", "turn it")
    with pytest.raises(OutOfMemory) as caught:
        check_request(4 * GIB, "a region", "turn it")  # the page tables are too much
    for part in ("a region of 4 GiB (4294967296 bytes)", "/job (memory.max)", "4 GiB free of 8 GiB",
                 "turn it", "raise its memory.max"):  # fmt: skip
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 bytes"), (1, "1 bytes"), (1023, "1023 bytes"), (1024, "1 KiB"), (1536, "1.5 KiB"),
     (5 * GIB, "5 GiB"), (1 << 62, "4 EiB")],
)  # fmt: skip
def test_format_bytes(nbytes: int, text: str) -> None:
    assert format_bytes(nbytes) == text


def test_the_real_machine() -> None:
    info = memory_info()
    page = os.sysconf("SC_PAGE_SIZE")
    assert info.total == os.sysconf("SC_PHYS_PAGES") * page
    assert 0 < info.available <= info.total
    assert info.available == min(limit.available for limit in info.limits)
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    assert info.memlock == (None if soft == resource.RLIM_INFINITY else soft)
    text = str(info)
    assert info.limit.name in text
    assert "RLIMIT_MEMLOCK" in text
    assert "swap" in text
    assert repr(info) == f"<MemoryInfo {text.splitlines()[0]}>"
    for line in text.splitlines()[1:]:
        name, _, value = line.strip().rpartition(": ")
        assert f"<td>{html.escape(name)}</td><td>{value}</td>" in info._repr_html_()


def test_without_meminfo_the_machine_bounds_requests(tree, monkeypatch):
    """No /proc, or no free descriptor."""
    (tree.proc / "meminfo").unlink()
    monkeypatch.setattr(module, "PROC", tree.proc)
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGESIZE")
    module.check_request(total // 2, "a region", "pass prefault=False")
    with pytest.raises(OutOfMemory, match=r"the machine \(all of its memory\)"):
        module.check_request(2 * total, "a region", "pass prefault=False")


def test_resource_limits_bind() -> None:
    code = (
        "import resource; from arenapy import memory_info\n"
        "from arenapy.base.text import format_bytes\n"
        "has = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "most = has + (1 << 30)\n"
        "for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA):\n"
        "    old = resource.getrlimit(kind)\n"
        "    resource.setrlimit(kind, (most, old[1]))\n"
        "    info = memory_info()\n"
        "    print(info.limit.name, 0 < info.available < most, info.limit.nbytes == most)\n"
        "    resource.setrlimit(kind, old)\n"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.splitlines() == ["RLIMIT_AS True True", "RLIMIT_DATA True True"]
