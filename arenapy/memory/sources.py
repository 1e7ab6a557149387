"""Where memory comes from: the recipes `Host`, `Shared`, `File` and `Existing`.

A source is an immutable recipe; ``region(nbytes)`` carries it out. What lives here: their options,
and the order of taking things and of giving them back should a later step fail. What may not:
system calls (`vm`), what `Host` and `Shared` check and explain alike (`host_request.py`), and
ownership, which `Region` takes over once everything has worked; which bytes are somebody's already
(`claims`).

Thread-safety: sources may be used from any thread.
"""

import errno
import functools
import importlib
import mmap
import os
import stat
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, Self, runtime_checkable

from arenapy.base.system_errors import IGNORED, is_of_system
from arenapy.base.text import format_bytes
from arenapy.buffer.block import Block
from arenapy.buffer.buffer import as_bytes, refuse_objects
from arenapy.errors import OutOfMemory
from arenapy.linux import vm
from arenapy.linux.limits import read_limits
from arenapy.memory.claims import WITHIN, claim, in_file
from arenapy.memory.host_request import (
    SIZE_LIMIT,
    THP_SIZE,
    HugePages,
    Request,
    check_choice,
    check_flag,
    check_options,
    checked_index,
    checked_size,
    explain_map,
)
from arenapy.memory.region import Region, claim_behind
from arenapy.memory.reservation import Reservation, no_addresses, reserve, whole_huge_pages

__all__ = ["Existing", "File", "Host", "Shared", "Source"]

MEMFD_NAME_MAX = 249  # bytes, the kernel's
ALL_BYTES = 1 << 63  # the end of any file
LOCK_TRIES, LOCK_PAUSE = 10, 0.01  # a program that is just being started may have our descriptors
THREADS_LIMIT = 2**31 - 1
BASES = 100  # of an array, at most, that are looked at in search of a Buffer


@runtime_checkable
class Source(Protocol):
    """An object with a method ``region(nbytes)``, from which an allocator gets its memory.

    Your class need not inherit from it. `Region.from_address` makes a region of any memory.

    Examples
    --------
    >>> import arenapy
    >>> class Counting:
    ...     count = 0
    ...     def region(self, nbytes):
    ...         self.count += 1
    ...         return arenapy.Host().region(nbytes)
    >>> source = Counting()
    >>> arena = arenapy.Bump(1 << 20, source)
    >>> isinstance(source, arenapy.Source), source.count
    (True, 1)
    """

    def __init__(self) -> None:
        if type(self) is Source:
            raise TypeError(
                "Source only describes a source; pass Host(), or your own object with "
                "a method region(nbytes)"
            )

    def region(self, nbytes: int) -> Region:
        """A new region of `nbytes` bytes that overlaps no other live region.

        Parameters
        ----------
        nbytes : int
            Size in bytes, more than 0.

        Raises
        ------
        OutOfMemory
            If there is not enough memory. Allocators pass the error on.

        Examples
        --------
        >>> region = arenapy.Host().region(1 << 20)
        >>> region.nbytes
        1048576
        """
        ...


