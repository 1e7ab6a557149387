"""On a real GPU: ``arenapy advise`` for a trace of its memory, in processes as users have them."""

import json
import subprocess
import sys

from arenapy import Pool, cuda, trace

TIMEOUT = 300
MIB = 1 << 20


def test_advice_for_the_memory_of_a_gpu(gpu, tmp_path):
    """The driver waits for the device at every call, and no pool is as slow as that."""
    pool = Pool(source=cuda.Device())
    live = []
    with trace.record(pool, tmp_path / "a.trace"):
        for i in range(500):
            live = [*live[-9:], pool.alloc(MIB + (i % 5) * 1000)]
        live.clear()
    assert trace.load(tmp_path / "a.trace").kind == "Pool, device"
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
    assert min(found["held_bytes"].values()) >= found["live_bytes"] > 10 * MIB
    assert found["use"] != "driver"
