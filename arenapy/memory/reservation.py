"""Address space of a `Host` or `Shared` region that gets its memory part by part.

What lives here: `Reservation`, how an allocator over `Host` or `Shared` grows in one range of
addresses and gives parts of it back. What does not: which parts (the allocator), the checks and
explanations that every request shares (`host_request.py`), and the mapping, which its `Region`
owns.

What holds for the whole range, NUMA node, huge pages, guard pages and fork, is set once, before
there is a page; access, locks and pages come with each commit.

A shared range is one memfd of the whole size, without pages at first. Its size never changes, so
handles, leases and receivers of blocks see no difference. The kernel counts its pages one by one.
To decommit a part is to punch a hole into the file, so its pages go for all processes. Only bytes
that are free in the allocator are decommitted: no lease is on them, so nobody looks there.
"""

import os
import sys
from time import monotonic
from typing import TYPE_CHECKING

from arenapy.base.system_errors import is_of_system
from arenapy.base.text import format_bytes
from arenapy.errors import OutOfMemory
from arenapy.linux import vm
from arenapy.linux.limits import read_limits
from arenapy.memory.host_request import THP_SIZE, Request, checked_index
from arenapy.memory.region import Region

if TYPE_CHECKING:
    from arenapy.memory.sources import Host

MOMENT = 0.1  # seconds
SHARE = 16
AHEAD = 256 << 20  # bytes