@dataclass(frozen=True, slots=True)
class Host:
    """Private memory of this process.

    Parameters
    ----------
    huge_pages : {"auto", "2M", "1G", None}
        "auto": align to 2 MiB and ask for transparent huge pages, without a guarantee (see
        `Region.huge_fraction`). "2M", "1G": use pages reserved in hugetlbfs, or raise an error.
        These are always faulted in, because a page that is missing later would cause a SIGBUS.
    prefault : bool
        Fault in every page now. A request for more than the free memory is refused.
    lock : bool
        Never swap out a page once it was faulted in (``mlock2``).
    numa_node : int, optional
        Take the pages from this node only.
    guard : bool
        Put a page on both ends that causes a SIGSEGV on access. The upper one follows the last
        page, so bytes between `nbytes` and the next page boundary are not guarded.
    fork : {"inherit", "skip"}, optional
        Whether a forked child has a copy. While a child with a copy lives, each first write of
        the parent to a page faults again. "skip" avoids this: the child has no copy, and its
        allocators over the region are closed. The default is "inherit", and "skip" in hugetlbfs,
        where a copy may run out of pages and cause a SIGBUS.
    threads : int, optional
        The number of threads that fault in pages. The default is the number of usable CPUs, at
        most 8.
    grow : bool
        Let an allocator grow in place: a Bump or Pool reserves `max_bytes` of addresses and gives
        them memory as it grows, so that it has one region instead of many. (A Pool does so without
        this option, too, but takes further regions where addresses cannot be reserved.)

    Raises
    ------
    ValueError, TypeError
        If an option is invalid.

    Notes
    -----
    Thread-safety: immutable; may be used from any thread.

    Examples
    --------
    >>> import arenapy
    >>> arena = arenapy.Bump(1 << 20, arenapy.Host(huge_pages=None, guard=True))
    >>> arena.kind
    'host'
    """

    huge_pages: HugePages = "auto"
    prefault: bool = True
    lock: bool = False
    numa_node: int | None = None
    guard: bool = False
    fork: Literal["inherit", "skip"] | None = None
    threads: int | None = field(default=None, kw_only=True)
    grow: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        """Refuse what cannot be, before anything depends on it."""
        check_options(self)
        check_flag("guard", self.guard)
        check_choice("fork", self.fork, ("inherit", "skip", None))
        if self.fork == "inherit" and self.huge_pages in ("2M", "1G"):
            raise ValueError(
                f"fork='inherit' with huge_pages={self.huge_pages!r}: a child would be killed "
                "(SIGBUS) when huge pages run out; leave fork out, or use huge_pages='auto'"
            )
        if self.threads is not None and not (
            1 <= checked_index("threads", self.threads) <= THREADS_LIMIT
        ):
            raise ValueError(
                f"threads={self.threads!r}: need from 1 to {THREADS_LIMIT}, or None to choose"
            )

    def region(self, nbytes: int) -> Region:
        """Map, place and (by default) fault in `nbytes` bytes.

        Parameters
        ----------
        nbytes : int
            Size in bytes, more than 0.

        Returns
        -------
        Region

        Raises
        ------
        OutOfMemory
            If memory, huge pages or a limit are not sufficient. The message says which, and what to
            do.
        OSError
            If the kernel refused something else.
        ValueError, TypeError
            If `nbytes` is not a size.

        Examples
        --------
        >>> with arenapy.Host().region(1 << 20).buffer(0, 100) as part:
        ...     part.nbytes, part.kind
        (100, 'host')
        """
        nbytes = checked_size(nbytes)
        request = Request(self, "a Host region", nbytes)
        request.check()
        with request.map(guard=self.guard) as mapping:
            fork = self.fork or ("skip" if request.hugetlb else "inherit")
            if fork == "skip":
                request.keep_from_children(mapping.address)
            request.fill(mapping.address)
            return Region.from_address(
                mapping.address,
                nbytes,
                kind="host",
                page_size=request.page_size,
                fork=fork,
                mapping=mapping,
            )

    def reserve(self, nbytes: int) -> Reservation | None:
        """Internal: address space for a region that gets its memory part by part.

        None where that would hold more than it uses: hugetlbfs promises pages to all that is
        mapped, and some limits count addresses (``RLIMIT_AS``, ``RLIMIT_DATA``,
        ``vm.overcommit_memory=2``); also if the kernel refuses. Make a region for each part then.

        Raises
        ------
        OSError, ValueError, TypeError
            As `region` does, except errors about pages: there are none yet.
        OutOfMemory
            With `grow`, instead of None.
        """
        made = reserve(self, checked_size(nbytes))
        if made is None and self.grow:
            raise no_addresses(nbytes, "RLIMIT_AS, RLIMIT_DATA, vm.overcommit_memory=2")
        return made


