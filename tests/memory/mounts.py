"""File systems of one's own: what this process mounts, no other process sees."""

import ctypes

NEW_USER, NEW_MOUNTS = 0x10000000, 0x20000  # of unshare(2)
PRIVATE, RECURSIVE = 1 << 18, 1 << 14  # of mount(2)

libc = ctypes.CDLL(None, use_errno=True)


class Impossible(Exception):
    """This machine does not let us."""


def own_mounts():
    """From here on, mount for this process and its children only. It must have one thread."""
    if libc.unshare(NEW_MOUNTS) and libc.unshare(NEW_USER | NEW_MOUNTS):
        raise Impossible("no mount namespace")
    if libc.mount(b"none", b"/", None, PRIVATE | RECURSIVE, None):
        raise Impossible("mounts are not ours to change")


def mount(kind, at, options=""):
    """Mount a file system that has no device."""
    if libc.mount(b"none", str(at).encode(), kind.encode(), 0, options.encode()):
        raise Impossible(f"{kind} cannot be mounted")
