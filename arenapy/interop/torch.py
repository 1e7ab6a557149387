"""torch with arenapy's memory: after one call, all CUDA tensors of a program come from a Pool.

Contents: torch's side, a CUDAPluggableAllocator. The C functions that it calls are in raw_blocks.

torch counts memory only for its own allocator. So this module replaces `memory_stats`, on which
torch's other functions build, by one that shows the Pool's figures.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from arenapy.interop import raw_blocks
from arenapy.interop.device_pools import by_device
from arenapy.interop.torch_batches import Collate
from arenapy.pool.pool import Pool
from arenapy.slab.slab import Slab

__all__ = ["collate", "mem_pool", "use"]

LEGACY = 1  # the legacy default stream: torch's default, for which torch uses the handle 0
OLDEST = (2, 6)

_allocator: Any = None  # torch's object for our functions


def use(*pools: Pool) -> None:
    """Let torch allocate all CUDA tensors from Pools, until the program ends.

    Call it before the first CUDA tensor is made.

    Parameters
    ----------
    *pools : Pool
        One for each device that the program uses, over ``cuda.Device(n)`` or ``cuda.DriverPool``.

    Raises
    ------
    ImportError
        If torch is missing, or has no CUDA. The message says what to install.
    TypeError, ValueError
        If an argument is not a Pool over memory of a device, or two Pools are of one device.
    RuntimeError
        If torch has already allocated, or other Pools are in use. Nothing has changed then.

    Notes
    -----
    The memory of a dropped tensor is reused at once on its stream. ``tensor.record_stream`` keeps
    it until the other stream is done. ``torch.cuda.empty_cache`` trims the Pools.
    ``torch.cuda.memory_stats`` and the functions built on it show the figures of the Pools. These
    figures differ from torch's:

    - The peaks of ``allocation``, ``active``, ``segment`` and ``inactive_split_bytes`` are the
      present values. Those of ``allocated_bytes``, ``active_bytes`` and ``reserved_bytes`` are
      real. The peak of ``reserved_bytes`` is taken when torch allocates and when it is asked for,
      so growth for another library counts only if the Pool has not shrunk since.
    - ``num_ooms`` counts the requests that did not fit since the program began. The other
      ``num_`` figures, ``requested_bytes``, ``inactive_split``, the oversize figures, the bytes
      allocated and freed in total, and the figures of torch's small and large pool are 0.
    - ``reset_accumulated_memory_stats`` does nothing.

    A request that does not fit raises ``torch.OutOfMemoryError`` with the Pool's figures. Tensors
    that are made in ``torch.cuda.graph`` belong to the graph. Its argument ``pool=`` is ignored.

    Thread-safety: torch's threads allocate and free without the GIL. A Pool with a recorder,
    ``trim_after=`` or ``debug=True`` takes the GIL for each tensor.

    Examples
    --------
    >>> import arenapy                                                     # doctest: +SKIP
    >>> from arenapy import cuda
    >>> from arenapy.interop import torch as arenapy_torch
    >>> arenapy_torch.use(arenapy.Pool(source=cuda.Device()))              # doctest: +SKIP
    """
    pools_of = by_device(pools)
    if raw_blocks.pools_in_use() == pools_of and _in_use():
        return
    torch = _torch()
    _serve(torch, pools_of)
    try:
        torch.cuda.memory.change_current_allocator(_allocator)
    except RuntimeError as error:
        raw_blocks.withdraw(pools_of)
        raise RuntimeError(
            "torch has already allocated CUDA memory, and cannot change its allocator any more: "
            "call use() before the first CUDA tensor is made"
        ) from error
    torch._C._cuda_memoryStats = _memory_stats
    torch._C._cuda_resetPeakMemoryStats = _reset_peak
    torch._C._cuda_resetAccumulatedMemoryStats = _keep_totals


def mem_pool(pool: Pool) -> Any:
    """Let torch's own allocator take its memory from a Pool, within a scope.

    Parameters
    ----------
    pool : Pool
        Over memory of a device. It lives until the program ends.

    Returns
    -------
    torch.cuda.MemPool
        For ``with torch.cuda.use_mem_pool(...)``. torch takes segments of 2 MiB, 20 MiB or more
        from the Pool, and returns them when the MemPool is gone.

    Raises
    ------
    ImportError, TypeError, ValueError, RuntimeError
        As :func:`use`.

    Examples
    --------
    >>> scope = arenapy_torch.mem_pool(pool)                               # doctest: +SKIP
    >>> with torch.cuda.use_mem_pool(scope):                               # doctest: +SKIP
    ...     x = torch.zeros(1000, device="cuda")
    """
    pools_of = by_device((pool,))
    torch = _torch()
    if _in_use():
        raise RuntimeError(
            "torch already allocates all its memory from Pools, because use() was called; leave "
            "mem_pool() out"
        )
    if raw_blocks.pools_in_use() != pools_of:
        _serve(torch, pools_of)
    return torch.cuda.MemPool(_allocator.allocator())


def collate(slab: Slab) -> Callable[[Sequence[Any]], Any]:
    """Let the workers of a DataLoader write batches into a Slab, and read them there.

    Parameters
    ----------
    slab : Slab
        Over ``arenapy.Shared()``. An item has room for a batch, 64 bytes, and up to 64 bytes more
        for each tensor. Give it ``num_workers * prefetch_factor`` items, and one for each batch
        that the program keeps. All free items are taken.

    Returns
    -------
    callable
        For ``DataLoader(collate_fn=...)``, without ``pin_memory=``. It makes the batches that
        torch's ``default_collate`` makes. The same one may serve several DataLoaders, and a
        function of yours that calls it.

    Raises
    ------
    ImportError
        If torch is missing or too old. The message says what to install.
    TypeError, ValueError
        If `slab` is not a Slab over ``Shared()``, or has no free item.

    Notes
    -----
    A worker copies each sample into the item. The tensors of the batch lie there: nothing is copied
    again. If torch has CUDA, the items are pinned, so copies to a device run at full speed, and
    beside the program with ``non_blocking=True``. An item is free again when the last tensor of its
    batch is gone, in the program and in the worker, and the current stream has done its work. If
    another stream copies from a batch, let the current stream wait for it before you drop the
    batch.

    A batch that does not fit raises ValueError. If all items are in use for a second, the batch is
    copied as torch does it, and a RuntimeWarning says so once in each worker. The items of a worker
    that was killed go to the next worker that finds no other one.

    Thread-safety: any thread may read and drop batches.

    Examples
    --------
    >>> slab = arenapy.Slab(64 << 20, 12, arenapy.Shared())                # doctest: +SKIP
    >>> loader = torch.utils.data.DataLoader(                              # doctest: +SKIP
    ...     dataset, batch_size=64, num_workers=4,
    ...     collate_fn=arenapy_torch.collate(slab))
    """
    return Collate(_torch(cuda=False), slab)


def _torch(cuda: bool = True) -> Any:
    try:
        import torch
    except ImportError as error:
        raise ImportError(
            "arenapy.interop.torch needs torch, which is not installed: pip install torch"
        ) from error
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if version < OLDEST:
        raise ImportError(
            f"torch {torch.__version__} is older than {'.'.join(map(str, OLDEST))}, the oldest "
            "that arenapy.interop.torch supports: pip install --upgrade torch"
        )
    if cuda and not torch.backends.cuda.is_built():
        raise ImportError(
            f"torch {torch.__version__} was built without CUDA; install a torch that has CUDA"
        )
    return torch


def _in_use() -> bool:
    import sys

    torch = sys.modules.get("torch")
    return torch is not None and torch._C._cuda_memoryStats is _memory_stats


def _serve(torch: Any, pools_of: dict[int, Pool]) -> None:
    global _allocator
    if others := raw_blocks.pools_in_use():
        raise RuntimeError(
            f"torch already allocates from {list(others.values())}, and a program has one Pool for "
            "each device; pass all of them to the first call"
        )
    if _allocator is None:
        _allocator = _plug(torch)

    def named(device: int, handle: int) -> Any:
        # An object keeps its stream alive. A number does not.
        if handle in (0, LEGACY):
            return LEGACY
        current = torch.cuda.current_stream(device)
        return current if current.cuda_stream == handle else handle

    raw_blocks.serve(pools_of, named)


def _plug(torch: Any) -> Any:
    """torch's allocator object, which calls the functions of raw_blocks."""
    library = raw_blocks.__file__
    lib = Path(torch.__file__).parent / "lib"
    plugged = torch.cuda.memory.CUDAPluggableAllocator(
        library, "arenapy_interop_alloc", "arenapy_interop_free"
    )
    if not raw_blocks.raise_as_torch(str(lib / "libc10.so"), str(lib / "libc10_cuda.so")):
        raise ImportError(
            f"torch {torch.__version__} does not have the function that raises its errors; use an "
            "older torch, and report this to the developers of arenapy"
        )
    inner = plugged.allocator()
    for setter, function in {
        "set_record_stream_fn": "record_stream",
        "set_reset_fn": "trim",
        "set_begin_allocate_to_pool": "capture_begins",
        "set_end_allocate_to_pool_fn": "capture_ends",
    }.items():
        getattr(inner, setter)(raw_blocks.address(function))
    return plugged


