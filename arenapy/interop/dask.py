"""Dask with arenapy's memory: one line gives every worker of a cluster a Pool.

What lives here: the places of a worker that the Pool has to reach. What does not: NumPy's handler
(numpy_handler), and the Pool.

A task runs in a copy of the context of the worker's coroutine `execute`. Neither the context in
which a plugin is set up nor that of the thread matters, so the coroutine is decorated. Threads in
which no such copy runs (actors', and those that tasks start) get the handler as they start.
"""

from __future__ import annotations

import contextvars
import logging
import sys
import weakref
from contextlib import suppress
from functools import partial
from types import ModuleType
from typing import Any, ClassVar

from arenapy.cuda import Device
from arenapy.cuda.driver import device_count
from arenapy.cuda.errors import Unavailable
from arenapy.memory.sources import Source
from arenapy.numpy_handler.numpy_memory import numpy_memory
from arenapy.pool.pool import Pool

try:
    from distributed import WorkerPlugin
except ImportError:
    WorkerPlugin = object

__all__ = ["ArenaPlugin"]

logger = logging.getLogger(__name__)

PREFIX = "pool_"  # of the metrics
ROOM = 32  # of this part of the limit
OF_NANNY = 0.85  # of a nanny's limit: a nanny looks at other times than the worker does
# The dashboard adds those of all workers up, so no rates.
FIGURES = ("allocated_bytes", "idle_bytes", "reserved_bytes", "peak_bytes")


