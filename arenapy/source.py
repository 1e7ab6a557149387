"""Where memory comes from: the recipes `Host`, `Shared`, `File` and `Existing`.

A source is an immutable recipe; ``region(nbytes)`` carries it out. What lives here: their options,
and the order of taking things and of giving them back should a later step fail. What may not:
system calls (`vm`), what `Host` and `Shared` check and explain alike (`request.py`), and ownership,
which `Region` takes over once everything has worked.

Thread-safety: sources may be used from any thread.
"""

import importlib
import os
import stat
import threading
import weakref
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

from arenapy import vm
from arenapy.errors import OutOfMemory
from arenapy.memory_info import format_bytes
from arenapy.region import Region
from arenapy.request import (
    THP_SIZE,
    HugePages,
    Request,
    check_choice,
    check_flag,
    check_options,
    checked_index,
    checked_size,
    explain_map,
    undo,
)
from arenapy.reservation import Reservation, reserve

__all__ = ["Existing", "File", "Host", "Shared", "Source"]

MEMFD_NAME_MAX = 249  # bytes, the kernel's


@runtime_checkable
class Source(Protocol):
    """Anything that makes regions; write your own with `Region.from_address`."""

    def region(self, nbytes: int) -> Region:
        """A new region of `nbytes` bytes that overlaps no other that is alive.

        Raises
        ------
        OutOfMemory
            There is not that much. Allocators pass it on.
        """
        ...


@dataclass(frozen=True, slots=True)
class Host:
    """Private memory of this process.

    Parameters
    ----------
    huge_pages : {"auto", "2M", "1G", None}
        "auto": aligned to 2 MiB and transparent huge pages asked for, without a promise (see
        `Region.huge_fraction`). "2M", "1G": pages reserved in hugetlbfs, or an error; they are
        always faulted in, because one that is missing later would be a SIGBUS.
    prefault : bool
        Fault every page in now. A request beyond what is free is refused.
    lock : bool
        Keep pages from being swapped out, from when they are faulted in (``mlock2``).
    numa_node : int, optional
        Take the pages from this node only.
    guard : bool
        A page on both ends whose access is a SIGSEGV. The upper one follows the last page: bytes
        between `nbytes` and the next page boundary are not guarded.
    fork : {"inherit", "skip"}
        Whether a forked child has a copy. While it lives, a copy makes every page of the parent
        fault again on write; "skip" avoids that, and allocators over the region are closed there.
    threads : int, optional
        How many fault pages in; by default as many as CPUs may be used, at most 8.

    Raises
    ------
    ValueError, TypeError
        An option that cannot be.

    Notes
    -----
    Thread-safety: immutable; may be used from any thread.
    """

    huge_pages: HugePages = "auto"
    prefault: bool = True
    lock: bool = False
    numa_node: int | None = None
    guard: bool = False
    fork: Literal["inherit", "skip"] = "inherit"
    threads: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        """Refuse what cannot be, before anything depends on it."""
        check_options(self)
        check_flag("guard", self.guard)
        check_choice("fork", self.fork, ("inherit", "skip"))
        if self.threads is not None and checked_index("threads", self.threads) < 1:
            raise ValueError(f"threads={self.threads!r}: need at least 1, or None to choose")

    def region(self, nbytes: int) -> Region:
        """Map, place and (by default) fault in `nbytes` bytes.

        Raises
        ------
        OutOfMemory
            Memory, huge pages or a limit do not suffice; the message says which and what to do.
        OSError
            The kernel refused something else.
        ValueError, TypeError
            `nbytes` is not a size.
        """
        nbytes = checked_size(nbytes)
        request = Request(self, "a Host region", nbytes)
        request.check()
        address, map_address, map_nbytes = request.map(guard=self.guard)
        with undo(vm.unmap, map_address, map_nbytes):
            if self.fork == "skip":
                request.keep_from_children(address)
            request.fill(address, self.threads or 0)
            return Region.from_address(
                address,
                nbytes,
                kind="host",
                page_size=request.page_size,
                fork=self.fork,
                map_address=map_address,
                map_nbytes=map_nbytes,
            )

    def reserve(self, nbytes: int) -> Reservation | None:
        """Internal: address space for a region that gets its memory part by part.

        None where that would hold more than it uses: hugetlbfs promises pages to all that is
        mapped, and some limits count addresses (``RLIMIT_AS``, ``RLIMIT_DATA``,
        ``vm.overcommit_memory=2``); also if the kernel refuses. Make a region for each part then.

        Raises
        ------
        OSError, ValueError, TypeError
            As `region` does, but for what concerns pages, of which there are none yet.
        """
        return reserve(self, checked_size(nbytes))