def whole_huge_pages(nbytes: int) -> int:
    """What is reserved of so many bytes."""
    return -(-nbytes // THP_SIZE) * THP_SIZE


def no_addresses(nbytes: int, limits: str) -> OutOfMemory:
    """The error if they cannot be reserved, and the source does nothing else."""
    return OutOfMemory(
        f"grow=True needs {format_bytes(nbytes)} of addresses, which cannot be reserved: a limit "
        f"counts them ({limits}), or they are too many. Raise the limit, give a smaller max_bytes, "
        "or leave grow out"
    )


def reserve(host: "Host", nbytes: int) -> "Reservation | None":
    """A reservation with the options of `host`; see `Host.reserve`."""
    nbytes = whole_huge_pages(nbytes)
    request = Request(host, "a Host region", nbytes)
    # To look at the limits takes modules that are not there any more when Python ends.
    limits = () if sys.is_finalizing() else read_limits()
    if request.hugetlb or any(limit.counts_mappings for limit in limits):
        return None
    try:
        mapping = vm.reserve(nbytes, align=THP_SIZE, guard=host.guard)
    except OSError as error:
        if not is_of_system(error):
            raise
        return None
    with mapping:
        if host.fork == "skip":
            request.keep_from_children(mapping.address)
        request.place(mapping.address)
        region = Region.from_address(
            mapping.address,
            nbytes,
            kind="host",
            page_size=request.page_size,
            fork=host.fork or "inherit",  # not hugetlbfs: see above
            mapping=mapping,
        )
    return Reservation(request, region)


class Reservation:
    """A region that cannot be accessed but where parts of it are committed, and shortly behind.

    Attributes
    ----------
    region : Region
        The whole range, aligned to 2 MiB; at its end it is unmapped.
    nbytes, page_size : int
        Its size, a multiple of 2 MiB, and that of its pages, of which parts are multiples.
    shared : bool
        True if it is of a `Shared`.

    Notes
    -----
    Thread-safety: parts that do not overlap may be committed and decommitted at once; not while
    the region is being closed.
    """

    __slots__ = (
        "_open", "_room", "_shared_by", "_until", "_whole", "nbytes", "page_size",
        "region", "shared",
    )  # fmt: skip

    def __init__(self, request: Request, region: Region) -> None:
        self._whole = request
        self.shared = region.kind == "shared"
        self._shared_by = os.getpid() if self.shared else 0
        self._room, self._until = 0, 0.0
        self._open = 0  # all before it is accessible, and stays so
        self.region = region
        self.nbytes = region.nbytes
        self.page_size = region.page_size

    def commit(self, offset: int, nbytes: int) -> None:
        """Give a part, of which nothing is committed, its memory: locked, faulted in, as asked.

        Raises
        ------
        OutOfMemory, OSError
            As the source's `region` does for that many bytes. The part has no memory then.
        ValueError, TypeError
            It is no part of this reservation, or the region is closed.
        """
        address = self._address(offset, nbytes)
        request = self._whole.part(nbytes)
        locked = self._whole.options.lock
        self._check(request)
        try:
            try:
                self._make_accessible(offset, nbytes)
                if self.shared:  # others may have written there: what is committed is zero
                    vm.decommit(address, nbytes, shared_by=self._shared_by)
            except OSError as error:
                raise request.explain_map(error) from error
            request.take(address)
        except BaseException:
            vm.give_back(address, nbytes, shared_by=self._shared_by, locked=locked)
            raise

    def ready(self) -> tuple[int, int, int, bool] | None:
        """The addresses that are accessible; the bytes that may get memory without a look at the
        limits; whether it is to be faulted in. None: parts take more than that. Internal."""
        options = self._whole.options
        if self.shared or options.lock or self.region.closed:
            return None
        start = self.region.address
        room = max(self._room, 0) if options.prefault else self.nbytes
        return start, start + self._open, room, options.prefault

    def look_ahead(self) -> None:
        """Make more accessible, and look at the limits. Internal."""
        if self.region.closed:
            return
        now = monotonic()
        self._room, self._until = self._whole.part(THP_SIZE).check() // SHARE, now + MOMENT
        start, stop = self._open, min(self._open + AHEAD, self.nbytes)
        if stop > start and self.region._make_accessible(start, stop - start):
            self._open = max(self._open, stop)

    def expect(self, nbytes: int) -> None:
        """Raise OutOfMemory if a part of so many bytes would be refused now."""
        self._whole.part(nbytes).check()

    def decommit(self, offset: int, nbytes: int, stream: object = None) -> None:
        """Give the memory of a part back. To use it again, commit it again.

        It stays accessible, so that nothing splits the mapping. If it was locked, memory of a Host
        goes on counting towards ``RLIMIT_MEMLOCK``. With ``huge_pages="auto"`` parts should be
        multiples of 2 MiB: where a huge page could be, the kernel may fill in what is missing.

        `stream` is for memory of a device, and None here.

        Raises
        ------
        ValueError, TypeError
            It is no part of this reservation, or the region is closed.
        """
        vm.decommit(self._address(offset, nbytes), nbytes, shared_by=self._shared_by)

    def _check(self, request: Request) -> None:
        """`request.check()`, unless what was free a moment ago is far more than was taken since.

        A program that begins commits several parts at once. To read all limits takes longer than
        to fault in one of them, and a dozen turns of the interpreter's lock.
        """
        now = monotonic()
        if request.mapped > self._room or now > self._until:
            self._room, self._until = request.check() // SHARE, now + MOMENT
        self._room -= request.mapped

    def _make_accessible(self, offset: int, nbytes: int) -> None:
        """A part; and what lies behind it, if this is how the reservation grows.

        mprotect waits for all threads that are faulting pages in, and they wait for it: a call for
        each part would let no two threads fault in at once.
        """
        end = offset + nbytes
        start, stop = self._open, min(end + AHEAD, self.nbytes)
        if end <= start:
            return
        if offset <= start and self.region._make_accessible(start, stop - start):
            self._open = max(self._open, stop)
            return
        # A limit counts what is accessible, and may have room for the part.
        vm.protect(self.region.address + offset, nbytes, True)

    def _address(self, offset: int, nbytes: int) -> int:
        """Where a part begins, if it is one."""
        offset, nbytes = checked_index("offset", offset), checked_index("nbytes", nbytes)
        if (
            (offset | nbytes) % self.page_size
            or offset < 0
            or not (0 < nbytes <= self.nbytes - offset)
        ):
            raise ValueError(
                f"offset={offset}, nbytes={nbytes}: need a part of {self.nbytes} bytes, in "
                f"multiples of {self.page_size}"
            )
        if self.region.closed:
            raise ValueError(f"{self.region!r} is closed; reserve again")
        return self.region.address + offset
