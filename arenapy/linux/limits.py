"""How much memory there is for this process, and what limits it.

What lives here: reading ``/proc``, ``/sys``, cgroups (versions 1 and 2) and resource limits, and
the check of a request against them. Nothing is cached: limits change while a program runs.

Faulting in more than a cgroup allows ends in a SIGKILL, not in an error; so a region that is to be
populated is compared with what is free before the first page is asked for.

The functions of other modules are bound at the import, here and wherever an allocator asks for
memory: a program's tests may replace ``open`` or ``os.path.join`` by a mock, and make arrays.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from os import F_OK, O_RDONLY, PathLike, access, listdir, pread, sysconf
from os.path import dirname, join, normpath
from typing import NamedTuple, TypeAlias

from arenapy.base.system_errors import is_of_system
from arenapy.base.text import format_bytes, html_table
from arenapy.errors import OutOfMemory
from arenapy.linux import vm

__all__ = [
    "HugePool", "Limit", "MemoryInfo", "check_request", "huge_pools", "memory_info",
    "numa_nodes", "read_limits",
]  # fmt: skip

Folder: TypeAlias = str | PathLike[str]

PROC = "/proc"
ADDRESSES = 1 << 46
SYS = "/sys"
PAGE_TABLE_SHARE = 512  # one 8-byte entry for each 4 KiB page
UNLIMITED = 1 << 60  # cgroup v1 writes "no limit" as the largest multiple of a page


class Limit(NamedTuple):
    """One limit on the memory of this process. All figures are bytes.

    Attributes
    ----------
    name : str
        The origin of the limit, e.g. ``cgroup /a/b (memory.max)``.
    nbytes, used : int
        The limit, and the bytes that count against it now, without reclaimable cached files.
    remedy : str
        How to raise the limit.
    counts_mappings : bool
        Whether it counts mapped memory, and not only touched memory.
    """

    name: str
    nbytes: int
    used: int
    remedy: str
    counts_mappings: bool = False

    @property
    def available(self) -> int:
        """The free bytes under this limit."""
        return max(self.nbytes - self.used, 0)


@dataclass(frozen=True, slots=True, repr=False)
class MemoryInfo:
    """The memory that this process can use. All figures are bytes.

    Attributes
    ----------
    total, used : int
        RAM of the machine, and the part of it that is not available.
    available : int
        The bytes that can still be faulted in: the smallest free amount of all `limits`.
    limit : Limit
        The limit with the smallest free amount.
    limits : tuple[Limit, ...]
        All limits that apply: the machine, the cgroup and its ancestors, resource limits.
    memlock : int or None
        ``RLIMIT_MEMLOCK``, the bytes that may be locked. None means no limit.
    swap_total, swap_free : int
        Swap of the machine.

    Examples
    --------
    >>> import arenapy
    >>> info = arenapy.memory_info()
    >>> info.available <= info.total
    True
    """

    total: int
    used: int
    available: int
    limit: Limit
    limits: tuple[Limit, ...]
    memlock: int | None
    swap_total: int
    swap_free: int

    def _head(self) -> str:
        return (
            f"{format_bytes(self.available)} available of {format_bytes(self.total)}, "
            f"limited by {self.limit.name}"
        )

    def _rows(self) -> list[tuple[str, str]]:
        rows = [
            (limit.name, f"{format_bytes(limit.available)} free of {format_bytes(limit.nbytes)}")
            for limit in self.limits
        ]
        memlock = "no limit" if self.memlock is None else format_bytes(self.memlock)
        swap = f"{format_bytes(self.swap_free)} free of {format_bytes(self.swap_total)}"
        return [*rows, ("lockable memory (RLIMIT_MEMLOCK)", memlock), ("swap", swap)]

    def __repr__(self) -> str:
        return f"<MemoryInfo {self._head()}>"

    def __str__(self) -> str:
        """A few lines to read."""
        return "\n".join([self._head(), *(f"  {name}: {text}" for name, text in self._rows())])

    def _repr_html_(self) -> str:
        """Lay out a table for a notebook."""
        return html_table(self._head(), self._rows())


class HugePool(NamedTuple):
    """The hugetlbfs pages of one size.

    Attributes
    ----------
    page_size : int
        In bytes.
    reserved : int
        Pages set aside (``nr_hugepages``) or allocated beyond that.
    free : int
        Pages that a new mapping can get from those set aside: neither in use nor promised.
    surplus : int
        Pages that the kernel may try to make on demand beyond that (``nr_overcommit_hugepages``).
    """

    page_size: int
    reserved: int
    free: int
    surplus: int


def memory_info() -> MemoryInfo:
    """The memory that this process can get now, and its limits.

    Returns
    -------
    MemoryInfo
        The figures, in bytes. Print it for a summary.

    Raises
    ------
    OSError
        If ``/proc`` is not mounted.

    Notes
    -----
    Thread-safety: may be called from any thread. The figures are read one after the other.

    Examples
    --------
    >>> import arenapy
    >>> arenapy.memory_info().available > 1 << 20
    True
    """
    return _memory_info(PROC)


def _memory_info(proc: Folder) -> MemoryInfo:
    machine = _meminfo(f"{proc}/meminfo")
    limits = tuple(read_limits(proc))
    binding = min(limits, key=lambda limit: limit.available)
    return MemoryInfo(
        total=machine["MemTotal"],
        used=machine["MemTotal"] - machine["MemAvailable"],
        available=binding.available,
        limit=binding,
        limits=limits,
        memlock=vm.soft_limit("RLIMIT_MEMLOCK"),
        swap_total=machine.get("SwapTotal", 0),
        swap_free=machine.get("SwapFree", 0),
    )


def check_request(
    nbytes: int, what: str, turn: str, *, numa_node: int | None = None, private: bool = True
) -> int:
    """Refuse a request that cannot be faulted in.

    Parameters
    ----------
    nbytes : int
        The bytes that are to be faulted in.
    what : str
        The name of the caller, for the message.
    turn : str
        The option of it that helps, for the message.
    numa_node : int, optional
        The only node to take it from.
    private : bool
        Whether ``RLIMIT_DATA``, which counts private writable memory only, applies.

    Returns
    -------
    int
        Bytes that are free, the request's among them.

    Raises
    ------
    OutOfMemory
        Naming the request, the limit, what is free and what to do.
    """
    limits = [limit for limit in read_limits(PROC) if private or limit.name != "RLIMIT_DATA"]
    if numa_node is not None and len(numa_nodes(SYS)) > 1:
        limits += _node_limits(SYS, numa_node)
    binding = min(limits, key=lambda limit: limit.available)
    needed = nbytes + nbytes // PAGE_TABLE_SHARE
    if needed > binding.available:
        turn = "" if binding.counts_mappings else f"{turn}, "
        raise OutOfMemory(
            f"{what} of {format_bytes(nbytes)} ({nbytes} bytes) needs {format_bytes(needed)} with "
            f"its page tables, and {binding.name} has {format_bytes(binding.available)} free of "
            f"{format_bytes(binding.nbytes)}. Ask for less, {turn}or {binding.remedy}."
        )
    return binding.available


def read_limits(proc: Folder = PROC) -> Iterator[Limit]:
    """Every bound on this process's memory; the machine's comes first."""
    try:
        machine = _meminfo(f"{proc}/meminfo")
    except OSError as error:  # no /proc, or no free descriptor: what is in use is not known
        if not is_of_system(error):
            raise
        yield Limit("the machine (all of its memory)", machine_nbytes(), 0, "end other programs")
        machine = {}
    else:
        yield Limit(
            "the machine (MemAvailable)",
            machine["MemTotal"],
            machine["MemTotal"] - machine["MemAvailable"],
            "end other programs",
        )
    if machine and _read(f"{proc}/sys/vm/overcommit_memory") == "2":
        yield Limit(
            "vm.overcommit_memory=2 (CommitLimit)",
            machine["CommitLimit"],
            machine["Committed_AS"],
            "raise vm.overcommit_ratio",
            counts_mappings=True,
        )
    yield from _cgroup_limits(proc)
    pages = (_read(f"{proc}/self/statm") or "").split()
    for kind, field, option in (("RLIMIT_AS", 0, "-v"), ("RLIMIT_DATA", 5, "-d")):
        bound = vm.soft_limit(kind)
        if bound is not None and len(pages) > field:
            used = int(pages[field]) * vm.PAGE_SIZE
            yield Limit(kind, bound, used, f"raise it with `ulimit {option}`", counts_mappings=True)


def machine_nbytes() -> int:
    """The memory of the machine in bytes, which needs neither ``/proc`` nor a descriptor."""
    return sysconf("SC_PHYS_PAGES") * sysconf("SC_PAGESIZE")


def free_addresses() -> int:
    """Bytes of addresses to reserve ahead: half of the usual 47 bits, less what is mapped."""
    pages = (_read(f"{PROC}/self/statm") or "0").split()
    return max(ADDRESSES - int(pages[0]) * vm.PAGE_SIZE, 0)


def huge_pools(sys: Folder = SYS) -> dict[int, HugePool]:
    """The hugetlbfs pages by size; empty where the kernel has no support for them."""
    pools = {}
    folder = f"{sys}/kernel/mm/hugepages"
    for entry in listdir(folder) if access(folder, F_OK) else ():
        if not (entry.startswith("hugepages-") and entry.endswith("kB")):
            continue
        size = int(entry.removeprefix("hugepages-").removesuffix("kB")) << 10
        count, free, promised, extra, surplus = (
            _number(f"{folder}/{entry}/{name}_hugepages") or 0
            for name in ("nr", "free", "resv", "nr_overcommit", "surplus")
        )
        pools[size] = HugePool(size, count, max(free - promised, 0), max(extra - surplus, 0))
    return dict(sorted(pools.items()))


def numa_nodes(sys: Folder = SYS) -> tuple[int, ...]:
    """The NUMA nodes that have memory; empty where the kernel does not say."""
    text = _read(f"{sys}/devices/system/node/has_memory")
    text = text or _read(f"{sys}/devices/system/node/online")
    nodes: list[int] = []
    for part in (text or "").split(","):
        if part:
            first, _, last = part.partition("-")
            nodes += range(int(first), int(last or first) + 1)
    return tuple(nodes)


def _node_limits(sys: Folder, node: int) -> Iterator[Limit]:
    """The free memory of one NUMA node. Pages that are bound to it cannot come from elsewhere."""
    figures = {}
    for line in (_read(f"{sys}/devices/system/node/node{node}/meminfo") or "").splitlines():
        words = line.split()  # Node 0 MemFree:  1234 kB
        figures[words[2].rstrip(":")] = int(words[3]) << 10
    if "MemTotal" in figures and "MemFree" in figures:
        files = figures.get("Active(file)", 0) + figures.get("Inactive(file)", 0)
        used = figures["MemTotal"] - figures["MemFree"] - files
        yield Limit(f"NUMA node {node}", figures["MemTotal"], used, "choose another numa_node")


# ---- cgroups -------------------------------------------------------------------------------
#
# A limit of any ancestor binds. Which directories those are: /proc/self/cgroup names the group
# inside its hierarchy, /proc/self/mountinfo where (a part of) the hierarchy is mounted; in a
# container the group's name may lie outside what is mounted, and then the mount point is the group.


class _Version(NamedTuple):
    """The file names of one version of cgroups, and how the group and its mount are listed."""

    number: int
    filesystem: str
    limit: str
    usage: str
    files: tuple[str, str]  # reclaimable file pages of the group and its descendants


_V1 = _Version(
    1, "cgroup", "memory.limit_in_bytes", "memory.usage_in_bytes",
    ("total_inactive_file", "total_active_file"),
)  # fmt: skip
_V2 = _Version(2, "cgroup2", "memory.max", "memory.current", ("inactive_file", "active_file"))


def _cgroup_limits(proc: Folder) -> Iterator[Limit]:
    for version in (_V1, _V2):
        for group in _cgroup_folders(proc, version):
            limit = _cgroup_limit(group, version)
            if limit is not None:
                yield limit


def _cgroup_folders(proc: Folder, version: _Version) -> Iterator[str]:
    """The directories of this process's memory cgroup and of its visible ancestors."""
    name = _cgroup_name(proc, version)
    if name is None:
        return
    for line in (_read(f"{proc}/self/mountinfo") or "").splitlines():
        before, _, after = line.partition(" - ")
        kind, _, options = after.split(" ", 2)
        if kind != version.filesystem or (version is _V1 and "memory" not in options.split(",")):
            continue
        root, point = (_unescape(word) for word in before.split(" ")[3:5])
        group = mount = normpath(point)
        if name == root or name.startswith(root.rstrip("/") + "/"):
            inside = name.removeprefix(root.rstrip("/")).lstrip("/")
            within = normpath(join(mount, inside))
            if ".." not in inside.split("/") and access(within, F_OK):
                group = within
        yield group
        while group != mount:
            group = dirname(group)
            yield group
        return  # further mounts show the same hierarchy


