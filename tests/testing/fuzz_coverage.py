"""Fuzz the allocators, led by coverage of their C code, under ASan and UBSan.

    python tests/testing/fuzz_coverage.py                    # every target, a minute each
    python tests/testing/fuzz_coverage.py pool --seconds 600
    python tests/testing/fuzz_coverage.py --minimize         # the corpus, after it has grown
    python tests/testing/fuzz_coverage.py --by-chance        # what guidance is compared with

Builds the extension modules with clang first, into build/guided, and there only what has changed.
Needs clang and atheris. What reaches new edges is added to tests/testing/corpus, or
to what --corpus says.
The status is 1 if something was found, or if fewer edges were reached than the corpus of the
repository reaches by itself (FLOORS): a run that does nothing does not pass.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

from fuzz_targets import MACHINES

from arenapy.testing.guided import by_chance, guided, minimize

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
BUILD = ROOT / "build" / "guided"
# Cython adds 0 to a NULL, for keywords that are not there, which pointer-overflow objects to.
SANITIZE = (
    "-fsanitize=address,undefined,fuzzer-no-link -fno-sanitize=pointer-overflow "
    "-fno-sanitize-recover=undefined -fno-omit-frame-pointer"
)
#: Edges that the corpus alone reaches, less some that are a matter of luck.
FLOORS = {"bump": 2150, "slab": 1640, "pool": 2800, "buffer": 3100, "numpy": 1930}


def build():
    """The folder of the instrumented package."""
    compiler = os.environ.get("CC", "clang")
    environment = {
        **os.environ,
        "CC": compiler,
        "LDSHARED": f"{compiler.split()[-1]} -shared",
        "CFLAGS": f"{SANITIZE} -g1 -O0 -w",
        "LDFLAGS": SANITIZE,
    }
    command = [sys.executable, "-c", "from setuptools import setup; setup()", "-q", "build"]
    command += ["--build-lib", str(BUILD / "lib"), "--build-temp", str(BUILD / "temp")]
    BUILD.mkdir(parents=True, exist_ok=True)
    with open(BUILD / "log", "w", encoding="utf-8") as log:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT, check=False
        )
    if done.returncode:
        sys.exit((BUILD / "log").read_text()[-4000:])
    return BUILD / "lib"


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("targets", nargs="*", choices=[*MACHINES, []], metavar="TARGET")
    parser.add_argument("--seconds", type=float, default=60, help="of each target (60)")
    parser.add_argument("--corpus", type=Path, default=HERE / "corpus", help="tests/testing/corpus")
    parser.add_argument("--minimize", action="store_true", help="the corpus, and no more")
    parser.add_argument("--by-chance", action="store_true", help="programs that nothing leads")
    parser.add_argument("--seed", type=int, default=0, help="of libFuzzer")
    parser.add_argument("--verbose", action="store_true", help="what libFuzzer prints")
    parser.add_argument("--built", type=Path, metavar="DIR", help="with the package: do not build")
    options = parser.parse_args()
    built = options.built or build()
    path = [str(built), str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(path)
    status = 0
    for name in options.targets or MACHINES:
        machine = f"fuzz_targets:{MACHINES[name].__name__}"
        corpus = options.corpus / name
        if options.minimize:
            found = minimize(machine, corpus)
        elif options.by_chance:
            found = by_chance(machine, seconds=options.seconds)
        else:
            found = guided(machine, corpus, seconds=options.seconds, seed=options.seed)
        if options.verbose or found.lines:
            print(found.output)
        print(f"--- {name}\n{found}", flush=True)
        if found.lines:
            left = BUILD / f"found-{name}.jsonl"
            left.write_text("\n".join(found.lines) + "\n", encoding="utf-8")
            print(f"again: python -m arenapy.testing reproduce {left}")
            status = 1
        if found.reached < FLOORS[name] and not options.by_chance:
            print(f"{name}: {found.reached} edges, and the corpus alone reaches {FLOORS[name]}")
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
