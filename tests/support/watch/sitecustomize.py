"""Has each Python process write down which edges of the compiled modules ran, and in which test.

`tests/redundant.py` puts this folder on PYTHONPATH, so that Python imports this file at its start.
A process that a signal ends, or that becomes another program, writes nothing.
"""

import atexit
import ctypes
import json
import os
import pickle
import tempfile

FOLDER = os.environ.get(
    "ARENAPY_EDGES"
)  # has the table of counters, and gets what processes reached


def table():
    """Path: module, offset of its counters, how many."""
    with open(os.path.join(FOLDER, "table"), encoding="utf-8") as file:
        return json.load(file)


def counters():
    """Those of the modules that are loaded: [(module, address, how many)]."""
    watched = table()
    starts = {}
    with open("/proc/self/maps", encoding="utf-8") as maps:
        for line in maps:
            path = line.split(maxsplit=5)[-1].rstrip("\n")
            if path in watched:
                starts.setdefault(path, int(line.partition("-")[0], 16))
    found = []
    for path, start in starts.items():
        module, offset, count = watched[path]
        found.append((module, start + offset, count))
    return found


def reached(places):
    return {module: ctypes.string_at(address, count) for module, address, count in places}


def write(content):
    handle, file = tempfile.mkstemp(dir=FOLDER)
    with open(handle, "wb") as out:
        pickle.dump(content, out)
    os.rename(file, f"{file}.reached")  # whole


def note():
    test = os.environ.get("PYTEST_CURRENT_TEST", "").partition("[")[0].partition(" (")[0]
    if test:
        write({test: (0, False, reached(counters()))})


def note_and_end(status, end=os._exit):
    note()
    end(status)


if FOLDER is not None:  # a test may give its child another environment
    os._exit = note_and_end  # a fork's way to end
    atexit.register(note)
