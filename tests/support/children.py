"""Forked children of a test: one that makes a call and ends, one that only sees what there is."""

import contextlib
import os
import signal


def in_child(call):
    """The exit status of a forked child that makes this call: 0, 1 if it failed, or -signal.

    It failed if it raised, or gave False.
    """
    child = os.fork()
    if not child:
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)
        with contextlib.suppress(BaseException):
            os._exit(call() is False)
        os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@contextlib.contextmanager
def another_process():
    """One that sees all that was there when it was forked, until the end of the block."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.close(write)
        os.read(read, 1)
        os._exit(0)
    os.close(read)
    try:
        yield
    finally:
        os.close(write)
        os.waitpid(child, 0)
