"""Mutants of the core: do the tests notice when one line of it is wrong?

    python tests/mutation.py [--mutants 96] [--seed 0] [--jobs N] [--tier quick]
                             [--json FILE] [--show] [--again FILE [--tests NAME ...]]

Draws lines of the core's .pyx files and changes each in one place: a comparison, an operator, a
constant, or a statement that is left out. Every mutant is built alone, beside a copy of the
installed package, and attacked by the tests of its part, the quickest first. It is killed if one of
them fails, crashes or does not end; a survivor is shown with its line, again at the end. What does
not compile is drawn again. Install the package and run this with CFLAGS=-DARENAPY_ASSERT: CI has
the assertions on, too. Tests that fail without a mutant are named, and left out; `--known` keeps
what was found of that for the next run. Run it on many cores: a mutant that is killed takes one of
them some ten seconds, and a survivor as long as all its tests. So use `--tier quick` first, then
`--again` with all tests. The exit status is 0 whatever survives: a survivor is to be looked at, and
may change nothing that anybody could see.
"""

import argparse
import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "arenapy"
COMMON = [
    "test_attacks", "test_bad_input", "test_bookkeeping", "test_cycles", "test_debug",
    "test_debug_c", "test_every_allocator", "test_every_source", "test_fork", "test_leases",
    "test_faults", "test_reentry", "test_schedules", "test_shared", "test_stats", "test_steady",
    "test_thread_caches", "test_threads", "test_trace", "test_trace_blocks", "test_walks",
]  # fmt: skip
BUMP = [
    "test_bump", "test_bump_growth", "test_bump_in_place", "test_bump_machine", "test_planted",
    "test_buffer_held", "test_cuda_copies", "test_cuda_grow", "test_cuda_parked",
    "test_cuda_streams",
]  # fmt: skip
SLAB = [
    "test_slab_basics", "test_slab_in_c", "test_slab_machine", "test_planted_slab",
    "test_cuda_parked", "test_cuda_streams",
]  # fmt: skip
POOL = [
    "test_attacks_pool", "test_growth_failures", "test_planted_pool", "test_pool_grow",
    "test_pool_in_c", "test_pool_machine", "test_pool_regions", "test_pool_skew",
    "test_reservation", "test_reservation_failures", "test_size_classes",
    "test_cuda_coming_streams", "test_cuda_in_place", "test_cuda_lanes", "test_cuda_limit",
    "test_cuda_streams",
]  # fmt: skip
STREAMS = [
    *POOL, "test_cuda_captures", "test_cuda_closed_streams", "test_cuda_graph_memory",
    "test_cuda_lending", "test_cuda_machines", "test_cuda_resource", "test_cuda_threads",
    "test_cuda_told", "test_raw_blocks",
]  # fmt: skip
BUFFER = [
    "test_buffer", "test_buffer_held", "test_buffer_protocol", "test_cycles", "test_dlpack",
    "test_dtypes", "test_interop", "test_classes", "test_cuda_copies", "test_cuda_retained",
    "test_cuda_streams",
]  # fmt: skip
#: Module: the tests of its part. What fails first is what counts, so the quickest run first.
CORE = {
    "allocator/allocator_core": [*BUMP, *SLAB, *POOL],
    "base/interval_set": BUMP, "base/sizes": POOL, "linux/reserved_space": POOL,
    "bump/bump": BUMP, "bump/core": BUMP, "bump/growth": BUMP,
    "slab/core": SLAB, "slab/slab": SLAB,
    "pool/core": STREAMS, "pool/memory": POOL, "pool/page_heap": POOL, "pool/pool": STREAMS,
    "pool/stream_cache": STREAMS, "pool/thread_cache": POOL,
    "buffer/buffer": BUFFER, "buffer/block": [*BUFFER, *BUMP],
}  # fmt: skip
#: Those that no test of an ordinary build kills, as (module, before, after), and why.
KNOWN = {
    ("bump/core", "self.one_piece = self.leased == NULL", "self.one_piece = self.leased != NULL"):
        "equivalent but for speed: place() works it out anew, and leases turn the short cut off",
    ("linux/reserved_space", "nbytes = (nbytes + PAGE - 1) & ~<size_t>(PAGE - 1)",
     "nbytes = (nbytes + PAGE) & ~<size_t>(PAGE - 1)"):
        "equivalent in array_open: it reserves a page of address space more, which nothing uses",
    ("slab/core", "was_live = push(self, s, group_of(self, name), name)", "pass"):
        "what it returns then has no value; where that is False, free_block() frees the item",
    ("pool/core", "arenapy_spin_acquire(&self.heap_lock)", "pass"):
        "a race; in builds with assertions the release of a lock that is not held ends the process",
    ("pool/memory", "c.lock_all()", "pass"):
        "a race, with calls without the GIL, amid growth for which there is no memory",
    ("buffer/buffer", "freelist = NULL if tracked else freelist_of(owner)", "pass"):
        "undefined in C; with what compilers make of it, objects are freed instead of kept",
    ("buffer/block", "empty_freelist(nth_freelist(self, k))", "pass"):
        "of free-threaded builds: with a GIL an owner has one freelist, which drop_kept() empties",
    ("slab/core", "if self.align >= POISON_UNIT:", "if self.align > POISON_UNIT:"):
        "of builds for a sanitizer",
    ("slab/core", "if not POISONS or self.debug or self.align >= POISON_UNIT:",
     "if not POISONS or self.debug or self.align > POISON_UNIT:"):
        "of builds for a sanitizer",
    ("base/interval_set", "if low == 0 or high == 0:", "if low == 0 and high == 0:"):
        "equivalent but for speed: 0 has the lowest priority, so join() goes down to both ends",
    ("pool/page_heap", "done = most >= ARRAY_STEP", "done = most > ARRAY_STEP"):
        "equivalent but for a limit of the address space within a page of the smallest pool",
    ("pool/thread_cache", "if f.n_large == LARGE_MOST:", "if f.n_large != LARGE_MOST:"):
        "equivalent but for speed: a cache is flushed sooner, so it is never full",
    ("slab/slab", "usleep(MOMENT)", "pass"):
        "equivalent but for the processor's time: it asks again at once, without the GIL as well",
    ("pool/stream_cache", "if chain and len(busy) < ASKED and hooks.done(name):",
     "if chain and len(busy) <= ASKED and hooks.done(name):"):
        "equivalent but for speed: one stream more is asked what it has done",
    ("pool/thread_cache",
     "room = depot.n + n <= min(<uint32_t>DEPOT_MOST, 4 * self.steps[s].depth)",
     "room = depot.n + n <= max(<uint32_t>DEPOT_MOST, 4 * self.steps[s].depth)"):
        "equivalent but for speed: depots have room for DEPOT_MOST, which is never the lesser one",
}  # fmt: skip
SECONDS = 300  # for a build, and from the end of one test to that of the next
NOTHING_LEFT = 5  # pytest's exit status
SWAPS = [
    (r" < ", " <= "), (r" <= ", " < "), (r" > ", " >= "), (r" >= ", " > "),
    (r" == ", " != "), (r" != ", " == "), (r" and ", " or "), (r" or ", " and "),
    (r" \+ ", " - "), (r" - ", " + "), (r" \+ 1\b", ""), (r" - 1\b", ""),
    (r" \+= ", " -= "), (r" -= ", " += "), (r"\bnot ", ""),
    (r"\bTrue\b", "False"), (r"\bFalse\b", "True"), (r"\bmin\(", "max("), (r"\bmax\(", "min("),
    (r" << ", " >> "), (r" >> ", " << "), (r" & ", " | "), (r" \| ", " & "),
]  # fmt: skip
STATEMENT = re.compile(r"^(\s+)([\w.\[\]]+(\(.*\)| [-+|&]?= .*))$")
NO_CODE = re.compile(r"^\s*(#|f?\"|cdef |cpdef |def |class |cimport|from |import |@|raise |$)")


