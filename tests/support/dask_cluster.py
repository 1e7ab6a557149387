"""Clusters of Dask, whose workers are processes of their own."""

import contextlib
import time

import pytest


@contextlib.contextmanager
def clusters():
    """Give what makes clusters of so many workers of one thread: `cluster(2, memory_limit=...)`."""
    distributed = pytest.importorskip("distributed")
    import dask

    with contextlib.ExitStack() as made:

        def make(workers, config=(), **options):
            made.enter_context(dask.config.set({
                "distributed.diagnostics.nvml": False,
                # It drops one of two copies, and a test may want that one.
                "distributed.scheduler.active-memory-manager.start": False,
                **dict(config),
            }))  # fmt: skip
            options = {"dashboard_address": ":0", **options}
            one = distributed.LocalCluster(n_workers=workers, threads_per_worker=1, **options)
            return made.enter_context(distributed.Client(made.enter_context(one)))

        yield make


def until(probe):
    end = time.monotonic() + 20
    while not probe():
        assert time.monotonic() < end
        time.sleep(0.05)