@dataclass(frozen=True, slots=True)
class Shared:
    """Memory that other processes can map: a memfd, sealed against any change of its size.

    Parameters
    ----------
    name : str
        Shown in ``/proc/<pid>/maps`` and ``/proc/<pid>/fd``; need not be unique.
    huge_pages, prefault, lock, numa_node
        As for `Host`; "auto" has an effect where ``shmem_enabled`` in
        ``/sys/kernel/mm/transparent_hugepage`` allows it.

    Raises
    ------
    ValueError, TypeError
        An option that cannot be.

    Notes
    -----
    In a forked child the memory stays mapped, and allocators over it are closed.
    Thread-safety: immutable; may be used from any thread.
    """

    name: str = "arenapy"
    huge_pages: HugePages = "auto"
    prefault: bool = True
    lock: bool = False
    numa_node: int | None = None

    def __post_init__(self) -> None:
        """Refuse what cannot be, before anything depends on it."""
        if not isinstance(self.name, str):
            raise TypeError(f"name={self.name!r}: need a str")
        if "\0" in self.name or len(os.fsencode(self.name)) > MEMFD_NAME_MAX:
            raise ValueError(f"name={self.name!r}: need at most {MEMFD_NAME_MAX} bytes, none NUL")
        check_options(self)
        # It imports multiprocessing, which only sharing needs; not first in region(), since a child
        # forked meanwhile would wait for the import for ever.
        importlib.import_module("arenapy.shared")

    def region(self, nbytes: int) -> Region:
        """Make, map and (by default) fault in `nbytes` bytes of shared memory.

        Raises
        ------
        OutOfMemory, OSError, ValueError, TypeError
            As `Host.region` does.
        """
        nbytes = checked_size(nbytes)
        from arenapy import shared

        shared.install()
        request = Request(self, "a Shared region", nbytes, private=False)
        request.check()
        try:
            fd = vm.memfd(os.fsencode(self.name), request.mapped, request.page_size)
        except OSError as error:
            raise request.explain_map(error) from error
        with undo(os.close, fd):
            address, map_address, map_nbytes = request.map(fd)
            with undo(vm.unmap, map_address, map_nbytes):
                request.fill(address)
                return Region.from_address(
                    address,
                    nbytes,
                    kind="shared",
                    page_size=request.page_size,
                    fork="closed",
                    fd=fd,
                    map_address=map_address,
                    map_nbytes=map_nbytes,
                )


class _Sole:
    """Lets a source whose bytes exist once have one region at a time: two would overlap."""

    __slots__ = ("_lock", "_owner")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner: weakref.ref[object] | None = None

    def claim(self, owner: object, what: str) -> None:
        """Until `owner`, which the region keeps, is gone, refuse others."""
        with self._lock:
            if self._owner is not None and self._owner() is not None:
                raise OutOfMemory(
                    f"{what} already has a region, and a second one would be the same bytes. Drop "
                    "the first with everything that uses it, or use another source"
                )
            self._owner = weakref.ref(owner)

    def release(self) -> None:
        """There is no region after all."""
        with self._lock:
            self._owner = None

    def __reduce__(self) -> tuple[type["_Sole"], tuple[()]]:
        """A copy of a source has no region."""
        return _Sole, ()


class _Owner:
    """What a region keeps alive so that `_Sole` sees it."""

    __slots__ = ("__weakref__",)


