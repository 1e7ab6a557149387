"""The page evidence.md: the source of every test that a table of these pages links to.

A link names the test, and its file too if several have one of that name, with as much of the path
as tells them apart:

    [test](evidence.md#test_lock "test_source")
"""

import re
from pathlib import Path

DOCS = Path(__file__).parent
TESTS = DOCS.parent / "tests"
LINK = re.compile(r'evidence\.md#(\w+)(?: "([\w/]+)")?\)')
HEAD = """\
# Tests behind the claims

Tables of these pages link to tests. This page shows the source of these tests, as it is in the
repository. A test with the argument `gpu` runs only on a GPU. Most others run on every change.
Their fixtures and helpers are also in the folder `tests/`.
"""


def linked(docs=DOCS):
    """{test: its file if a link says that} of what pages lead to."""
    found = {}
    for path in sorted(docs.glob("*.md")):
        for test, file in LINK.findall(path.read_text()):
            found[test] = found.get(test) or file
    return found


def page(docs=DOCS, tests=TESTS):
    """The text; raises ValueError if a test is not there, or several have its name."""
    wanted, found = linked(docs), []
    lines = [HEAD]
    for path in sorted(tests.rglob("test_*.py")):
        name = path.relative_to(tests).as_posix()
        here = [
            test
            for test in re.findall(r"^def (test_\w+)\(", path.read_text(), re.M)
            if test in wanted and f"/{name}".endswith(f"/{wanted[test]}.py" if wanted[test] else "")
        ]
        lines += [f"## {name}\n"] * bool(here)
        for test in here:
            lines += [f"### {test}\n", f"```{{literalinclude}} ../tests/{name}"]
            lines += [f":pyobject: {test}\n```\n"]
        found += here
    if bad := [test for test in wanted if found.count(test) != 1]:
        raise ValueError(f"pages lead to tests that are not there, or not once: {sorted(bad)}")
    return "\n".join(lines)
