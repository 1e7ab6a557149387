"""The cost of `import arenapy` for a program that has NumPy already, and how much it brings.

Each in an interpreter of its own, which has done what the import needs beforehand where that is
not the question: NumPy is imported first, since nobody allocates arrays without it.

What this does not show: the first import after an installation, which compiles to bytecode.
"""

import subprocess
import sys

from asv_benches.support.rounds import named

MODULES = ("arenapy", "arenapy.cuda", "numpy", "pyarrow", "pandas")
COUNT = """
import importlib, sys, time
{before}
first, start = set(sys.modules), time.perf_counter()
importlib.import_module({module!r})
print(time.perf_counter() - start, len(set(sys.modules) - first))
"""


def imported(module):
    """Seconds and modules; None: it is not there."""
    before = "pass" if module == "numpy" else "import numpy"
    code = COUNT.format(module=module, before=before)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    if done.returncode:
        return None
    seconds, modules = done.stdout.split()
    return float(seconds), int(modules)


class Import:
    """asv: the least of some interpreters."""

    params = MODULES
    param_names = ("module",)
    timeout = 120

    def setup(self, module):
        """Skip what is not there; what is, is then in the cache of files."""
        self.found = imported(module)
        if self.found is None:
            raise NotImplementedError(f"{module} cannot be imported here")

    @named("Import time when NumPy is already imported", "ms")
    def track_seconds(self, module):
        """The least of seven."""
        return min(imported(module)[0] for _ in range(7)) * 1e3

    @named("Number of modules that an import loads", "modules")
    def track_modules(self, module):
        """Of one."""
        return self.found[1]