@dataclass(frozen=True, slots=True)
class File:
    """A mapped file, for data larger than memory; pages are read when they are touched.

    Parameters
    ----------
    path : path-like
        A regular file.
    mode : {"r", "r+", "c", "w+"}
        "r": read-only. "r+": writes go to the file. "c": copy on write, the file never changes.
        "w+": make the file, or empty it, and reserve its bytes on disk (a mapped file that runs out
        of disk later would be a SIGBUS).

    Raises
    ------
    ValueError, TypeError
        An option that cannot be.

    Notes
    -----
    In the modes "r+" and "w+" one region at a time: a second would be the same bytes. In a forked
    child such a file stays mapped, and allocators over it are closed.
    Thread-safety: may be used from any thread.
    """

    path: str | bytes | os.PathLike[str] | os.PathLike[bytes]
    mode: Literal["r", "r+", "c", "w+"] = "r"
    _sole: _Sole = field(default_factory=_Sole, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Refuse what cannot be, before anything depends on it."""
        if not isinstance(self.path, (str, bytes, os.PathLike)):
            raise TypeError(f"path={self.path!r}: need a path")
        check_choice("mode", self.mode, ("r", "r+", "c", "w+"))

    def region(self, nbytes: int | None = None) -> Region:
        """Map the first `nbytes` bytes of the file, by default all; in mode "w+", that many.

        Raises
        ------
        OSError
            The file cannot be opened or mapped, or the disk is full.
        ValueError, TypeError
            The file is empty, shorter than `nbytes` or no regular file; "w+" without `nbytes`.
        OutOfMemory
            In the modes "r+" and "w+", if this source's region is still alive.
        """
        if nbytes is not None:
            nbytes = checked_size(nbytes)
        elif self.mode == "w+":
            raise ValueError(f'{self!r}.region() needs nbytes: mode "w+" makes a file of that size')
        if self.mode in ("r", "c"):
            return self._map(nbytes, None)
        owner = _Owner()
        self._sole.claim(owner, repr(self))
        with undo(self._sole.release):
            return self._map(nbytes, owner)

    def _map(self, nbytes: int | None, owner: _Owner | None) -> Region:
        fd = self._create(nbytes) if self.mode == "w+" and nbytes is not None else self._open()
        with undo(os.close, fd):
            size = vm.file_nbytes(fd)
            if size == 0:
                raise ValueError(f"{self.path!r} is empty: there is nothing to map")
            if nbytes is None:
                nbytes = size
            elif nbytes > size:
                raise ValueError(
                    f"cannot map {nbytes} bytes of {self.path!r}, which has {size}: ask for less, "
                    "enlarge the file first (os.truncate), or make a new one with mode 'w+'"
                )
            writable = self.mode != "r"
            try:
                address, map_address, map_nbytes = vm.map_memory(
                    nbytes, fd=fd, shared=self.mode != "c", writable=writable, align=THP_SIZE
                )
            except OSError as error:
                raise explain_map(error, f"a mapping of {self.path!r}", nbytes) from error
            with undo(vm.unmap, map_address, map_nbytes):
                return Region.from_address(
                    address,
                    nbytes,
                    kind="file",
                    owner=owner,
                    readonly=not writable,
                    page_size=vm.PAGE_SIZE,
                    fork="inherit" if self.mode in ("r", "c") else "closed",
                    fd=fd,
                    map_address=map_address,
                    map_nbytes=map_nbytes,
                )

    def _open(self) -> int:
        # Asked before opening: opening a FIFO would wait for a writer.
        if not stat.S_ISREG(os.stat(self.path).st_mode):
            raise ValueError(f"{self.path!r} is not a regular file: only those can be mapped")
        return os.open(self.path, (os.O_RDWR if self.mode == "r+" else os.O_RDONLY) | os.O_CLOEXEC)

    def _create(self, nbytes: int) -> int:
        """A file of `nbytes` zero bytes that are on disk; a new file is removed if that fails."""
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        try:
            fd, is_new = os.open(self.path, flags | os.O_EXCL, 0o666), True
        except FileExistsError:
            if not stat.S_ISREG(os.stat(self.path).st_mode):
                raise ValueError(
                    f"{self.path!r} is not a regular file: cannot make it one"
                ) from None
            fd, is_new = os.open(self.path, flags, 0o666), False
        try:
            os.ftruncate(fd, 0)
            os.posix_fallocate(fd, 0, nbytes)
        except BaseException as error:
            os.close(fd)
            if is_new:
                os.unlink(self.path)
            if isinstance(error, OSError) and error.errno:
                raise OSError(
                    error.errno,
                    f"cannot reserve {format_bytes(nbytes)} on disk ({os.strerror(error.errno)}): "
                    "ask for less, or choose another file system",
                    os.fspath(self.path),
                ) from error
            raise
        return fd


@dataclass(frozen=True, slots=True, eq=False)
class Existing:
    """Memory that an object already has: a ``bytearray``, an ``mmap``, an array, ``shm.buf``.

    Parameters
    ----------
    obj : buffer
        A non-empty C-contiguous buffer. It stays exported while the region lives: a ``bytearray``
        cannot be resized then.
    readonly : bool
        Make a region to look at only; allocators refuse it. Needed if `obj` is read-only.

    Raises
    ------
    TypeError
        `obj` has no buffer.
    BufferError
        It is read-only, or not contiguous.
    ValueError
        It is empty.

    Notes
    -----
    One region at a time: a second would be the same bytes.
    Thread-safety: may be used from any thread.
    """

    obj: Any
    readonly: bool = False
    _sole: _Sole = field(default_factory=_Sole, init=False, repr=False)

    def __post_init__(self) -> None:
        """Refuse what cannot be, before anything depends on it."""
        check_flag("readonly", self.readonly)
        self._view().release()

    def region(self, nbytes: int | None = None) -> Region:
        """The first `nbytes` bytes of the object, by default all.

        Raises
        ------
        OutOfMemory
            The object has fewer bytes, or this source's region is still alive.
        TypeError, BufferError, ValueError
            As at construction (the object may have changed), or `nbytes` is not a size.
        """
        view = self._view()
        nbytes = view.nbytes if nbytes is None else checked_size(nbytes)
        if nbytes > view.nbytes:
            raise OutOfMemory(
                f"Existing has {view.nbytes} bytes, and {nbytes} were asked for: "
                "ask for less, or give it a larger object"
            )
        self._sole.claim(view, f"Existing({type(self.obj).__name__})")
        with undo(self._sole.release):
            address = vm.address_of(view)
            return Region.from_address(
                address,
                nbytes,
                kind="existing",
                owner=view,
                readonly=self.readonly,
                page_size=vm.PAGE_SIZE,
                fork=_fork_rule(address, nbytes),
            )

    def _view(self) -> memoryview:
        try:
            view = memoryview(self.obj)
        except TypeError:
            raise TypeError(
                f"Existing needs an object with a buffer, and {type(self.obj).__name__} has none"
            ) from None
        name = type(self.obj).__name__
        if view.readonly and not self.readonly:
            raise BufferError(
                f"this {name} is read-only: copy it into a bytearray, or pass readonly=True for a "
                "region to look at"
            )
        if not view.c_contiguous:
            raise BufferError(f"this {name} is not C-contiguous: pass a contiguous copy of it")
        if view.nbytes == 0:
            raise ValueError(f"this {name} is empty: there is nothing to make a region of")
        return view


def _fork_rule(address: int, nbytes: int) -> Literal["inherit", "skip", "closed"]:
    rule: Literal["inherit", "closed"] = "inherit"  # what a forked child has of the memory
    inside = False
    with open("/proc/self/smaps", encoding="utf-8", errors="surrogateescape") as lines:
        for line in lines:
            first, _, rest = line.partition(" ")
            if not first.endswith(":"):
                start, stop = (int(bound, 16) for bound in first.split("-"))
                inside = start < address + nbytes and address < stop
            elif inside and first == "VmFlags:" and "dc" in rest.split():  # MADV_DONTFORK
                return "skip"
            elif inside and first == "VmFlags:" and "sh" in rest.split():  # MAP_SHARED
                rule = "closed"
    return rule
