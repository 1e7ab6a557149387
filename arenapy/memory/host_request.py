"""One request for memory: checks before, explanations after.

What lives here: the options that `Host` and `Shared` share, which system calls they lead to and in
which order, and what a failure says: what was asked, what there was, what to do. A request is
compared with what is free before anything is mapped; placement, locking and huge pages are set
before the first page is there.
"""

import errno
import mmap
import operator
import sys
from typing import Any, Literal, Protocol

from arenapy.base.system_errors import is_of_system
from arenapy.base.text import format_bytes
from arenapy.errors import OutOfMemory
from arenapy.linux import vm
from arenapy.linux.limits import Limit, check_request, huge_pools, numa_nodes, read_limits
from arenapy.linux.reserved_space import Mapping

_open = open  # see limits
MIB = 1 << 20
THP_SIZE = 2 * MIB  # what huge_pages="auto" aligns to
PAGE_SIZES = {None: vm.PAGE_SIZE, "auto": vm.PAGE_SIZE, "2M": 2 * MIB, "1G": 1024 * MIB}
SIZE_LIMIT = 1 << 63
MAPPINGS_EACH = 4  # what a region may need while it is made: itself, guards, room to align

HugePages = Literal["auto", "2M", "1G"] | None


class MemoryOptions(Protocol):
    """The options that `Host` and `Shared` have in common."""

    @property
    def huge_pages(self) -> HugePages: ...
    @property
    def prefault(self) -> bool: ...
    @property
    def lock(self) -> bool: ...
    @property
    def numa_node(self) -> int | None: ...
    @property
    def grow(self) -> bool: ...