@dataclass
class Mutant:
    """One change, and what became of it."""

    module: str
    line: int
    before: str
    after: str
    outcome: str = ""
    by: str = ""
    seconds: float = 0.0

    def __str__(self):
        return f"{self.module}.pyx:{self.line}: {self.before.strip()}  ->  {self.after.strip()}"


def code_lines(text):
    """(number, line) of statements: no docstrings, comments, declarations or C."""
    inside, open_brackets = False, 0
    for number, line in enumerate(text.splitlines()):
        if open_brackets or "arenapy_assert(" in line:  # ordinary builds are without assertions
            open_brackets += line.count("(") - line.count(")")
            continue
        quotes = line.count('"""')
        if inside or quotes:
            inside = inside != (quotes == 1)
            continue
        if not NO_CODE.match(line) and line.startswith(" "):
            yield number, line


def mutations(line):
    """What a line could be instead."""
    code, hash_sign, comment = line.partition("  #")
    for pattern, swap in SWAPS:
        for match in re.finditer(pattern, code):
            yield code[: match.start()] + swap + code[match.end() :] + hash_sign + comment
    if match := STATEMENT.match(code.rstrip()):
        balanced = code.count("(") == code.count(")") and code.count("[") == code.count("]")
        if balanced and not code.rstrip().endswith(("\\", ",", "(")):
            yield match[1] + "pass"