# ---- torch's figures ------------------------------------------------------------------------


def _memory_stats(device: int) -> dict[str, Any]:
    pool = raw_blocks.pools_in_use().get(device)
    figures: dict[str, Any] = {}
    stats = pool.stats() if pool is not None else None
    most_reserved, refusals = raw_blocks.counts(device)

    def stat(current: int = 0, peak: int = 0, allocated: int = 0, freed: int = 0) -> dict[str, Any]:
        none = dict.fromkeys(("current", "peak", "allocated", "freed"), 0)
        every = {"current": current, "peak": peak, "allocated": allocated, "freed": freed}
        return {"all": every, "small_pool": none, "large_pool": dict(none)}

    if stats is None:
        live = blocks = total = peak = reserved = idle = regions = 0
    else:
        live, peak = stats.allocated_bytes, stats.peak_bytes
        blocks, total = stats.active_allocations, stats.total_allocations
        reserved, idle, regions = stats.reserved_bytes, stats.idle_bytes, stats.regions
        live += stats.pending_bytes
    figures["allocation"] = stat(blocks, blocks, total, total - blocks)
    figures["allocated_bytes"] = figures["active_bytes"] = stat(live, max(peak, live))
    figures["active"] = figures["allocation"]
    figures["reserved_bytes"] = stat(reserved, max(most_reserved, reserved))
    figures["inactive_split_bytes"] = stat(idle, idle)
    figures["segment"] = stat(regions, regions)
    figures["inactive_split"] = figures["requested_bytes"] = stat()
    for name in ("num_alloc_retries", "num_ooms", "num_sync_all_streams", "num_device_alloc",
                 "num_device_free"):  # fmt: skip
        figures[name] = 0
    figures["num_ooms"] = refusals
    figures["max_split_size"] = -1
    for name in ("oversize_allocations", "oversize_segments"):
        figures[name] = stat()["all"]
    return figures


def _reset_peak(device: int) -> None:
    pool = raw_blocks.pools_in_use().get(device)
    if pool is not None:
        pool.reset_peak()
    raw_blocks.restart_peak(device)


def _keep_totals(device: int) -> None:
    """Do nothing: a Pool counts from its beginning."""