class Request:
    """One region asked of `Host` or `Shared`: its sizes, its checks, and its errors."""

    def __init__(
        self, options: MemoryOptions, what: str, nbytes: int, *, private: bool = True
    ) -> None:
        self.options = options
        self.private = private
        self.what = what
        self.nbytes = nbytes
        self.page_size = PAGE_SIZES[options.huge_pages]
        self.hugetlb = options.huge_pages in ("2M", "1G")
        self.mapped = -(-nbytes // self.page_size) * self.page_size
        self.wants_thp = options.huge_pages == "auto" and nbytes >= THP_SIZE
        self.align = THP_SIZE if self.wants_thp else self.page_size

    def part(self, nbytes: int) -> "Request":
        """The same for a part of what was asked: messages then have the size of the part."""
        return Request(self.options, self.what, nbytes, private=self.private)

    def check(self) -> int:
        """Refuse what would fail or be killed, before anything is mapped. Bytes that are free.

        0: it was not asked how many there are.
        """
        if sys.is_finalizing():
            return 0  # to look at /proc takes modules that may not be there any more
        if self.hugetlb:
            self._check_pool()
        elif self.options.prefault or self.options.lock:
            turn = "pass prefault=False to take pages only as they are touched"
            return check_request(
                self.mapped,
                self.what,
                turn if not self.options.lock else "pass lock=False and prefault=False",
                numa_node=self.options.numa_node,
                private=self.private,
            )
        return 0

    def _check_pool(self, failure: str = "") -> None:
        """Refuse if hugetlbfs has too few pages, or, after a `failure`, in any case."""
        pool = huge_pools().get(self.page_size)
        choice = f"huge_pages={self.options.huge_pages!r}"
        if pool is None:
            raise OSError(
                errno.EOPNOTSUPP,
                f"{choice}: this kernel or CPU has no such pages in hugetlbfs; pass "
                'huge_pages="auto"',
            )
        pages = self.mapped // self.page_size
        if pages > pool.free + pool.surplus or failure:
            missing = max(pages - pool.free, 0)
            raise OutOfMemory(
                f"{self.what} of {format_bytes(self.nbytes)} with {choice} needs {pages} pages, "
                f"and {pool.free} are free of {pool.reserved} reserved{failure}. Reserve more "
                f"(echo {pool.reserved + missing} > /sys/kernel/mm/hugepages/"
                f'hugepages-{self.page_size >> 10}kB/nr_hugepages), or pass huge_pages="auto".'
            )

    def map(self, fd: int = -1, *, guard: bool = False) -> Mapping:
        """`vm.map_memory` of what is asked, its failure explained."""
        try:
            return vm.map_memory(
                self.nbytes,
                fd=fd,
                shared=fd >= 0,
                align=self.align,
                guard=guard,
                page_size=self.page_size,
            )
        except OSError as error:
            raise self.explain_map(error) from error

    def map_reserved(self, fd: int) -> Mapping:
        """The same of a file, without access as yet."""
        try:
            return vm.map_memory(self.nbytes, fd=fd, shared=True, align=THP_SIZE, accessible=False)
        except OSError as error:
            raise self.explain_map(error) from error

    def explain_map(self, error: OSError) -> Exception:
        """The error to raise for a mapping that failed."""
        if self.hugetlb and error.errno == errno.ENOMEM:
            try:
                self._check_pool(f" (the kernel refused: {error.strerror})")
            except OutOfMemory as explained:
                return explained
        return explain_map(error, self.what, self.nbytes)

    def fill(self, address: int) -> None:
        """Place, lock and fault in what was mapped: in this order, before the first page."""
        self.place(address)
        self.take(address)

    def place(self, address: int) -> None:
        """Say where pages come from, and how large they may be."""
        if self.options.numa_node is not None:
            self._bind(address, self.options.numa_node)
        if self.wants_thp:
            try:
                vm.advise(address, self.mapped, mmap.MADV_HUGEPAGE)
            except OSError as error:
                if error.errno != errno.EINVAL:  # a kernel without transparent huge pages
                    raise self.explain_map(error) from error

    def keep_from_children(self, address: int) -> None:
        """A forked child is not to have what was mapped."""
        try:
            vm.advise(address, self.mapped, mmap.MADV_DONTFORK)
        except OSError as error:
            raise self.explain_map(error) from error

    def take(self, address: int) -> None:
        """Lock and fault in, as the options say."""
        if self.options.lock:
            self._lock(address)
        if self.options.prefault or self.hugetlb:
            self._prefault(address)

    def _bind(self, address: int, node: int) -> None:
        try:
            vm.bind(address, self.mapped, node)
        except OSError as error:
            text = (
                f"numa_node={node}: the kernel refused to bind {self.what} to it "
                f"({error.strerror}); this process may use {_nodes_text()}"
            )
            raise refusal(error, text) from error

    def _lock(self, address: int) -> None:
        try:
            vm.lock(address, self.mapped)
        except OSError as error:
            memlock = vm.soft_limit("RLIMIT_MEMLOCK")
            bound = "no limit" if memlock is None else format_bytes(memlock)
            text = (
                f"cannot lock {self.what} of {format_bytes(self.nbytes)} ({error.strerror}): "
                f"RLIMIT_MEMLOCK is {bound}. Raise it (`ulimit -l`, limits.conf, or "
                "LimitMEMLOCK= of the service), or pass lock=False"
            )
            raise refusal(error, text) from error

    def _prefault(self, address: int) -> None:
        try:
            threads = getattr(self.options, "threads", None) or 0  # Shared has no such option
            vm.prefault(address, self.mapped, threads=threads, slice_nbytes=self._slice())
        except OSError as error:
            if self.hugetlb and error.errno in (errno.EFAULT, errno.ENOMEM):
                self._check_pool(" (they ran out: by a NUMA node or a hugetlb cgroup limit)")
            binding = _tightest_limit()
            text = (
                f"cannot fault in {self.what} of {format_bytes(self.nbytes)} ({error.strerror}); "
                f"{binding.name} has {format_bytes(binding.available)} free. Ask for less, or pass "
                "prefault=False"
            )
            raise refusal(error, text) from error

    def _slice(self) -> int:
        """A slice must be no part of a page; 0 leaves the choice to vm."""
        return self.page_size if self.page_size > 64 * MIB else 0


def refusal(error: OSError, text: str) -> Exception:
    """The error that says `text`: an `OutOfMemory` if memory is what the kernel did not have."""
    if not is_of_system(error):
        raise error
    return OutOfMemory(text) if error.errno == errno.ENOMEM else OSError(error.errno, text)


def explain_map(error: OSError, what: str, nbytes: int, huge: int = 0) -> Exception:
    """The error for a mapping that failed: for want of memory, naming the tightest limit.

    `huge` is the page size of the hugetlbfs that it is of, if it is.
    """
    if not is_of_system(error):
        raise error
    if error.errno == errno.ENOMEM and huge:
        pool = huge_pools().get(huge)
        free = "unknown" if pool is None else pool.free
        return OutOfMemory(
            f"{what} of {format_bytes(nbytes)} needs {-(-nbytes // huge)} pages of "
            f"{format_bytes(huge)}, and {free} are free. Reserve more (/sys/kernel/mm/hugepages/"
            f"hugepages-{huge >> 10}kB/nr_hugepages), or use another file system"
        )
    most = vm.soft_limit("RLIMIT_FSIZE")
    if error.errno == errno.EFBIG and most is not None:
        return OutOfMemory(
            f"{what} of {format_bytes(nbytes)} is a file in memory, and this process may write "
            f"files of {format_bytes(most)} (RLIMIT_FSIZE). Ask for less, or raise it: ulimit -f"
        )
    if error.errno != errno.ENOMEM:
        return OSError(
            error.errno, f"cannot map {what} of {format_bytes(nbytes)}: {error.strerror}"
        )
    asked = f"the kernel refused to map {what} of {format_bytes(nbytes)} ({nbytes} bytes); "
    count, most = _mappings()
    if count + MAPPINGS_EACH > most:
        return OutOfMemory(
            f"{asked}this process has {count} mappings of at most {most}. Use fewer and larger "
            "regions, or raise vm.max_map_count"
        )
    binding = _tightest_limit()
    return OutOfMemory(
        f"{asked}the tightest limit is {binding.name} with {format_bytes(binding.available)} free "
        f"of {format_bytes(binding.nbytes)}. Ask for less, or {binding.remedy}."
    )


def _tightest_limit() -> Limit:
    return min(read_limits(), key=lambda limit: limit.available)


def _mappings() -> tuple[int, int]:
    """How many mappings this process has, and may have; no limit if it cannot be asked."""
    try:
        with _open("/proc/self/maps", "rb") as lines, _open("/proc/sys/vm/max_map_count") as most:
            return sum(1 for _ in lines), int(most.read())
    except OSError as error:  # no /proc, or no free descriptor
        if not is_of_system(error):
            raise
        return 0, sys.maxsize


# ---- checks ----------------------------------------------------------------------------------


def checked_index(name: str, value: Any) -> int:
    if isinstance(value, bool):
        raise TypeError(f"{name}={value!r}: need an int")
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name}={value!r}: need an int, not {type(value).__name__}") from None