class ArenaPlugin(WorkerPlugin):  # type: ignore[misc]
    """Give every worker a Pool for the arrays of its tasks and the arrays that it receives.

    Register it with ``Client.register_plugin``. Existing workers get their Pool at that time. New
    and restarted workers get it when they start.

    Parameters
    ----------
    max_bytes : int, optional
        The limit of each worker's Pool. Requests beyond it are served by libc. By default there is
        only the worker's own limit, at which the Pool returns idle memory.
    source : Source, optional
        The source of host memory for each Pool. It is pickled. By default ``arenapy.Host()``.
    trim_after : float, optional
        Seconds after which unused memory is returned, as in :class:`arenapy.Pool`.
    device : Source or bool, optional
        Whether each worker also has a Pool of device memory. It serves the arrays of CuPy, and RMM
        if that is installed: cuDF, and the arrays of CuPy that arrive from other workers, use RMM's
        memory. By default (True) a worker that sees exactly one CUDA device gets this Pool with the
        first task after CuPy was imported. A worker that does not import CuPy makes no CUDA
        context. An allocator or a resource that the program gave to CuPy or RMM before stays. A
        source, such as ``arenapy.cuda.Device(grow=True)``, is pickled. Its Pool is made at once,
        and takes the place of what the program gave. False: no such Pool.

    Attributes
    ----------
    pool : arenapy.Pool
        The Pool of this worker: ``get_worker().plugins["arenapy"].pool``.
    device_pool : arenapy.Pool or None
        The Pool of device memory of this worker.
    trimmed_bytes : int
        Bytes that the Pool returned because the worker was above its memory limit.

    Raises
    ------
    ImportError
        If distributed is missing or too old. The message says what to install.
    TypeError, ValueError, BufferError
        As from :class:`arenapy.Pool` and :class:`arenapy.numpy_memory`, before anything is sent to
        a worker.
    RuntimeError
        From ``register_plugin``, if two workers are in one process. One of them has its Pool then.

    Notes
    -----
    A worker compares its memory with the limits at which it spills, pauses or resumes. Before each
    comparison, the Pool returns the idle memory above the lowest of these limits. 85 % of the limit
    at which a nanny ends the worker counts as one of them.

    The metrics of a worker include ``pool_allocated_bytes``, ``pool_idle_bytes``,
    ``pool_reserved_bytes``, ``pool_peak_bytes``, ``pool_trimmed_bytes`` and ``pool_system_bytes``
    (served by libc). With a Pool of device memory, they also include
    ``pool_device_allocated_bytes``, ``pool_device_idle_bytes`` and so on. Dask's dashboard shows
    them on the page of its workers.

    Thread-safety: a worker calls it in the thread of its event loop.

    Examples
    --------
    >>> from distributed import Client                                     # doctest: +SKIP
    >>> from arenapy.interop.dask import ArenaPlugin
    >>> client = Client()                                                  # doctest: +SKIP
    >>> client.register_plugin(ArenaPlugin())                              # doctest: +SKIP
    """

    name = "arenapy"  # one for each worker: a second one takes the place of the first
    _of_process: ArenaPlugin | None = None
    # Threads that began under an earlier plugin keep its Pool, and nobody else trims that.
    _pools: ClassVar[weakref.WeakSet[Pool]] = weakref.WeakSet()

    pool: Pool
    device_pool: Pool | None = None
    trimmed_bytes: int

    def __init__(
        self,
        max_bytes: int | None = None,
        source: Source | None = None,
        trim_after: float | None = None,
        device: Source | bool = True,
    ) -> None:
        _tcp()
        self._options: dict[str, Any] = {
            "max_bytes": max_bytes,
            "source": source,
            "trim_after": trim_after,
        }
        if not (isinstance(device, bool) or callable(getattr(device, "region", None))):
            raise TypeError(
                f"device={device!r} is neither a source nor a bool; give arenapy.cuda.Device(), or "
                "leave it out"
            )
        self._device = device
        numpy_memory(Pool(**self._options))

    def setup(self, worker: Any) -> None:
        """Give the worker its Pool; distributed calls it."""
        tcp = _tcp()
        if ArenaPlugin._of_process is not None:
            raise RuntimeError(
                "another worker in this process has an ArenaPlugin, and they would share their "
                "memory; give each worker a process: LocalCluster(processes=True)"
            )
        from distributed.protocol import utils

        self.pool = Pool(**self._options)
        self._pools.add(self.pool)
        self.trimmed_bytes = 0
        self._memory = numpy_memory(self.pool, threads=True)
        self._rss = worker.monitor.get_process_memory
        self._limit = _lowest_limit(worker.memory_manager)
        # Its own, since a plugin is set up in another context than it is torn down in.
        self._context = contextvars.copy_context()
        self._context.run(self._memory.install)
        ArenaPlugin._of_process = self
        self._replaced: list[tuple[Any, str, Any, Any]] = []
        self._served: list[str] = []  # metrics
        self._looks_for_device = self._device is True
        self._of_device: list[tuple[Any, Any, Any, Any]] = []  # what libraries allocate from
        try:
            execute = self._memory(worker.execute)
            self._replace(worker, "execute", partial(self._execute, worker, execute))
            self._replace(worker.monitor, "get_process_memory", self._trimmed)
            for module in (tcp, utils):
                self._replace(module, "host_array", self._memory(module.host_array))
            self._show(worker, self._metrics())
            if not isinstance(self._device, bool):
                self._serve_device(worker, self._device)
        except BaseException:
            self.teardown(worker)
            raise

    def teardown(self, worker: Any) -> None:
        """Take it back. Arrays stay valid, and tasks and actors that run go on with the Pool."""
        if ArenaPlugin._of_process is not self:
            return
        for place, name, before, ours in self._replaced:
            if vars(place).get(name) is not ours:
                continue  # somebody else has replaced it since, and calls ours or does not
            if before is None:
                delattr(place, name)
            else:
                setattr(place, name, before)
        ArenaPlugin._of_process = None
        self._looks_for_device = False
        self._context.run(self._memory.uninstall)
        if self._served:
            kept = {name: one for name, one in worker.metrics.items() if name not in self._served}
            worker.metrics = kept
        self._return_device()
        self.pool.trim()

    def _return_device(self) -> None:
        self.device_pool = None
        for read, write, before, ours in self._of_device:
            if read() is ours:
                write(before)

    def _replace(self, place: Any, name: str, ours: Any) -> None:
        """Ours instead of what an object has there, or its class."""
        self._replaced.append((place, name, vars(place).get(name), ours))
        setattr(place, name, ours)

    def _show(self, worker: Any, metrics: dict[str, Any]) -> None:
        # A new dict: a heartbeat may be amid the old one, and would end the worker.
        worker.metrics = {**worker.metrics, **{PREFIX + name: one for name, one in metrics.items()}}
        self._served.extend(PREFIX + name for name in metrics)

    def _execute(self, worker: Any, execute: Any, *args: Any, **kwargs: Any) -> Any:
        """The worker's own, for a task; and the Pool of device memory, once CuPy is imported."""
        cupy = sys.modules.get("cupy")
        # A thread may be importing it, and a module of another class may be one that imports it
        # when it is asked for something. The worker's event loop must do neither.
        if (
            self._looks_for_device
            and type(cupy) is ModuleType
            and not getattr(cupy.__spec__, "_initializing", False)
        ):
            self._looks_for_device = False
            try:
                if _takes_a_pool(cupy):
                    self._serve_device(worker, Device())
            except Exception:
                logger.exception("The worker goes on without a Pool of device memory.")
                with suppress(Exception):
                    self._return_device()
        return execute(*args, **kwargs)

    def _serve_device(self, worker: Any, source: Source) -> None:
        from arenapy.interop import cupy as arenapy_cupy
        from arenapy.interop import rmm as arenapy_rmm
        from arenapy.interop.device_pools import by_device, library

        pool = Pool(source=source)
        (ordinal,) = by_device((pool,))
        cupy = library("cupy", arenapy_cupy.OLDEST)
        allocator = arenapy_cupy.allocator(pool)
        self._serve(cupy.cuda.get_allocator, cupy.cuda.set_allocator, allocator)
        self._serve(
            lambda: cupy._default_memory_pool,
            lambda one: setattr(cupy, "_default_memory_pool", one),
            allocator,
        )
        with suppress(ImportError):  # RMM is missing or too old, and arrays of CuPy do without it
            resource = arenapy_rmm.resource(pool)
            mr = library("rmm", arenapy_rmm.OLDEST).mr
            read = partial(mr.get_per_device_resource, ordinal)
            if self._device is not True or type(read()) is mr.CudaMemoryResource:
                self._serve(read, partial(mr.set_per_device_resource, ordinal), resource)
        self.device_pool = pool
        figures: dict[str, Any] = {
            f"device_{name}": lambda worker, name=name: getattr(pool.stats(), name)
            for name in FIGURES
        }
        self._show(worker, figures)

    def _serve(self, read: Any, write: Any, ours: Any) -> None:
        self._of_device.append((read, write, read(), ours))
        write(ours)

    def __getstate__(self) -> dict[str, Any]:
        return {"_options": self._options, "_device": self._device}

    def _trimmed(self) -> int:
        """The memory of the process, after the Pool has given back what it can of an excess."""
        rss: int = self._rss()
        if self._limit is not None and rss > self._limit:
            # Somewhat more, since spilling goes on while a single page is too much.
            excess = rss - self._limit + self._limit // ROOM
            given_back = 0
            for pool in self._pools:
                if pool is not self.pool:
                    with suppress(ValueError):  # a forked child's, or closed
                        given_back += pool.trim()
            keep = self.pool.stats().idle_bytes - max(0, excess - given_back)
            given_back += self.pool.trim(max(0, keep))
            if given_back:
                self.trimmed_bytes += given_back
                rss = self._rss()
        return rss

    def _metrics(self) -> dict[str, Any]:
        found = self.pool.stats()

        def figure(name: str) -> int:
            """Of one look at the Pool for each heartbeat, which asks for these in this order."""
            nonlocal found
            if name == FIGURES[0]:
                found = self.pool.stats()
            return int(getattr(found, name))

        figures: dict[str, Any] = {name: lambda worker, name=name: figure(name) for name in FIGURES}
        figures["trimmed_bytes"] = lambda worker: self.trimmed_bytes
        figures["system_bytes"] = lambda worker: self._memory.stats().system_bytes
        return figures


