"""Bugs that are planted in the cores, each of which an assertion names at its first wrong step.

All are planted in one copy of the tree, which is built with assertions. An environment variable
says which of them a program has.
"""

import os
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("cuda", "commands")  # whose extension modules the programs do without
BUILD = f"""
from setuptools import Distribution
distribution = Distribution()
distribution.parse_config_files()
distribution.ext_modules = [
    module for module in distribution.ext_modules if module.name.split(".")[1] not in {FOLDERS!r}
]
command = distribution.get_command_obj("build_ext")
command.inplace = True
distribution.run_command("build_ext")
"""
PLANTED = '''
cdef extern from *:
    """
    #ifndef ARENAPY_PLANTED_H
    #define ARENAPY_PLANTED_H
    #include <stdlib.h>
    static inline int arenapy_planted(int bug) {
        const char *which = getenv("ARENAPY_PLANTED");
        return which && atoi(which) == bug;
    }
    #endif
    """
    int planted "arenapy_planted" (int bug) noexcept nogil
'''
CIMPORT = "from arenapy.base.assertion cimport "


@dataclass
class Bug:
    """One line that is wrong (`after` has `planted(BUG)`), a program, and what is said of it."""

    file: str
    before: str
    after: str
    promise: str
    program: str


BUGS = {
    "a block of a Bump ends behind the extent": Bug(
        "bump/hot_path.pxd",
        "size <= c.limit - start:",
        "size <= c.limit - start + 64 * planted(BUG):",
        "cursor <= limit",
        "a = arenapy.Bump(4096); a.alloc(4000)\n"
        "try: a.alloc(100)\n"
        "except arenapy.OutOfMemory: pass",
    ),
    "a reset leaves Buffers of the frame open": Bug(
        "bump/hot_path.pxd",
        "            c.content = frame.content = c.stamp\n",
        "            frame.content = c.stamp\n"
        "            c.content += 0 if planted(BUG) else c.stamp - c.content\n",
        "content is the content of the last frame",
        "a = arenapy.Bump(4096); a.alloc(10); a.reset()",
    ),
    "a mark counts a byte more than is live": Bug(
        "bump/core.pyx",
        "        frame.live = self.live\n",
        "        frame.live = self.live + planted(BUG)\n",
        "what was live at the last mark is",
        "a = arenapy.Bump(4096); a.alloc(10); a.mark()",
    ),
    "an item of a Slab is handed out twice": Bug(
        "slab/hot_path.pxd",
        "    group.live[top & 63] = 1\n",
        "    group.live[top & 63] = 0 if planted(BUG) else 1\n",
        "an item that is handed out is live",
        "arenapy.Slab(64, 100).alloc()",
    ),
    "a name that nobody stored is in the stack": Bug(
        "slab/hot_path.pxd",
        "    s.n = n + 1\n",
        "    s.n = n + 1 + planted(BUG)\n",
        "the item that came back last is the top of the stack",
        "arenapy.Slab(64, 100).alloc()",
    ),
    "a stack is filled with an item too far": Bug(
        "slab/core.pyx",
        "+ p.used + n - 1\n",
        "+ p.used + n - 1 + planted(BUG)\n",
        "a name lies below its part's fresh items",
        "arenapy.Slab(64, 100).alloc()",
    ),
    "a magazine takes one slot more": Bug(
        "pool/hot_path.pxd",
        "likely(n < m.depth)",
        "likely(n < m.depth + planted(BUG))",
        "n <= depth of a magazine",
        "p = arenapy.Pool(); blocks = [p.alloc(64) for _ in range(100)]; blocks.clear()",
    ),
    "a peak stays below what is live": Bug(
        "pool/hot_path.pxd",
        "    if level.slack < 0:\n",
        "    if level.slack < 0 and not planted(BUG):\n",
        "peak is the most that was live",
        "arenapy.Pool().alloc(64)",
    ),
    "a slot goes to the magazine of another step": Bug(
        "pool/hot_path.pxd",
        "    cdef Magazine* m = magazine_of(f, d.step)\n",
        "    cdef Magazine* m = magazine_of(f, d.step + planted(BUG))\n",
        "a slot goes to the magazine of its step",
        "import numpy as np\nwith arenapy.numpy_memory(arenapy.Pool()): np.empty(1)",
    ),
    "a split loses a page": Bug(
        "pool/page_heap.pyx",
        "d.page + pages, d.pages - pages, d.state)",
        "d.page + pages, d.pages - pages - planted(BUG), d.state)",
        "the parts of a cut have the pages of the whole",
        "arenapy.Pool().alloc(100_000)",
    ),
    "a merge keeps the wrong address": Bug(
        "pool/page_heap.pyx",
        "                d.address = self.descriptors[other].address\n",
        "                if not planted(BUG):\n"
        "                    d.address = self.descriptors[other].address\n",
        "the address of an extent is that of its first page",
        "p = arenapy.Pool(); a = p.alloc(100_000); b = p.alloc(100_000); c = p.alloc(100_000)\n"
        "del a; p.trim(); del b; p.trim()",
    ),
    "pages on their way are not counted": Bug(
        "pool/page_heap.pyx",
        "        self.busy_pages += pages\n",
        "        self.busy_pages += 0 if planted(BUG) else pages\n",
        "busy pages were counted",
        "arenapy.Pool().alloc(100_000)",
    ),
    "the hold of a block without bytes is empty": Bug(
        "buffer/block.pyx",
        "(root.size == 0)   # a 0-byte",
        "(root.size == 0 and not planted(BUG))   # a 0-byte",
        "a hold has bytes: start < end",
        "memoryview(arenapy.Bump(4096).alloc(0))",
    ),
    "an export ends twice": Bug(
        "buffer/block.pyx",
        "    arenapy_sub(&root_of(block).word, ONE_EXPORT)\n",
        "    arenapy_sub(&root_of(block).word, (1 + planted(BUG)) * ONE_EXPORT)\n",
        "an export that ends was counted",
        "b = arenapy.Pool().alloc(100); one, other = memoryview(b), memoryview(b)\n"
        "one.release(); other.release()",
    ),
    "the heap's lock is taken before the cache's": Bug(
        "pool/core.pyx",
        "        biased_acquire(&f.lock)\n        arenapy_spin_acquire(&self.heap_lock)\n"
        "        was_live =",
        "        if planted(BUG):\n            arenapy_spin_acquire(&self.heap_lock)\n"
        "        biased_acquire(&f.lock)\n"
        "        if not planted(BUG):\n            arenapy_spin_acquire(&self.heap_lock)\n"
        "        was_live =",
        "locks are taken in their order: none of a later rank is held",
        "arenapy.Pool(debug=True).alloc(100).release()",
    ),
    "a fork takes the children's lock before a core's": Bug(
        "memory/region.pyx",
        "    p = cores\n    while p != NULL:\n        if ASSERTS:\n",
        "    if planted(BUG):\n        children_lock()\n"
        "    p = cores\n    while p != NULL:\n        if ASSERTS:\n",
        "locks are taken in their order: none of a later rank is held",
        "import os; pool = arenapy.Pool(); child = os.fork()\n"
        "if child == 0: os._exit(0)\n"
        "assert os.waitpid(child, 0)[1] == 0",
    ),
    "the children's lock is taken twice": Bug(
        "memory/children.pyx",
        "    while link[0] != NULL and not found:\n",
        "    if planted(BUG):\n        children_lock()\n    while link[0] != NULL and not found:\n",
        "locks are taken in their order: none of the same rank is held",
        "import os; pool = arenapy.Slab(64, 4, source=arenapy.Shared())\n"
        "b = pool.alloc(); child = os.fork()\n"
        "if child == 0: os._exit(0)\n"
        "assert os.waitpid(child, 0)[1] == 0; del b",
    ),
}


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A copy of the tree with all bugs, built with assertions."""
    tree = tmp_path_factory.mktemp("planted")
    ignored = shutil.ignore_patterns("*.so", "__pycache__")
    shutil.copytree(ROOT / "arenapy", tree / "arenapy", ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    assertion = tree / "arenapy/base/assertion.pxd"
    assertion.write_text(assertion.read_text() + PLANTED)
    for number, bug in enumerate(BUGS.values(), 1):
        path = tree / "arenapy" / bug.file
        text = path.read_text()
        text = text.replace(bug.before, bug.after.replace("BUG", str(number)))
        path.write_text(text.replace(CIMPORT, f"{CIMPORT}planted\n{CIMPORT}", 1))
    environment = os.environ | {"CFLAGS": "-DARENAPY_ASSERT -O0 -w"}
    built = subprocess.run(
        [sys.executable, "-c", BUILD], cwd=tree, env=environment, capture_output=True, text=True
    )
    assert built.returncode == 0, built.stdout[-4000:] + built.stderr[-4000:]
    return tree


def run(tree, program, number):
    """A program with one bug (0: with none)."""
    environment = os.environ | {"PYTHONPATH": str(tree), "ARENAPY_PLANTED": str(number)}
    program = f"import arenapy; assert arenapy.__file__.startswith({str(tree)!r})\n{program}\n"
    return subprocess.run(
        [sys.executable, "-c", program], cwd=tree, env=environment, capture_output=True, text=True
    )


@pytest.mark.parametrize("name", BUGS)
def test_a_bug_has_one_place(name):
    bug = BUGS[name]
    assert (ROOT / "arenapy" / bug.file).read_text().count(bug.before) == 1


@pytest.mark.long
@pytest.mark.parametrize("name", BUGS)
def test_the_first_wrong_step_is_named(tree, name):
    bug = BUGS[name]
    without = run(tree, bug.program, 0)
    assert (without.returncode, without.stderr) == (0, "")
    done = run(tree, bug.program, list(BUGS).index(name) + 1)
    assert done.returncode == -signal.SIGABRT, done.stderr
    assert done.stderr.startswith(f"arenapy: broken promise: {bug.promise} (in "), done.stderr