def all_mutants():
    """Every one that there is."""
    for module in CORE:
        for number, line in code_lines((PACKAGE / f"{module}.pyx").read_text()):
            for after in mutations(line):
                if after != line:
                    yield Mutant(module, number + 1, line, after)


def build(mutant, place, installed):
    """A package beside the installed one with this module in it. False: it does not compile."""
    package = place / "arenapy"
    shutil.copytree(installed, package, ignore=shutil.ignore_patterns("__pycache__"))
    for pattern in ("*.pyx", "*.pxd"):
        for file in PACKAGE.rglob(pattern):
            shutil.copy(file, package / file.relative_to(PACKAGE))
    source = package / f"{mutant.module}.pyx"
    lines = source.read_text().splitlines(keepends=True)
    assert lines[mutant.line - 1].rstrip("\n") == mutant.before
    lines[mutant.line - 1] = mutant.after + "\n"
    source.write_text("".join(lines))
    for old in package.glob(f"{mutant.module}.*.so"):
        old.unlink()
    code = (
        "import sys; sys.argv[1:] = ['build_ext', '--inplace']\n"
        "from setuptools import Extension, setup\n"
        "from Cython.Build import cythonize\n"
        "import runpy; flags = runpy.run_path('arenapy/_build.py')\n"
        f"setup(ext_modules=cythonize([Extension('arenapy.{mutant.module.replace('/', '.')}', "
        f"['arenapy/{mutant.module}.pyx'], extra_compile_args=flags['COMPILE_ARGS'] + ['-O1'])], "
        "compiler_directives=flags['DIRECTIVES'], quiet=True))"
    )
    return quiet([sys.executable, "-c", code], place) == 0


def quiet(command, place, log=None):
    """The exit status of a command; None if it writes nothing for too long."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(place), os.environ.get("PYTHONPATH", "")]),
        "ARENAPY_STEPS": str(place / "steps"),
        "ARENAPY_UNSHRUNK": "1",
    }
    with open(log or os.devnull, "w") as out:
        process = subprocess.Popen(
            command, cwd=place, env=environment, stdin=subprocess.DEVNULL, stdout=out,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            size, since = 0, time.monotonic()
            while time.monotonic() - since < SECONDS:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    return process.wait(1)
                written = os.fstat(out.fileno()).st_size
                if written != size:
                    size, since = written, time.monotonic()
            return None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # what the tests started, too
            process.wait()


def pytest(place, names, tier, *more):
    """(exit status, the tests that failed) of these files' tests, against what lies in a place."""
    files = [str(path) for name in names for path in (place / "tests").glob(f"*/{name}.py")]
    assert len(files) >= len(names), names
    log = place / f"{names[0]}.log"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tier", tier]
    command += ["-p", "no:benchmark"]  # where it is installed, it warns
    status = quiet([*command, *more, *files], place, log)
    return status, re.findall(r"^(?:FAILED|ERROR) (\S+)", log.read_text(errors="replace"), re.M)


def copy_tests(place):
    shutil.copytree(ROOT / "tests", place / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", place)
    return place


def unchanged(name, tier, noted):
    """What the tests of one file say, and how long they take, when nothing is wrong."""
    if name in noted:
        return noted[name]
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="arenapy-original-") as place:
        status, failed = pytest(copy_tests(Path(place)), [name], tier)
    if status not in (0, 1, NOTHING_LEFT):
        failed = [str(file.relative_to(ROOT)) for file in ROOT.glob(f"tests/*/{name}.py")]
    seconds = time.perf_counter() - start
    say(f"{name}: {seconds:.0f} s", *(f"\n  fails without a mutant: {test}" for test in failed))
    noted[name] = failed, seconds
    return noted[name]


