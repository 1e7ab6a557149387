"""The benchmarks of asv_benches, found as asv finds them: of what modules have by public names."""

import importlib
import inspect
import re
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "asv_benches"
KIND = re.compile(r"(time|timeraw|mem|peakmem|track)_")


@dataclass(frozen=True)
class Benchmark:
    """What asv calls it; time, track, ...; its function; the class, or None."""

    name: str
    kind: str
    function: object
    owner: object

    def attribute(self, name, default=None):
        """asv asks the function, then the class, then the module."""
        module = inspect.getmodule(self.owner or self.function)
        for place in (self.function, self.owner, module):
            if hasattr(place, name):
                return getattr(place, name)
        return default

    @property
    def params(self):
        """Values of each parameter."""
        found = self.attribute("params", ())
        nested = found and isinstance(found[0], tuple | list)
        return tuple(map(tuple, found)) if nested else (tuple(found),) if found else ()


def of(module):
    """The benchmarks of a module, as Benchmark."""
    stem = module.__name__.partition(".")[2]
    for name, value in vars(module).items():
        if name.startswith("_"):
            continue
        if inspect.isclass(value):
            for member, function in inspect.getmembers(value, inspect.isfunction):
                if kind := KIND.match(member):
                    full = f"{stem}.{value.__name__}.{member}"
                    yield Benchmark(full, kind[1], function, value)
        elif inspect.isfunction(value) and (kind := KIND.match(name)):
            yield Benchmark(f"{stem}.{name}", kind[1], value, None)


def discover():
    """All of them."""
    for path in sorted(FOLDER.glob("*/bench_*.py")):
        yield from of(importlib.import_module(f"asv_benches.{path.parent.name}.{path.stem}"))
