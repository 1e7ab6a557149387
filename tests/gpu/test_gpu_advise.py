"""On a real GPU: ``arenapy advise`` for a trace of its memory, in a process as users have it."""

import importlib.util
import json
import subprocess
import sys

import numpy as np
import pytest

from arenapy import Pool, cuda, trace
from arenapy.commands.advise import device_worker
from arenapy.commands.replay.program import DEVICE_ALIGN, program

TIMEOUT = 150  # of a machine that runs other tests meanwhile, and imports torch for the first time
MIB = 1 << 20


def recorded(path, n):
    """A trace of a pool of the device, in which ten blocks of 1 MiB are live."""
    pool = Pool(source=cuda.Device())
    live = []
    with trace.record(pool, path):
        for i in range(n):
            live = [*live[-9:], pool.alloc(MIB + (i % 5) * 1000)]
        live.clear()
    return trace.load(path)


def test_advice_for_the_memory_of_a_gpu(gpu, tmp_path):
    """The driver waits for the device at every call, and no pool is as slow as that."""
    assert recorded(tmp_path / "a.trace", 500).kind == "Pool, device"
    line = [sys.executable, "-m", "arenapy", "advise", "a.trace", "--seconds", "20"]
    done = subprocess.run(
        [*line, "--json", "a.json"],
        cwd=tmp_path, capture_output=True, text=True, timeout=TIMEOUT, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    words = [text.split()[0] for text in done.stdout.splitlines()]
    assert words[:5] == ["use", "paste", "gain", "holds", "sure"]
    found = json.loads((tmp_path / "a.json").read_text())
    assert {"driver", "Pool()", 'Pool(rounding="class")'} <= set(found["held_bytes"])
    installed = {name for name in ("torch", "cupy", "rmm") if importlib.util.find_spec(name)}
    assert installed <= set(found["held_bytes"]), found["not_compared"]
    assert min(found["held_bytes"].values()) >= found["live_bytes"] > 10 * MIB
    assert found["use"] != "driver"


@pytest.mark.alone
@pytest.mark.parametrize("name", ["driver", "pool", "bump", "slab", "torch", "cupy", "rmm"])
def test_a_replay_gives_its_memory_back(gpu, tmp_path, name):
    """All replays are in one process, and each should find as much free memory as the others."""
    if name in ("torch", "cupy", "rmm"):
        pytest.importorskip(name)
    made = recorded(tmp_path / "a.trace", 50)
    steps = program(made)
    steps.save(tmp_path)
    streams = np.arange(50) % (1 if name == "bump" else 3)  # whose blocks leave gaps in an arena
    np.save(tmp_path / "streams.npy", streams)
    settings = {}
    if name == "bump":
        settings = {"nbytes": steps.bump_bytes(DEVICE_ALIGN)}
    elif name == "slab":
        settings = dict(zip(("item_size", "count"), steps.slab_items(), strict=True))
    device_worker.measure(name, tmp_path, 2, settings)  # loads its kernels, if it has any
    before = cuda.memory_info(0).free_bytes
    held = device_worker.measure(name, tmp_path, None, settings)["peak"]
    assert held > 10 * MIB
    device_worker.measure(name, tmp_path, 2, settings)
    assert before - cuda.memory_info(0).free_bytes < 2 * MIB