def _cgroup_name(proc: Folder, version: _Version) -> str | None:
    for line in (_read(f"{proc}/self/cgroup") or "").splitlines():
        _, controllers, name = line.split(":", 2)
        if "memory" in controllers.split(",") if version is _V1 else not controllers:
            return name
    return None


def _cgroup_limit(group: str, version: _Version) -> Limit | None:
    """The limit of one group; None if it has none or it cannot be read."""
    nbytes = _number(f"{group}/{version.limit}")  # "max" is not a number
    stat = _pairs(f"{group}/memory.stat")
    if version is _V1 and nbytes is not None:
        # In a container the ancestors may be invisible; their tightest limit is told here.
        nbytes = min(nbytes, stat.get("hierarchical_memory_limit", nbytes))
    if nbytes is None or nbytes >= UNLIMITED:
        return None
    used = _number(f"{group}/{version.usage}") or 0
    reclaimable = sum(stat.get(name, 0) for name in version.files)
    return Limit(
        f"cgroup {group} ({version.limit})",
        nbytes,
        max(used - reclaimable, 0),
        f"raise its {version.limit}",
    )


# ---- reading -------------------------------------------------------------------------------


def _contents(path: str) -> str:
    """All of a file. Its position is not used: a child that is forked meanwhile would share it."""
    parts, at = [], 0
    with vm.open_file(path, O_RDONLY) as file:
        while part := pread(file.fileno(), 1 << 16, at):
            parts.append(part)
            at += len(part)
    return b"".join(parts).decode(errors="surrogateescape")


def _read(path: str) -> str | None:
    try:
        return _contents(path).strip()
    except OSError as error:
        if not is_of_system(error):
            raise
        return None


def _number(path: str) -> int | None:
    text = _read(path)
    return int(text) if text is not None and text.isdecimal() else None


def _pairs(path: str) -> dict[str, int]:
    """Lines of a name and a number."""
    words = (line.split() for line in (_read(path) or "").splitlines())
    return {pair[0]: int(pair[1]) for pair in words if len(pair) == 2 and pair[1].isdecimal()}


def _meminfo(path: str) -> dict[str, int]:
    """The figures of ``/proc/meminfo`` that have a unit, in bytes."""
    words = [line.split() for line in _contents(path).splitlines()]
    return {word[0].rstrip(":"): int(word[1]) << 10 for word in words if word[2:] == ["kB"]}


def _unescape(word: str) -> str:
    """A path as mountinfo writes it: blanks and backslashes are three octal digits."""
    head, *rest = word.split("\\")
    return head + "".join(chr(int(part[:3], 8)) + part[3:] for part in rest)
