"""``arenapy info``: what this machine offers, and what each fact means for its user.

What lives here: gathering (`facts`, plain data) and showing it (`main`). Kernel features
are probed by using them, not assumed from a version: containers and sandboxes filter system calls.
"""

import importlib.util
import itertools
import json
import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.table import Table
from rich.text import Text

from arenapy.base.text import format_bytes, printable
from arenapy.commands.command_line import Parser, console
from arenapy.linux import vm
from arenapy.linux.limits import SYS, HugePool, MemoryInfo, huge_pools, memory_info, numa_nodes

__all__ = ["Fact", "facts", "main", "table"]

CAP_IPC_LOCK = 14  # the capability whose holder may lock any amount
BORDERS = 10  # characters of a line of the table that are not text
MEANING = 60  # characters for the meanings, if there is room


@dataclass(frozen=True, slots=True)
class Fact:
    """One line of the table.

    Attributes
    ----------
    group, name : str
        The subject.
    value : str, int, bool, list or None
        As data: sizes are bytes, None is "no limit" or "not known".
    shown : str
        The value as text.
    meaning : str
        The meaning for the user, in one line.
    """

    group: str
    name: str
    value: str | int | bool | list[int] | None
    shown: str
    meaning: str


def facts(sys: Path = Path(SYS)) -> list[Fact]:
    """All that ``arenapy info`` shows.

    Notes
    -----
    Thread-safety: may be called from any thread.
    """
    info = memory_info()
    return [
        *_pages(sys, huge_pools(sys)),
        *_memory(info),
        *_nodes(numa_nodes(sys)),
        *_kernel(),
        *_cuda(),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``arenapy info``; the exit status.

    Parameters
    ----------
    argv : sequence of str, optional
        The arguments after ``info``. None: those of this process.
    """
    parser = Parser(
        prog="arenapy info",
        description="Show what this machine offers arenapy, and what each fact means for you.",
    )
    parser.add_argument("--json", action="store_true", help="print a JSON list; sizes are in bytes")
    arguments = parser.parse_args(argv)
    found = facts()
    if arguments.json:
        print(json.dumps([asdict(fact) for fact in found], indent=2))
    else:
        terminal = console()
        terminal.print(table(found, terminal.width))
    return 0


def table(found: list[Fact], width: int) -> Table:
    """Facts as a table of at most so many characters a line, with a line between groups."""
    shown = Table(title="arenapy on this machine", title_justify="left")
    rows = [tuple(map(printable, (fact.name, fact.shown, fact.meaning))) for fact in found]
    # Rich makes all columns equally wide, and then breaks words. So these two get no more than
    # their longest words need, unless there is room for all.
    spare = width - BORDERS - MEANING
    names, values = ([row[at] for row in rows] for at in (0, 1))
    narrow = max(map(len, names)) + max(map(len, values)) > spare
    for title, texts, style in ("", names, "bold"), ("value", values, None):
        most = max(len(word) for text in texts for word in text.split()) if narrow else None
        shown.add_column(title, style=style, overflow="fold", max_width=most)
    shown.add_column("meaning", overflow="fold")
    lines = zip(found, rows, strict=True)
    for _, group in itertools.groupby(lines, key=lambda line: line[0].group):
        for _, row in group:
            shown.add_row(*map(Text, row))
        shown.add_section()
    return shown


def _pages(sys: Path, pools: dict[int, HugePool]) -> Iterator[Fact]:
    size = vm.PAGE_SIZE
    meaning = "regions consist of whole pages; the first use of a page is a page fault"
    yield Fact("pages", "page size", size, format_bytes(size), meaning)
    thp = sys / "kernel/mm/transparent_hugepage"
    mode = _chosen(thp / "enabled")
    if mode == "always":
        meaning = "huge_pages='auto' gets them, and so does all other memory"
    elif mode == "madvise":
        meaning = "huge_pages='auto' gets them; other memory does not"
    else:
        meaning = "huge_pages='auto' gets none; set 'madvise', or reserve hugetlbfs pages"
    yield Fact("pages", "transparent huge pages", mode, mode or "not there", meaning)
    shared = _chosen(thp / "shmem_enabled")
    if shared in ("always", "within_size", "advise", "force"):
        meaning = "Shared(huge_pages='auto') gets them"
    else:
        meaning = "Shared(huge_pages='auto') gets none; 'advise' in shmem_enabled allows them"
    yield Fact("pages", "... for shared memory", shared, shared or "not there", meaning)
    if not pools:
        meaning = "huge_pages='2M' and '1G' raise an error"
        yield Fact("pages", "hugetlbfs", None, "not there", meaning)
    for pool in pools.values():
        yield _pool(pool)


def _pool(pool: HugePool) -> Fact:
    option = {2 << 20: "'2M'", 1 << 30: "'1G'"}.get(pool.page_size)
    name = f"hugetlbfs {format_bytes(pool.page_size)}"
    shown = f"{pool.free} free of {pool.reserved}"
    if option is None:
        meaning = "arenapy has no option for this size"
    elif pool.free:
        room = format_bytes(pool.free * pool.page_size)
        meaning = f"huge_pages={option} works for up to {room}"
    elif pool.surplus:
        meaning = f"huge_pages={option} may get up to {pool.surplus} pages that the kernel makes"
    else:
        meaning = f"huge_pages={option} raises an error until pages are reserved (nr_hugepages)"
    return Fact("pages", name, pool.free * pool.page_size, shown, meaning)


def _memory(info: MemoryInfo) -> Iterator[Fact]:
    for limit in info.limits:
        shown = f"{format_bytes(limit.available)} free of {format_bytes(limit.nbytes)}"
        meaning = (
            "the limit that applies: a request for more than the free part fails"
            if limit is info.limit
            else "does not limit a region now"
        )
        yield Fact("memory", limit.name, limit.available, shown, meaning)
    if not any(limit.name.startswith("cgroup") for limit in info.limits):
        yield Fact("memory", "cgroup", None, "no limit", "no cgroup limits memory here")
    shown = f"{format_bytes(info.swap_free)} free of {format_bytes(info.swap_total)}"
    if info.swap_total:
        yield Fact("memory", "swap", info.swap_free, shown, "lock=True keeps a region out of swap")
    else:
        yield Fact("memory", "swap", info.swap_free, "none", "nothing is ever swapped out")
    yield _memlock(info.memlock)


def _memlock(limit: int | None) -> Fact:
    if limit is None:
        return Fact("memory", "memlock limit", None, "no limit", "lock=True works for any size")
    shown = format_bytes(limit)
    if _has_capability(CAP_IPC_LOCK):
        meaning = "does not apply to this process (CAP_IPC_LOCK); lock=True works for any size"
    elif limit:
        meaning = f"lock=True works for up to {shown} in all; `ulimit -l` raises it"
    else:
        meaning = "lock=True raises an error; `ulimit -l` raises the limit"
    return Fact("memory", "memlock limit", limit, shown, meaning)


def _nodes(nodes: tuple[int, ...]) -> Iterator[Fact]:
    shown = ", ".join(map(str, nodes)) or "not known"
    if len(nodes) > 1:
        meaning = "numa_node= takes the pages of a region from one node"
    else:
        meaning = "there is one node only, so numa_node= has no effect"
    yield Fact("NUMA", "nodes with memory", list(nodes), shown, meaning)


def _kernel() -> Iterator[Fact]:
    release = platform.release()
    yield Fact("kernel", "release", release, release, "the features below were tested")
    for name, probe, with_it, without in (
        (
            "MADV_POPULATE_WRITE",
            vm.can_populate,
            "prefault fills memory in large steps and reports failures",
            "prefault touches each page, which is slower (Linux 5.14 has the feature)",
        ),
        (
            "PAGEMAP_SCAN",
            vm.can_scan_pages,
            "huge_fraction is exact for any region",
            "huge_fraction reads smaps, which fails for some regions (Linux 6.7 has the feature)",
        ),
        (
            "memfd",
            _has_memfd,
            "Shared works",
            "Shared raises an error: memfd_create is missing or filtered",
        ),
        (
            "OFD locks",
            _has_ofd_locks,
            "a Buffer that was sent is kept until the receiver drops it",
            "Buffers of Shared cannot be sent to other processes",
        ),
        (
            "mlock2",
            _has_mlock2,
            "lock=True locks pages when they are faulted in",
            "lock=True raises an error: not permitted, or missing",
        ),
        (
            "mbind",
            _has_mbind,
            "numa_node= works",
            "numa_node= raises an error: filtered, or no NUMA in this kernel",
        ),
    ):
        works = probe()
        yield Fact("kernel", name, works, "yes" if works else "no", with_it if works else without)


def _cuda() -> Iterator[Fact]:
    try:
        # Looked for, not imported: to import it takes a moment, and nobody may want it.
        if importlib.util.find_spec("cuda") is None:
            raise ModuleNotFoundError("cuda-python is not installed")
        from arenapy.cuda import backing, devices

        found = devices()
    except (ImportError, MemoryError, OSError, RuntimeError) as error:
        meaning = f"arenapy.cuda raises an error: {' '.join(str(error).split())}"
        yield Fact("CUDA", "devices", None, "none", meaning)
        return
    for info in found:
        shown = f"{format_bytes(info.free_bytes)} free of {format_bytes(info.total_bytes)}"
        meaning = f"{info.name}: cuda.Device({info.device_id}) allocates from it"
        if info.reserved_bytes:
            shown += (
                f", {format_bytes(info.reserved_bytes)} reserved here, "
                f"{format_bytes(info.allocated_bytes)} allocated"
            )
        yield Fact("CUDA", f"device {info.device_id}", info.free_bytes, shown, meaning)
    pinned = backing.pinned_bytes()
    meaning = "host memory of this process: copies from cuda.Pinned run at full speed"
    yield Fact("CUDA", "pinned by arenapy", pinned, format_bytes(pinned), meaning)


# ---- probes ----------------------------------------------------------------------------------


def _works(call: Callable[[], object]) -> bool:
    try:
        call()
    except OSError:
        return False
    return True


def _has_memfd() -> bool:
    return _works(lambda: vm.memfd(b"arenapy probe", vm.PAGE_SIZE).close())


def _has_ofd_locks() -> bool:
    def lock() -> None:
        with closing(vm.memfd(b"arenapy probe", vm.PAGE_SIZE)) as file:
            vm.lease(file.fileno(), 0, 1)

    return _works(lock)


def _has_mlock2() -> bool:
    return _on_a_page(lambda address: vm.lock(address, vm.PAGE_SIZE))


def _has_mbind() -> bool:
    node = next(iter(numa_nodes()), 0)
    return _on_a_page(lambda address: vm.bind(address, vm.PAGE_SIZE, node))


def _on_a_page(call: Callable[[int], None]) -> bool:
    with vm.map_memory(vm.PAGE_SIZE) as mapping:
        return _works(lambda: call(mapping.address))


def _chosen(path: Path) -> str | None:
    """The word in brackets of a sysfs file that lists choices."""
    try:
        text = path.read_text()
    except OSError:
        return None
    return text.partition("[")[2].partition("]")[0] or None


def _has_capability(number: int) -> bool:
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return False
    effective = next((line for line in status.splitlines() if line.startswith("CapEff:")), "0 0")
    return bool(int(effective.split()[1], 16) >> number & 1)
