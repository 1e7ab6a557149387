"""Forks over memory that parent and child both see: the child's bytes are its own until it ends."""

import subprocess
import sys
from pathlib import Path

import leases
import pytest
from hypothesis import settings

pytestmark = pytest.mark.sampled

PROGRAM = Path(__file__).with_name("leases.py")


@pytest.mark.parametrize("source", leases.SOURCES)
def test_a_childs_bytes_are_not_reused_until_it_ends(source):
    thorough = settings().max_examples > 1000
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", PROGRAM, source, *["thorough"] * thorough],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    ran = done.stdout.splitlines()
    assert len(ran) == len(list(leases.cases(source, thorough)))
    assert all("no proc" in line for line in ran if line.startswith("skipped")), ran


@pytest.mark.parametrize("source", leases.SOURCES)
def test_a_region_that_a_child_views_without_an_allocator(source, run_script, tmp_path):
    """An allocator that the parent puts over it later hands none of it out until the child ends."""
    run_script(f"""
        import os, sys
        sys.path.insert(0, {str(PROGRAM.parent)!r})
        import leases, numpy as np
        from types import SimpleNamespace
        from arenapy import Bump

        region = leases.SOURCES[{source!r}]({str(tmp_path)!r}).region(leases.NBYTES)
        view = np.asarray(region.buffer())
        view[:] = leases.CHILDS
        told, tell = os.pipe()
        child = os.fork()
        if not child:
            os.read(told, 1)
            os._exit(0 if (view == leases.CHILDS).all() else 1)
        del view
        arena = Bump(leases.NBYTES, SimpleNamespace(region=lambda nbytes: region))
        arena.check()
        assert leases.take_all(arena) == []
        os.write(tell, b"x")
        assert os.waitpid(child, 0)[1] == 0, "the child's bytes changed"
        arena.check()
        assert len(leases.take_all(arena)) == leases.NBYTES // leases.ITEM
        os._exit(0)  # SharedMemory complains of who views it at exit
    """)
