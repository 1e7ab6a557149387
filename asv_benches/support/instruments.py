"""arenapy.testing.asv of this checkout, whichever arenapy is measured.

The benchmarks of one commit measure many: an older arenapy has no such module, or another one, and
figures are compared only if they were counted alike. So it is loaded by its path, which needs
nothing but what it imports.
"""

import importlib.util
from pathlib import Path

PATH = Path(__file__).resolve().parents[2] / "arenapy" / "testing" / "asv.py"


def _load():
    spec = importlib.util.spec_from_file_location("asv_benches._instruments", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_module = _load()
page_faults = _module.page_faults
