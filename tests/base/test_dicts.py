"""Dicts that threads change, without a GIL, where a race shows itself too seldom for a test."""

import re
from pathlib import Path

import arenapy

PACKAGE = Path(arenapy.__file__).parent
DECLARED = re.compile(r"(?:cdef (?:readonly |public )?dict |[(,] ?dict )(\w+)")
# By module: dicts that no thread changes, or one alone, or whose values stay.
NEVER_FREED = {
    ("base/sealed.pyx", "hows"),
    ("buffer/dlpack.pyx", "CODES"),
    ("buffer/dlpack.pyx", "DEVICES"),
    ("cuda/driver.pyx", "found"),
    ("cuda/foreign.pyx", "KINDS"),
    ("cuda/foreign.pyx", "LETTERS"),
    ("cuda/stream_ref.pyx", "kept"),
}


def test_values_of_typed_dicts_are_not_borrowed():
    """Cython's `get` of a typed dict borrows: see base/dicts.pxd, which has the way to do it."""
    borrowing = set()
    for path in PACKAGE.rglob("*.pyx"):
        text, header = path.read_text(), path.with_suffix(".pxd")
        declared = text + (header.read_text() if header.exists() else "")
        for name in set(DECLARED.findall(declared)):
            if re.search(rf"\b{name}\.get\(", text):
                borrowing.add((path.relative_to(PACKAGE).as_posix(), name))
    assert borrowing == NEVER_FREED