@dataclass(frozen=True, slots=True)
class Shared:
    """Memory that other processes can map: a memfd, sealed against any change of its size.

    Parameters
    ----------
    name : str
        The name in ``/proc/<pid>/maps`` and ``/proc/<pid>/fd``. It need not be unique.
    huge_pages, prefault, lock, numa_node
        As for `Host`. "auto" has an effect if ``shmem_enabled`` in
        ``/sys/kernel/mm/transparent_hugepage`` allows it.
    grow : bool
        Let an allocator grow in place: a Bump or Pool reserves `max_bytes` of addresses and gives
        them memory as it grows. It then has one region and one descriptor instead of many, and
        ``trim()`` returns memory from the middle of the region to the system, for all processes.

    Raises
    ------
    ValueError, TypeError
        If an option is invalid.

    Notes
    -----
    In a forked child the memory stays mapped, and allocators over it are closed.
    Thread-safety: immutable; may be used from any thread.

    Examples
    --------
    >>> import arenapy
    >>> pool = arenapy.Pool(source=arenapy.Shared())
    >>> block = pool.alloc(4096)             # send it through a multiprocessing.Queue or Pipe,
    >>> block.kind                           # or by arenapy.send: the receiver maps the same bytes
    'shared'
    """

    name: str = "arenapy"
    huge_pages: HugePages = "auto"
    prefault: bool = True
    lock: bool = False
    numa_node: int | None = None
    grow: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        """Refuse what cannot be, before anything depends on it."""
        if not isinstance(self.name, str):
            raise TypeError(f"name={self.name!r}: need a str")
        if len(_encoded("name", self.name)) > MEMFD_NAME_MAX:
            raise ValueError(f"name={self.name!r}: need at most {MEMFD_NAME_MAX} bytes")
        check_options(self)
        # It imports multiprocessing, which only sharing needs; not first in region(), since a child
        # forked meanwhile would wait for the import for ever.
        importlib.import_module("arenapy.memory.shared")

    def region(self, nbytes: int) -> Region:
        """Make, map and (by default) fault in `nbytes` bytes of shared memory.

        Parameters
        ----------
        nbytes : int
            Size in bytes, more than 0.

        Returns
        -------
        Region

        Raises
        ------
        OutOfMemory, OSError, ValueError, TypeError
            As `Host.region` does.

        Examples
        --------
        >>> arenapy.Shared().region(1 << 20).kind
        'shared'
        """
        request = self._request(checked_size(nbytes))
        request.check()
        return self._made(request)

    def reserve(self, nbytes: int) -> Reservation:
        """Internal: address space for a region that gets its memory part by part.

        Raises
        ------
        OSError, ValueError, TypeError
            As `region` does, except errors about pages: there are none yet.
        OutOfMemory
            If a limit counts addresses or the size of files (``RLIMIT_AS``, ``RLIMIT_FSIZE``).
        """
        request = self._request(whole_huge_pages(checked_size(nbytes)))
        failure: Exception | None = None
        limits = () if sys.is_finalizing() else read_limits()  # as in `reserve` for a Host
        if request.nbytes < SIZE_LIMIT and all(limit.name != "RLIMIT_AS" for limit in limits):
            try:
                return Reservation(request, self._made(request, reserved=True))
            except OutOfMemory as error:
                failure = error
            except OSError as error:
                if error.errno != errno.EFBIG:
                    raise
                failure = error
        raise no_addresses(nbytes, "RLIMIT_AS, RLIMIT_FSIZE") from failure

    def _request(self, nbytes: int) -> Request:
        return Request(self, "a Shared region", nbytes, private=False)

    def _made(self, request: Request, reserved: bool = False) -> Region:
        """The region of a request; a reserved one has no memory, and cannot be accessed."""
        if not sys.is_finalizing():  # when nothing can be imported, or sent, any more
            from arenapy.memory import shared

            shared.install()
        try:
            file = vm.memfd(os.fsencode(self.name), request.mapped, request.page_size)
        except OSError as error:
            raise request.explain_map(error) from error
        map_file = request.map_reserved if reserved else request.map
        with (
            file,
            claim([(*vm.identity(file), 0, ALL_BYTES, True)], repr(self)) as claimed,
            map_file(file.fileno()) as mapping,
        ):
            if reserved:
                request.place(mapping.address)
            else:
                request.fill(mapping.address)
            return Region.from_address(
                mapping.address,
                request.nbytes,
                kind="shared",
                owner=claimed,
                page_size=request.page_size,
                fork="closed",
                mapping=mapping,
                descriptor=file,
            )