def attack(mutant, installed, known, tier, tests=None):
    """Build it and run its tests, or these; what became of it is noted in it."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="arenapy-mutant-") as place:
        place = Path(place)
        if not build(mutant, place, installed):
            mutant.outcome = "does not compile"
            return
        copy_tests(place)
        names = tests or dict.fromkeys([*CORE[mutant.module], *COMMON])
        names = sorted(names, key=lambda name: known[name].result()[1])
        originals = [known[name].result() for name in names]
        useless = [f"--deselect={test}" for failed, _ in originals for test in failed]
        status, failed = pytest(place, names, tier, "-x", *useless)
        mutant.outcome = "survived"
        if status not in (0, NOTHING_LEFT):
            ended = "no end" if status is None else f"exit {status}"
            mutant.outcome, mutant.by = "killed", failed[0] if failed else ended
    mutant.seconds = time.perf_counter() - start


def main():
    """Draw, attack, tell."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mutants", type=int, default=96)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin none after this")
    parser.add_argument("--tier", default="full", help="of the tests: quick is to be gone on with")
    parser.add_argument("--known", type=Path, metavar="FILE", help="what holds without a mutant")
    parser.add_argument("--json", type=Path, metavar="FILE", help="written after each mutant")
    parser.add_argument("--again", type=Path, metavar="FILE", help="the survivors of --json's")
    parser.add_argument("--tests", nargs="+", metavar="NAME", help="not those of the part: these")
    parser.add_argument("--show", action="store_true", help="name the mutants, and run nothing")
    options = parser.parse_args()
    drawn = list(all_mutants())
    say(f"{len(drawn)} mutants are possible; {options.mutants} of them, seed {options.seed}")
    random.Random(options.seed).shuffle(drawn)
    if options.show:
        print(*drawn[: options.mutants], sep="\n")
        return
    import arenapy

    installed = Path(arenapy.__file__).parent
    if options.again:
        before = [Mutant(**one) for one in json.loads(options.again.read_text())]
        drawn = [mutant for mutant in before if mutant.outcome == "survived"]
        options.mutants = len(drawn)
    modules = {mutant.module for mutant in drawn[: options.mutants]}
    names = set(options.tests or [*COMMON, *(name for m in modules for name in CORE[m])])
    start = time.perf_counter()
    noted = {}
    if options.known and options.known.exists():
        noted = json.loads(options.known.read_text())
    done, waiting = [], (mutant for mutant in drawn if mutant.module in modules)
    with ThreadPoolExecutor(options.jobs) as executor:
        # First in line, so that no mutant waits for what has not begun.
        known = {name: executor.submit(unchanged, name, options.tier, noted) for name in names}

        def one():
            # Until enough were built and attacked.
            while len(done) < options.mutants and time.perf_counter() - start < options.seconds:
                mutant = next(waiting, None)
                if mutant is None:
                    return
                attack(mutant, installed, known, options.tier, options.tests)
                if mutant.outcome != "does not compile":
                    done.append(mutant)
                    say(f"{mutant.outcome:9} {mutant.seconds:4.0f} s  {mutant}  [{mutant.by}]")
                if options.json:
                    options.json.write_text(json.dumps([asdict(m) for m in done], indent=1))

        if options.known:
            for future in known.values():
                future.result()
            options.known.write_text(json.dumps(noted, indent=1))
        for future in [executor.submit(one) for _ in range(options.jobs)]:
            future.result()
    killed = sum(mutant.outcome == "killed" for mutant in done)
    say(f"{killed} of {len(done)} killed, {time.perf_counter() - start:.0f} s")
    for mutant in done:
        if mutant.outcome == "survived":
            key = mutant.module, mutant.before.strip(), mutant.after.strip()
            say(mutant, f"[known: {KNOWN[key]}]" if key in KNOWN else "")


def say(*what, sep=" "):
    print(*what, sep=sep, flush=True)  # a run may be cut short


if __name__ == "__main__":
    main()
