"""What C callers see does not change while its number, ARENAPY_ABI, stays.

A module that cimports arenapy has the layouts of structs and classes, and the C text of locks,
compiled into it. `c_interface.txt` has a digest of these declarations for each .pxd file that
`cimport arenapy` reads, and the number that they had.
"""

import hashlib
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
RECORD = Path(__file__).with_name("c_interface.txt")
CIMPORT = re.compile(r"^(?:from (arenapy[\w.]*) cimport|cimport (arenapy[\w.]*))", re.MULTILINE)
CIMPORT_LINES = re.compile(r"^(?:from [\w.]+ )?cimport (?:\([^)]*\)|.*)$", re.MULTILINE)
HELP = """
The C declarations of {changed} are not those that were recorded for ARENAPY_ABI = {number}.

If a module that was compiled before could be wrong now (a field, a signature, the order of methods,
a lock's protocol, a module's place): raise ARENAPY_ABI and the number in `built_for_arenapy_abi_N`,
in arenapy/base/abi.pxd and abi.pyx. If it is still right (only a private name changed): do not.

Then record what is declared now: python tests/package/test_c_interface.py
"""


def path_of(module):
    path = ROOT.joinpath(*module.split("."))
    return path / "__init__.pxd" if path.is_dir() else path.with_suffix(".pxd")


def read_by_callers():
    """The .pxd files that `cimport arenapy` reads, by their path in the tree."""
    found, wanted = {}, ["arenapy"]
    while wanted:
        path = path_of(wanted.pop())
        name = str(path.relative_to(ROOT))
        if name not in found:
            found[name] = path.read_text()
            wanted += [one or other for one, other in CIMPORT.findall(found[name])]
    return found


def declarations(text):
    """A .pxd file without comments, docstrings, cimports, blanks and bodies of inline functions.

    C text is kept whole: how a lock is taken is an agreement of caller and library. A file that
    declares nothing, as the package's, is the names that it passes on.
    """
    parts = text.split('"""')
    for i, part in enumerate(parts):
        if i % 2 == 0:
            parts[i] = re.sub(r"(?:^|(?<=\s))#.*", "", part)
        elif parts[i - 1].rstrip().endswith("cdef extern from *:"):
            parts[i] = re.sub(r"/\*.*?\*/", "", part, flags=re.DOTALL)
        else:
            parts[i] = ""
    kept, body_of, header = [], None, False
    whole = "".join(parts)
    for line in (CIMPORT_LINES.sub("", whole).strip() or whole).splitlines():
        if not line.strip():
            continue
        indent = len(line) - len(line.lstrip())
        if body_of is not None and not header and indent > body_of:
            continue
        if line.lstrip().startswith("cdef inline "):
            body_of, header = indent, True
        elif not header:
            body_of = None
        header = header and not line.rstrip().endswith(":")
        kept.append(" ".join(line.split()))
    return " ".join(kept)


def digests():
    return {
        name: hashlib.sha256(declarations(text).encode()).hexdigest()[:16]
        for name, text in sorted(read_by_callers().items())
    }


def number():
    return int(re.search(r"ARENAPY_ABI = (\d+)", path_of("arenapy.base.abi").read_text())[1])


def recorded():
    first, *lines = RECORD.read_text().splitlines()
    return int(first.split()[-1]), dict(line.split() for line in lines)


def test_the_number_goes_up_when_what_c_callers_see_changes():
    was, now = recorded()[1], digests()
    changed = [name for name in sorted(was | now) if was.get(name) != now.get(name)]
    assert (number(), changed) == (recorded()[0], []), HELP.format(
        changed=", ".join(changed) or "no file", number=recorded()[0]
    )


if __name__ == "__main__":
    lines = [f"ARENAPY_ABI {number()}", *(f"{name} {digest}" for name, digest in digests().items())]
    RECORD.write_text("\n".join(lines) + "\n")
