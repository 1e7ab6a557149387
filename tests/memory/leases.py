"""A fork over memory that both sides see: who gets the child's bytes? The program of test_leases.

    python tests/memory/leases.py SOURCE [thorough]

Each case is a process of its own, forked from this interpreter, which has no threads: it makes an
allocator, takes a block, lets something go wrong, forks a child that keeps the block, and gives its
own back. As long as the child lives no byte of the block may be handed out again; afterwards all of
them, unless what went wrong is that nobody can know. A line is printed for each case that was run.
"""

import contextlib
import ctypes
import gc
import mmap
import os
import pathlib
import resource
import signal
import sys
import tempfile
import time
import traceback
from itertools import product
from multiprocessing import shared_memory
from multiprocessing.reduction import ForkingPickler

import mounts
import numpy as np

import arenapy
from arenapy import Bump, Existing, File, Pool, Region, Shared, Slab
from arenapy.linux import vm

NBYTES = 1 << 18  # of each allocator
ITEM = 8192  # of a block
FILE_BYTES = 1 << 20
MANY = 512  # more descriptors than a case has open
CHILDS, PARENTS = 7, 9  # what is written into a block by whoever has it

ALLOCATORS = {
    "bump": lambda source: Bump(4 * ITEM if growing(source) else NBYTES, source, NBYTES),
    "slab": lambda source: Slab(ITEM, NBYTES // ITEM, source),
    "pool": lambda source: Pool(NBYTES, source, 0 if growing(source) else NBYTES),
}


def growing(source):
    return getattr(source, "grow", False)


def file_there(directory):
    path = pathlib.Path(directory, "there")
    path.write_bytes(bytes(FILE_BYTES))
    return path


kept_open = []  # SharedMemory unmaps when it goes


def named_memory():
    memory = shared_memory.SharedMemory(create=True, size=FILE_BYTES)
    memory.unlink()
    kept_open.append(memory)
    return memory.buf


def nested(outer):
    return Existing(outer.alloc(NBYTES * 2))


class Mine:
    """A user's source of memory that a child sees too."""

    def region(self, nbytes):
        memory = mmap.mmap(-1, nbytes)
        start = np.frombuffer(memory, "u1").ctypes.data
        return Region.from_address(start, nbytes, owner=memory, fork="closed")


SOURCES = {
    "shared": lambda directory: Shared(),
    "shared grow": lambda directory: Shared(grow=True),
    "file w+": lambda directory: File(pathlib.Path(directory, "new"), "w+"),
    "file r+": lambda directory: File(file_there(directory), "r+"),
    "existing mmap": lambda directory: Existing(mmap.mmap(-1, FILE_BYTES)),
    "existing memmap": lambda directory: Existing(np.memmap(file_there(directory), mode="r+")),
    "existing named": lambda directory: Existing(named_memory()),
    "existing in shared": lambda directory: nested(Bump(1 << 20, Shared())),
    "user's": lambda directory: Mine(),
}


# What may go wrong, before the fork, in the child, and in the parent after it ------------------


def fill_table():
    """No descriptor is left for a lease."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (MANY, most))
    taken = []
    with contextlib.suppress(OSError):
        while True:
            taken.append(os.dup(0))
    return lambda: [os.close(fd) for fd in taken]


def hide_proc():
    mounts.own_mounts()
    mounts.mount("tmpfs", "/proc")


def close_all(*but):
    """As a daemon does; other files then have the numbers. Those that must stay open."""
    for fd in set(range(3, MANY)) - set(but):
        with contextlib.suppress(OSError):
            os.close(fd)
    return [os.open("/dev/null", os.O_RDWR) for _ in range(20)]


BEFORE = {"full": fill_table, "no proc": hide_proc}
#: Where leases cannot be made, or not be asked for: nothing that was in use is reused.
LOST = {"full", "no proc", "parent closes"}
TROUBLES = ["none", "child closes", *BEFORE, "parent closes"]


# What the child keeps ------------------------------------------------------------------------


def keep_array(allocator):
    array = allocator.empty(ITEM, "u1")
    return array.ctypes.data, array


def keep_slice(allocator):
    block = allocator.alloc(ITEM)
    return block.address, block[100:200]


def keep_buffer(allocator):
    """It was never exported."""
    block = allocator.alloc(ITEM)
    return block.address, block


def keep_window(allocator):
    """A Buffer of the region as another process receives it; here it is in this one."""
    block = allocator.alloc(ITEM)
    region = allocator.regions[0]
    received = ForkingPickler.loads(ForkingPickler.dumps(region))
    return block.address, received.buffer(block.address - region.address, ITEM)


KEEPS = {"array": keep_array, "slice": keep_slice, "buffer": keep_buffer, "window": keep_window}


# How the child ends --------------------------------------------------------------------------


def leave(child, go):
    os.write(go, b"x")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, "the child's bytes changed"


def kill(child, go):
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def execute(child, go):
    """It goes on as another program, which has none of its memory."""
    os.write(go, b"ey")


ENDS = {"exit": leave, "kill": kill, "exec": execute, "grandchild": leave}


def be_child(kept, trouble, end, told, tell):
    view = np.asarray(kept)
    if trouble == "child closes":
        close_all(told, tell)
    if end == "grandchild" and os.fork():
        os._exit(0)
    os.write(tell, b"x")
    if os.read(told, 1) == b"e":
        os.dup2(told, 0)
        os.dup2(tell, 1)
        os.execv("/bin/cat", ["cat"])
    os._exit(0 if (view == CHILDS).all() else 1)


# A case ----------------------------------------------------------------------------------------


def take_all(allocator):
    """All blocks that it hands out now, each overwritten."""
    blocks = []
    with contextlib.suppress(MemoryError, OSError):
        while True:
            blocks.append(allocator.alloc(ITEM))
            ctypes.memset(blocks[-1].address, PARENTS, ITEM)
    return [block.address for block in blocks]


def case(source, kind, keep, trouble, end):
    with tempfile.TemporaryDirectory() as directory:
        allocator = ALLOCATORS[kind](SOURCES[source](directory))
    address, kept = KEEPS[keep](allocator)
    ctypes.memset(address, CHILDS, ITEM)
    told, go = os.pipe()
    ready, tell = os.pipe()
    undo = BEFORE.get(trouble, lambda: None)()
    child = os.fork()
    if not child:
        os.close(go)
        be_child(kept, trouble, end, told, tell)
    os.close(tell)
    os.close(told)
    if undo is not None:
        undo()
    if end == "grandchild":
        assert os.waitpid(child, 0)[1] == 0
    assert os.read(ready, 1) == b"x"
    strangers = close_all(go, ready) if trouble == "parent closes" else []

    def meets(allocator=allocator):
        if kind == "bump":
            allocator.reset()
        if source.endswith("grow") and kind != "slab":
            allocator.trim()  # what is free gets new pages
        taken = take_all(allocator)
        return taken, any(at < address + ITEM and address < at + ITEM for at in taken)

    del kept
    gc.collect()
    taken, again = meets()
    assert not again, "the child's bytes were handed out again"
    if trouble not in LOST:
        assert len(taken) > NBYTES // ITEM // 2, f"only {len(taken)} blocks are left"
        assert allocator.stats().pending_bytes, allocator.stats()
    if end == "grandchild":
        os.write(go, b"x")
    else:
        ENDS[end](child, go)
    if end == "exec":
        assert os.read(ready, 1) == b"y"  # from the other program
    # A process that ends is seen to have ended a moment before its mappings have.
    deadline = time.monotonic() + (0 if trouble in LOST else 20)
    while not meets()[1] and time.monotonic() < deadline:
        time.sleep(0.001)
    assert meets()[1] == (trouble not in LOST), "afterwards"
    if trouble != "parent closes":  # a file whose descriptor is gone may have shrunk
        allocator.check()
    del allocator, meets
    gc.collect()
    if source != "existing memmap":  # Python's mmap closes the number that it had
        for fd in strangers:
            os.fstat(fd)  # none of them was closed


def cases(source, thorough):
    """Each allocator with each thing kept, each end and each trouble; or all of these together."""
    keeps = [keep for keep in KEEPS if keep != "window" or source.startswith("shared")]
    for kind in ALLOCATORS:
        for keep, trouble, end in product(keeps, TROUBLES, ENDS):
            usual = (keep == keeps[0]) + (trouble == "none") + (end == "exit")
            if thorough or usual >= 2:
                yield kind, keep, trouble, end


def run(source, thorough):
    gc.freeze()  # what the cases collect is their own
    for one in cases(source, thorough):
        sys.stdout.flush()
        process = os.fork()
        if not process:
            status = 0
            try:
                case(source, *one)
                print(*one)
            except mounts.Impossible as why:
                print("skipped", *one, why)
            except BaseException:
                print("in the case", source, *one, file=sys.stderr)
                traceback.print_exc()
                status = 1
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
        if os.waitpid(process, 0)[1]:
            sys.exit(1)


if __name__ == "__main__":
    assert arenapy and vm  # imported before a case hides /proc
    run(sys.argv[1], "thorough" in sys.argv)