def check_ordinal(value: Any) -> None:
    if not 0 <= checked_index("ordinal", value) < 2**31:  # a C int
        raise ValueError(f"ordinal={value!r}: devices are counted from 0")


def checked_size(value: Any) -> int:
    nbytes = checked_index("nbytes", value)
    if not 0 < nbytes < SIZE_LIMIT:
        raise ValueError(f"nbytes={nbytes}: need at least 1 and less than 2**63")
    return nbytes


def check_flag(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name}={value!r}: need True or False")


def check_choice(name: str, value: Any, choices: tuple[Any, ...]) -> None:
    if not (value is None or isinstance(value, str)) or value not in choices:
        raise ValueError(f"{name}={value!r}: choose one of {', '.join(map(repr, choices))}")


def _nodes_text() -> str:
    nodes = numa_nodes()
    if not nodes:  # no /sys, or no free descriptor
        return "nodes that the kernel does not name now"
    return f"the nodes {', '.join(map(str, nodes))}" if len(nodes) > 1 else f"node {nodes[0]} only"


def check_options(options: MemoryOptions) -> None:
    check_choice("huge_pages", options.huge_pages, ("auto", "2M", "1G", None))
    check_flag("prefault", options.prefault)
    check_flag("lock", options.lock)
    check_flag("grow", options.grow)
    if options.grow and options.huge_pages in ("2M", "1G"):
        raise ValueError(
            f"grow=True with huge_pages={options.huge_pages!r}: the kernel sets huge pages aside "
            "for all addresses that are reserved; use huge_pages='auto', or leave grow out"
        )
    if options.numa_node is not None:
        node = checked_index("numa_node", options.numa_node)
        nodes = numa_nodes()
        if node < 0 or (nodes and node not in nodes):
            raise ValueError(
                f"numa_node={node} has no memory here: choose {_nodes_text()}, or None"
            )