def _tcp() -> Any:
    """distributed's module that receives frames."""
    try:
        import distributed
        from distributed.comm import tcp
    except ImportError as error:
        raise ImportError(
            "arenapy.interop.dask needs distributed, which is not installed: "
            "pip install 'arenapy-memory[dask]'"
        ) from error
    if not hasattr(tcp, "host_array"):
        raise ImportError(
            f"distributed {distributed.__version__} is older than arenapy.interop.dask supports: "
            "pip install --upgrade 'arenapy-memory[dask]'"
        )
    return tcp


def _takes_a_pool(cupy: Any) -> bool:
    """Whether the process sees one CUDA device, and CuPy allocates as it does by default."""
    try:
        count = device_count()
    except Unavailable:
        return False
    return count == 1 and cupy.cuda.get_allocator() == cupy.get_default_memory_pool().malloc


def _lowest_limit(manager: Any) -> int | None:
    """The bytes above which idle memory is to be returned; None: it never is."""
    import dask

    names = ("target", "spill", "pause")
    fractions = [getattr(manager, f"memory_{name}_fraction") for name in names]
    # A nanny compares, too, and asks nobody before.
    fractions.append(OF_NANNY * (dask.config.get("distributed.worker.memory.terminate") or 0))
    lowest = min((fraction for fraction in fractions if fraction), default=None)
    return int(lowest * manager.memory_limit) if lowest and manager.memory_limit else None
