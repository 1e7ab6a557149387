"""Code that the modules of the libraries share: the checks of their Pools, and the import."""

import importlib
from typing import Any

from arenapy.cuda.ordering import memory_of
from arenapy.interop import raw_blocks
from arenapy.pool.pool import Pool

# Packages instead of an extra of arenapy: the wheels are made for one version of CUDA, and an extra
# cannot know which one the user has.
INSTALL = {
    "cupy": "pip install cupy-cuda13x, or cupy-cuda12x",
    "numba_cuda": "pip install 'numba-cuda[cu13]', or 'numba-cuda[cu12]'",
    "rmm": "pip install rmm-cu13, or rmm-cu12",
}


def by_device(pools: tuple[Any, ...]) -> dict[int, Pool]:
    """Pools by the ordinal of their device. TypeError or ValueError: not one for each device."""
    found: dict[int, Pool] = {}
    if not pools:
        raise TypeError("no pool was given; give one for each device that the program uses")
    for pool in pools:
        if not isinstance(pool, Pool):
            raise TypeError(
                f"{pool!r} is not a Pool; give arenapy.Pool(source=arenapy.cuda.Device())"
            )
        # Of managed memory, whose kind the host sees, no stream has the blocks.
        if pool.kind != "device":
            raise ValueError(
                f"{pool!r} is over {pool.kind} memory, and memory of a device is needed; give "
                "arenapy.Pool(source=arenapy.cuda.Device())"
            )
        if not memory_of(pool)[1]:
            raise ValueError(
                f"{pool!r} is over a source of your own, whose blocks streams do not order; give "
                "arenapy.Pool(source=arenapy.cuda.Device())"
            )
        device = raw_blocks.device_of(pool)
        if device in found:
            raise ValueError(f"two pools are given for device {device}; give one for each device")
        found[device] = pool
    return found


def library(name: str, oldest: tuple[int, int]) -> Any:
    """The module. ImportError if it is missing or too old."""
    install = INSTALL[name]
    ours = f"arenapy.interop.{name.partition('_')[0]}"
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        raise ImportError(f"{ours} needs {name}, which is not installed: {install}") from error
    version = getattr(module, "__version__", "0")
    if tuple(int(part) for part in version.split(".")[:2]) < oldest:
        raise ImportError(
            f"{name} {version} is older than {'.'.join(map(str, oldest))}, the oldest that {ours} "
            f"supports: {install}"
        )
    return module