@dataclass(frozen=True, slots=True)
class File:
    """A mapped file, for data larger than memory. Pages are read when they are touched.

    Parameters
    ----------
    path : path-like
        A regular file. A relative path starts at the folder that is the current one now.
    mode : {"r", "r+", "c", "w+"}
        "r": read-only. "r+": writes go to the file. "c": copy on write, the file never changes.
        "w+": make the file, or empty it. Disk space for writes is reserved at once, because a
        mapped file that runs out of disk space later would cause a SIGBUS.

    Raises
    ------
    ValueError, TypeError
        If an option is invalid.

    Notes
    -----
    A writable region ("r+", "w+") has its bytes of the file for itself. While it lives, another
    region of the same file is refused, by whatever path, and before the file is changed. Regions in
    the modes "r" and "c" may coexist. A writable ``File`` changes no second file: if its path
    leads to another one later, a region is refused. A lock on the open file keeps other processes
    away (``fcntl(2)``, open file description locks), if they also use arenapy. If the file system
    has no such locks, two processes can map one file for writing.

    The lock is on one byte far beyond the end of the file. ``lockf`` without a length locks this
    byte, too. While any process holds such a lock, the region is refused. While the region lives,
    such a lock fails or waits, in this process too. (A shared lock is compatible with the modes "r"
    and "c".) A process loses every ``lockf`` lock on a file when it closes any descriptor of that
    file (``fcntl(2)``): also when a region of the file ends or is refused. So lock the file with
    ``flock``, which does not conflict, except on NFS, where it locks the whole file. Bytes that a
    forked child can still write to have a shared lock.

    "r+" reserves missing disk space, as "w+" does. If the file system cannot reserve it
    (``fallocate(2)``), a write to a hole on a full disk causes a SIGBUS. On tmpfs, even a read of a
    hole takes memory, so "r" and "c" fault in a file with holes (Linux 5.14; on older kernels a
    SIGBUS is possible).

    In a forked child, a writable file stays mapped, and allocators over it are closed. The parent
    does not reuse blocks that the child inherited until the child ends. On hugetlbfs, the pages are
    that file system's huge pages, and a forked child does not have them in mode "c" (see `Host`).
    Thread-safety: may be used from any thread.

    Examples
    --------
    >>> import arenapy
    >>> x = arenapy.File("data.f4", "w+").region(4000).buffer().array(dtype="f4")
    >>> x[:] = 1                             # the writes go to the file
    >>> x.size
    1000
    """

    path: str | bytes | os.PathLike[str] | os.PathLike[bytes]
    mode: Literal["r", "r+", "c", "w+"] = "r"
    # Allocators ask for more memory whenever they need it. So what the path meant at first counts.
    _folder: bytes | None = field(default=b"", init=False, repr=False)  # of a relative path
    _writes_to: dict[str, tuple[int, int]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        """Refuse what cannot be, before anything depends on it."""
        if not isinstance(self.path, (str, bytes, os.PathLike)):
            raise TypeError(f"path={self.path!r}: need a path")
        if isinstance(self.path, (str, bytes)):  # another may name it only when it is asked
            _encoded("path", self.path)
        check_choice("mode", self.mode, ("r", "r+", "c", "w+"))
        if isinstance(self.path, (str, bytes)):
            absolute = os.path.isabs(self.path)
        else:
            absolute = hasattr(self.path, "is_absolute") and self.path.is_absolute()  # of pathlib
        if not absolute:
            try:
                folder = os.getcwdb()
            except FileNotFoundError:  # it was removed
                folder = None
            object.__setattr__(self, "_folder", folder)

    def __copy__(self) -> Self:
        """Return this one: nothing changes it, and it is of one file."""
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return this one."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Another process may have another current folder."""
        return _file_in, (type(self), self._folder, self.path, self.mode)

    def region(self, nbytes: int | None = None) -> Region:
        """Map the first `nbytes` bytes of the file. The default is all of it.

        Parameters
        ----------
        nbytes : int, optional
            Size in bytes, more than 0. Required in mode "w+".

        Returns
        -------
        Region

        Raises
        ------
        OSError
            If the file cannot be opened or mapped, or the disk is full. ``BlockingIOError`` if
            another process has mapped it in a conflicting mode, or a program has locked all of it.
        ValueError, TypeError
            If the file is empty or not a regular file; or if `nbytes` is missing in mode "w+".
        OutOfMemory
            If the file is shorter than `nbytes`. If another region has these bytes of the file, and
            one of the two is writable. If the path leads to another file than before, and this
            source is writable.

        Examples
        --------
        >>> np.arange(1000.0).tofile("data.f8")
        >>> x = arenapy.File("data.f8").region().buffer().array(dtype="f8")
        >>> float(x[-1]), x.flags.writeable
        (999.0, False)
        """
        if nbytes is not None:
            nbytes = checked_size(nbytes)
        elif self.mode == "w+":
            raise ValueError(f'{self!r}.region() needs nbytes: mode "w+" makes a file of that size')
        path = os.fspath(self.path)  # once: what it names may change
        _encoded("path", path)
        if self._folder is None and not os.path.isabs(path):
            raise FileNotFoundError(
                f"{self!r} was made in a folder that had been removed, so its relative path names "
                "nothing: give an absolute path"
            )
        # Not abspath: without its last slash, the name of a folder would be that of a file.
        folder = self._folder or b""
        if isinstance(path, bytes):
            path = os.path.join(folder, path)
        else:
            path = os.path.join(os.fsdecode(folder), path)
        while True:
            opened: list[vm.Descriptor] = []
            try:
                region = self._region(self._open(path, opened), nbytes, path)
            except BaseException:
                for file in opened:
                    with IGNORED:
                        # Only with the lock, or it may be another's by now.
                        if file.made and vm.lock_file(file.fileno(), True) and _names(path, file):
                            os.unlink(path)
                raise
            finally:
                for file in opened:
                    file.close()
            if region is not None:
                return region

    def _region(self, file: vm.Descriptor, nbytes: int | None, path: str | bytes) -> Region | None:
        """None: another process has removed the file that it made, or has changed the size."""
        fd, asked = file.fileno(), nbytes
        huge = vm.huge_page(fd)
        writes = self.mode in ("r+", "w+")
        if self.mode == "w+" and nbytes:
            end = ALL_BYTES
        else:
            nbytes = end = self._fitting(asked, vm.file_nbytes(fd))
        device, inode = _identity(file, huge)
        with (
            claim([(device, inode, 0, end, writes)], repr(self)) as claimed,
            vm.renewal(file) if self.mode == "w+" else nullcontext() as renewal,
        ):
            self._lock(fd, writes)
            here = device, inode
            if writes and not file.made and self._writes_to.get("file", here) != here:
                raise OutOfMemory(
                    f"{self.path!r} is another file than the one that this source had before: make "
                    "a new File to map it"
                )
            if self.mode != "w+":
                if self._fitting(asked, vm.file_nbytes(fd)) != nbytes:
                    return None
            elif not _names(path, file):
                return None
            if renewal is not None:
                self._reserved(nbytes, huge, functools.partial(_reserve, fd, renewal))
            elif writes:
                self._reserved(nbytes, huge, functools.partial(_fill_holes, fd))
            try:
                mapping = vm.map_memory(
                    nbytes,
                    fd=fd,
                    shared=self.mode != "c",
                    writable=self.mode != "r",
                    align=THP_SIZE,
                    page_size=huge,
                )
            except OSError as error:
                raise explain_map(error, f"a mapping of {self.path!r}", nbytes, huge) from error
            with mapping:
                fork: Literal["inherit", "skip", "closed"] = "closed" if writes else "inherit"
                if huge and self.mode == "c":
                    fork = "skip"
                    vm.advise(mapping.address, -(-nbytes // huge) * huge, mmap.MADV_DONTFORK)
                if not writes and vm.is_tmpfs(fd) and vm.can_populate() and _has_hole(fd, nbytes):
                    self._reserved(nbytes, huge, functools.partial(_fault_in, fd, mapping.address))
                if renewal is not None and file.made:  # there was nothing to keep
                    self._reserved(nbytes, huge, renewal.renew)
                region = Region.from_address(
                    mapping.address,
                    nbytes,
                    kind="file",
                    owner=claimed,
                    readonly=self.mode == "r",
                    page_size=huge or vm.PAGE_SIZE,
                    fork=fork,
                    mapping=mapping,
                    descriptor=file,
                )
            if renewal is not None and not file.made:  # last: who raises leaves what was there
                self._reserved(nbytes, huge, renewal.renew)
            self._writes_to["file"] = here
            return region

    def _open(self, path: str | bytes, opened: list[vm.Descriptor]) -> vm.Descriptor:
        flags = os.O_RDWR if self.mode in ("r+", "w+") else os.O_RDONLY
        while True:
            if self.mode == "w+":
                with suppress(FileExistsError):
                    return vm.open_file(path, flags | os.O_CREAT | os.O_EXCL, opened=opened)
            try:
                # Asked before opening: opening a FIFO would wait for a writer.
                if not stat.S_ISREG(os.stat(path).st_mode):
                    raise ValueError(
                        f"{self.path!r} is not a regular file: only those can be mapped"
                    )
                return vm.open_file(path, flags, opened=opened)
            except FileNotFoundError as error:
                if self.mode != "w+":
                    raise
                if _leads_nowhere(path):
                    error.strerror = (
                        "it is a link to a file that is not there; give that file's path"
                    )
                    raise

    def _fitting(self, nbytes: int | None, size: int) -> int:
        """How many bytes of the `size` that there are to map."""
        if size == 0:
            raise ValueError(f"{self.path!r} is empty: there is nothing to map")
        if nbytes is not None and nbytes > size:
            raise OutOfMemory(
                f"cannot map {nbytes} bytes of {self.path!r}, which has {size}: ask for less, "
                "enlarge the file first (os.posix_fallocate), or make a new one with mode 'w+'"
            )
        return nbytes or size

    def _lock(self, fd: int, writes: bool) -> None:
        tries = 0
        while not vm.lock_file(fd, writes):
            tries += 1
            if tries == LOCK_TRIES:
                raise BlockingIOError(
                    errno.EAGAIN,
                    _why_locked(vm.foreign_lock(fd, writes), self.mode),
                    os.fspath(self.path),
                )
            time.sleep(LOCK_PAUSE)

    def _reserved(self, nbytes: int, huge: int, reserve: Callable[[int], None]) -> None:
        """Let no page be missing on disk."""
        try:
            reserve(-(-nbytes // (huge or 1)) * (huge or 1) if self.mode == "w+" else nbytes)
        except OSError as error:
            if not is_of_system(error):
                raise
            if self.mode != "w+" and error.errno in (errno.EOPNOTSUPP, errno.ENOSYS):
                return
            where = f"in huge pages of {format_bytes(huge)}" if huge else "on disk"
            advice = "reserve more huge pages" if huge else "choose another file system"
            raise OSError(
                error.errno,
                f"cannot reserve {format_bytes(nbytes)} {where} ({error.strerror}): ask for less, "
                f"or {advice}",
                os.fspath(self.path),
            ) from error


def _file_in(cls: type[File], folder: bytes | None, path: Any, mode: Any) -> File:
    made = cls(path, mode)
    object.__setattr__(made, "_folder", folder)
    return made


def _why_locked(holder: int | None, mode: str) -> str:
    if holder is None:
        return (
            "another process has mapped it, and only processes that do not write may share "
            f"it (mode={mode!r} here). A forked child keeps what it inherited until "
            "it ends. Wait for the other one, or map a copy of the file"
        )
    who = f"process {holder}" if holder > 0 else "a program"
    if holder == os.getpid():
        who = "this process itself"
    return (
        f"{who} has locked all of it, to the end of any file (fcntl.lockf without a length), and "
        f"with that the byte that keeps other processes from mapping it (mode={mode!r} here). "
        "Unlock it before it is mapped, and use fcntl.flock(file, fcntl.LOCK_EX) instead"
    )


def _names(path: str | bytes, file: vm.Descriptor) -> bool:
    """Whether a path leads to an open file."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False


def _leads_nowhere(path: str | bytes) -> bool:
    """Whether a path is that of a link to nothing. It is not if its file was removed meanwhile."""
    link = False
    try:
        link = stat.S_ISLNK(os.lstat(path).st_mode)
        os.stat(path)
    except FileNotFoundError:
        return link
    return False


def _has_hole(fd: int, nbytes: int) -> bool:
    return os.lseek(fd, 0, os.SEEK_HOLE) < nbytes


def _fill_holes(fd: int, nbytes: int) -> None:
    if _has_hole(fd, nbytes):
        _check_room(fd, nbytes)
        vm.reserve_blocks(fd, nbytes)


def _reserve(fd: int, renewal: vm.Renewal, nbytes: int) -> None:
    if not vm.huge_page(fd):
        _check_room(fd, nbytes)
    renewal.reserve(nbytes)


def _check_room(fd: int, nbytes: int) -> None:
    """What a reservation got before it failed stays in the file, and others may write to it."""
    room = os.fstatvfs(fd)
    if room.f_blocks and _holes(fd, nbytes) > room.f_bfree * room.f_frsize:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _holes(fd: int, nbytes: int) -> int:
    """Bytes of the holes among the first `nbytes` of a file."""
    at = total = 0
    with IGNORED:  # ENXIO: nothing but a hole follows, or the file shrank
        while at < nbytes:
            hole = os.lseek(fd, at, os.SEEK_HOLE)
            if hole >= nbytes:
                return total
            total += nbytes - hole
            at = os.lseek(fd, hole, os.SEEK_DATA)
            total -= max(nbytes - at, 0)
    return total


def _fault_in(fd: int, address: int, nbytes: int) -> None:
    """Take the memory of holes in a file on tmpfs, which says EFAULT when it is full."""
    _check_room(fd, nbytes)
    try:
        vm.prefault(address, nbytes, writable=False)
    except OSError as error:
        if error.errno != errno.EFAULT:
            raise
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from error


def _encoded(what: str, name: str | bytes) -> bytes:
    """A name as the system takes it."""
    try:
        encoded = os.fsencode(name)
    except UnicodeEncodeError:
        raise ValueError(
            f"{what}={name!r} has characters that are not allowed in file names here "
            f"({sys.getfilesystemencoding()}); pass another name"
        ) from None
    if b"\0" in encoded:
        raise ValueError(f"{what}={name!r} contains a NUL character; pass another name")
    return encoded


def _identity(file: vm.Descriptor, huge: int) -> tuple[int, int]:
    """Device and inode as mappings have them: on some file systems, fstat says others."""
    if not huge:
        with (
            IGNORED,  # no /proc, or it cannot be mapped
            vm.map_memory(1, fd=file.fileno(), shared=True, writable=False) as page,
        ):
            for _, device, inode, *_ in vm.areas(page.address, 1):
                return device, inode
    return vm.identity(file)


@dataclass(frozen=True, slots=True, eq=False)
class Existing:
    """Memory that an object already has: a ``bytearray``, an ``mmap``, an array, ``shm.buf``.

    Parameters
    ----------
    obj : buffer
        A non-empty C-contiguous buffer. It stays exported while the region lives, so a
        ``bytearray`` cannot be resized.
    readonly : bool
        Make a read-only region, which allocators refuse. Required if `obj` is read-only.

    Raises
    ------
    TypeError
        If `obj` has no buffer, or its buffer contains references to Python objects.
    BufferError
        If it is read-only, or not contiguous.
    ValueError
        If it is empty.

    Notes
    -----
    A writable region has its bytes for itself. While it lives, another region over any of these
    bytes is refused, by this source, by another view of the memory or by another mapping of the
    same file. Regions with ``readonly=True`` may coexist. `obj` may be a Buffer, or an array over a
    Buffer: then one allocator works inside a block of another. Writes through the object itself,
    and by other processes that map the same memory, are not prevented. All of these, such as a
    process that the block was sent to, see the bytes that the allocator hands out.

    A forked child has a copy of private memory. Shared memory (``MAP_SHARED``: an ``mmap``,
    ``SharedMemory``) stays the parent's, and allocators over it are closed in the child. The parent
    does not reuse blocks that the child inherited until the child ends.
    Thread-safety: may be used from any thread.
    Without the GIL, only one thread at a time may make an Existing over an object whose exports
    Python does not count atomically, such as a bytearray in CPython 3.13.

    Examples
    --------
    >>> import arenapy
    >>> memory = bytearray(4096)
    >>> arena = arenapy.Bump(4000, arenapy.Existing(memory))
    >>> arena.alloc(3000).fill(255)
    >>> memory.count(255)
    3000
    """

    obj: Any
    readonly: bool = False

    def __post_init__(self) -> None:
        """Refuse what cannot be, before anything depends on it."""
        check_flag("readonly", self.readonly)
        viewed(self.obj, self.readonly).release()

    def __repr__(self) -> str:
        """Not what the object holds."""
        try:
            size = f" of {memoryview(as_bytes(self.obj)).nbytes} bytes"
        except (TypeError, ValueError, BufferError):  # it was closed meanwhile
            size = ""
        return f"Existing(<{type(self.obj).__name__}{size}>{', readonly=True' * self.readonly})"

    def region(self, nbytes: int | None = None) -> Region:
        """A region of the first `nbytes` bytes of the object. The default is all of it.

        Parameters
        ----------
        nbytes : int, optional
            Size in bytes, more than 0.

        Returns
        -------
        Region

        Raises
        ------
        OutOfMemory
            If the object has fewer bytes, or if another region has some of these bytes and one of
            the two is writable.
        TypeError, BufferError, ValueError
            As for the constructor (the object may have changed), or if `nbytes` is not a size.
        OSError
            If the file of the memory cannot be found: no ``/proc``, or no free descriptor.

        Examples
        --------
        >>> region = arenapy.Existing(bytearray(100)).region()
        >>> region.nbytes
        100
        """
        with viewed(self.obj, self.readonly) as view:  # a traceback would keep the view
            nbytes = view.nbytes if nbytes is None else checked_size(nbytes)
            if nbytes > view.nbytes:
                raise OutOfMemory(
                    f"Existing has {view.nbytes} bytes, and the request is for {nbytes}: "
                    "ask for less, or pass a larger object"
                )
            return region_of(view, nbytes, self.readonly, not self.readonly, repr(self))


def viewed(obj: Any, readonly: bool) -> memoryview:
    """A view of an object's memory, if a region can be made of it."""
    name = type(obj).__name__
    try:
        view = memoryview(as_bytes(obj))
    except TypeError:
        raise TypeError(f"Existing needs an object with a buffer, but {name} has none") from None
    try:
        refuse_objects(view.format, obj)
        if view.readonly and not readonly:
            raise BufferError(
                f"this {name} is read-only: copy it into a bytearray, or pass readonly=True for a "
                "read-only region"
            )
        if not view.c_contiguous:
            raise BufferError(f"this {name} is not C-contiguous: pass a contiguous copy of it")
        if view.nbytes == 0:
            raise ValueError(f"this {name} is empty: there is nothing to make a region of")
    except BaseException:
        view.release()  # a traceback would keep it, and the object exported
        raise
    return view


def region_of(view: memoryview, nbytes: int, readonly: bool, alone: bool, label: str) -> Region:
    """A region of the first `nbytes` bytes of a view, which no other may have too if `alone`."""
    start = vm.address_of(view)
    end = start + nbytes
    fork: Literal["inherit", "closed"] = "inherit"
    exporter = view.obj
    if type(exporter) in (bytes, bytearray):  # on the heap, which is private
        ranges = [(0, 0, start, end, alone)]
    else:
        number, several = _claim_behind(exporter)
        ranges = [(0, number, start, end, alone)]
        # Bytes of a region. Others that were received or unpickled may have the same bytes, so what
        # lies within any of them is claimed for all. (Unpickled Buffers are only views.)
        inside = not number and in_file(start, end)
        within = WITHIN if inside or several else 0
        files = (alone or readonly) if within else not number
        if several and files:
            ranges.append((0, WITHIN, start, end, alone))
        try:
            areas = vm.areas(start, nbytes)
        except OSError as error:
            if not is_of_system(error):
                raise
            if files and (alone or readonly):  # of a file, perhaps, which others map
                raise OSError(
                    error.errno,
                    f"cannot find the file of the memory of {label}, to protect "
                    "its bytes: /proc/self/maps and a free descriptor are needed. Close files, or "
                    "give a bytearray",
                ) from error
            areas, fork = [], "closed"  # the child may see it
        for shared, device, inode, at, size, name in areas:
            if shared:
                fork = "closed"
            if files and _is_file(name, device, inode):
                ranges.append((device | within, inode, at, at + size, alone and shared))
    with claim(ranges, label, view=memoryview(view), shared=not (alone or readonly)) as claimed:
        return Region.from_address(
            start,
            nbytes,
            kind="existing",
            owner=claimed,
            readonly=readonly,
            page_size=vm.PAGE_SIZE,
            fork=fork,
        )


def _claim_behind(exporter: Any) -> tuple[int, bool]:
    """`claim_behind` of the Buffer that an object's memory is in, if there is one."""
    numpy = sys.modules.get("numpy")
    for _ in range(BASES):
        if isinstance(exporter, Block):
            return claim_behind(exporter)
        if isinstance(exporter, memoryview):
            exporter = exporter.obj
        elif numpy is not None and isinstance(exporter, numpy.ndarray):
            exporter = exporter.base
        else:
            break
    return 0, False


def _is_file(name: bytes, device: int, inode: int) -> bool:
    """Are a mapping's bytes those of the file it is of? Not if that is a device.

    The kernel gives no name that is longer than a path may be.

    A SysV segment is a file whose inode is its number, which may be 0. Another file may have the
    name of one that is deleted.
    """
    if not name:
        return bool(device or inode)
    try:
        found = os.stat(name)
    except (OSError, ValueError) as error:  # deleted, or a memfd; "anon_inode:" is no file
        if isinstance(error, OSError) and not is_of_system(error):
            raise
        return name.startswith(b"/")
    return not (stat.S_ISCHR(found.st_mode) and found.st_ino == inode)
