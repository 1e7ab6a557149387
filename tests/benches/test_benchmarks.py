"""asv's graphs can be read: every benchmark has units, names of parameters, peers, and batches."""

import os
import re
import subprocess
import sys
import types
from collections import Counter
from pathlib import Path

import asv_suite
import pytest

pytest.importorskip("Cython")  # which compiles what some of them import

from asv_benches.host import bench_threads
from asv_benches.support.rounds import Ways

BENCHMARKS = list(asv_suite.discover())
LEAST = 10_000  # operations of less than a microsecond
#: A number of operations, or so much memory that it takes a while.
BATCH = re.compile(r"\b(\d[\d,]{3,})\b|\b\d+ (?:Mi|MiB|GiB)\b")
OURS = re.compile(r"arenapy|arena\b|\bslab|\bpool\b|bump|prefault,|pinned region|\bb\b", re.I)
PEER = re.compile(
    r"bytearray|np\.|numpy|pyarrow|glibc|malloc|default|populate|mmap|cupy|rmm|torch|cuda", re.I
)
#: Compared are ways of our own, and what they are compared with is another of them.
OWN_WAYS = {
    "host.bench_c.Arena": "an arena's calls with each other; host.bench_c.Malloc has the mallocs",
    "host.bench_curve.EachCall": "growth with the number of blocks",
    "gpu.bench_gpu.Stream": "on others' streams; gpu.bench_gpu.Block has their allocators",
    "instructions.bench_instructions.Arena": "an arena's calls with each other",
    "instructions.bench_instructions.Frame": "mark and reset, which nothing else has",
    "host.bench_latency.Frame": "mark and reset, which nothing else has",
    "host.bench_growth.Reserved": "two ways of growing",
    "host.bench_layout.Layout": "layouts and pages",
    "host.bench_layout.Huge": "layouts and pages",
    "host.bench_lifetime.Lifetime": "a bound",
    "host.bench_lifetime.Kept": "a bound",
    "host.bench_replay.Recording": "with and without a recorder",
    "host.bench_rounding.Rounding": "two ways of rounding",
    "host.bench_rounding.Reserved": "two ways of rounding",
    "host.bench_threads.Isolation": "with and without cache lines of their own",
}


def identify(one):
    return one.name


every = pytest.mark.parametrize("one", BENCHMARKS, ids=identify)


def problems(one):
    """What asv's pages would not say of a benchmark."""
    found = []
    unit = one.attribute("unit")
    if one.kind == "track" and (not unit or unit == "unit"):
        found.append("it has no unit")
    if one.kind in ("mem", "peakmem"):
        found.append("it does not see memory of C: track what arenapy.testing.asv counts")
    if not one.attribute("pretty_name"):
        found.append("it has no pretty_name")
    if not isinstance(one.attribute("version", ""), str):
        found.append("its version is another thing of that name, and its results are of no version")
    names = one.attribute("param_names", ())
    if len(names) != len(one.params):
        found.append(f"it has {len(one.params)} parameters, and names {names}")
    if any(re.fullmatch(r"param\d*|", name) for name in names):
        found.append(f"its parameters are named {names}")
    for values in one.params:
        twice = [value for value, count in Counter(map(str, values)).items() if count > 1]
        if not values or twice:
            found.append(f"a parameter has the values {values}")
    return found


def operations(one):
    """The fewest operations in a body; None: it does not say."""
    owner = one.owner
    if owner is not None and issubclass(owner, Ways) and owner.CALLS > 1:
        return min(
            max(1, owner.CALLS // way.operations) * way.operations for way in owner.ways.values()
        )
    said = BATCH.search(one.attribute("pretty_name") or "")
    return said and (int(said[1].replace(",", "")) if said[1] else LEAST)


def test_there_are_benchmarks():
    assert len(BENCHMARKS) > 40
    assert len({one.name for one in BENCHMARKS}) == len(BENCHMARKS)
    assert {one.kind for one in BENCHMARKS} == {"time", "track"}


@every
def test_units_and_names_are_there(one):
    assert problems(one) == []


@pytest.mark.parametrize("one", [one for one in BENCHMARKS if one.kind == "time"], ids=identify)
def test_times_are_of_batches(one):
    """And each batch is one sample: asv would repeat what is short by itself."""
    assert one.attribute("number") == 1
    count = operations(one)
    assert count is not None, "it does not say of how many operations"
    assert count >= LEAST


def test_graphs_show_peers():
    classes = {one.name.rpartition(".")[0]: one for one in BENCHMARKS}
    assert OWN_WAYS.keys() <= classes.keys()
    for name, one in classes.items():
        if name not in OWN_WAYS:
            values = [str(value) for column in one.params for value in column]
            ours = [value for value in values if OURS.search(value)]
            peers = [value for value in values if value not in ours and PEER.search(value)]
            assert ours and peers, f"{name} shows {ours} beside {peers}"


@pytest.mark.full
def test_they_do_without_the_tools_of_tests():
    """asv's environments have the packages of asv.conf.json, and no others."""
    script = (
        "import sys\n"
        "sys.modules['pytest'] = sys.modules['hypothesis'] = None\n"
        "import asv_suite\n"
        "print(len(list(asv_suite.discover())))"
    )
    path = os.pathsep.join([str(Path(__file__).parent), str(asv_suite.FOLDER.parent)])
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.stdout == f"{len(BENCHMARKS)}\n", done.stderr


def test_asv_finds_the_same():
    discovery = pytest.importorskip("asv_runner.discovery")
    found = {one.name: one for one in discovery.disc_benchmarks(str(asv_suite.FOLDER))}
    assert found.keys() == {one.name for one in BENCHMARKS}
    for one in BENCHMARKS:
        asvs = found[one.name]
        assert asvs.param_names == list(one.attribute("param_names", ())), one.name
        assert len(asvs.params) == len(one.params), one.name
        if one.kind == "track":
            assert asvs.unit == one.attribute("unit"), one.name


def test_two_threads_need_two_processors(monkeypatch):
    """Else the first one waits for the second one for ever."""
    monkeypatch.setattr(bench_threads, "CPUS", bench_threads.CPUS[:1])
    assert len(bench_threads.at_once([lambda: int])) == 1
    with pytest.raises(RuntimeError, match="needs 2 processors, and the process may use 1"):
        bench_threads.at_once([lambda: int] * 2)


# ---- the rules themselves


def of_source(source):
    """The benchmarks of a module with that text."""
    module = types.ModuleType("asv_benches.bench_planted")
    exec(source, vars(module))
    for value in vars(module).values():
        if isinstance(value, type):
            value.__module__ = __name__  # inspect asks where it is from
    return list(asv_suite.of(module))


PLANTED = """
class Planted:
    {body}
    def {kind}_it(self, *params):
        pass
    {kind}_it.pretty_name = "It"
    {more}
"""


@pytest.mark.parametrize(
    ("kind", "body", "more", "what"),
    [
        ("track", "pass", "", "no unit"),
        ("track", "unit = 'unit'", "", "no unit"),
        ("mem", "pass", "", "memory of C"),
        ("peakmem", "pass", "", "memory of C"),
        ("time", "params = (1, 2)", "", "1 parameters, and names"),
        ("time", "params = ((1, 2), (3, 4)); param_names = ('a',)", "", "2 parameters"),
        ("time", "params = (1, 2); param_names = ('param1',)", "", "named"),
        ("time", "params = (1, 1); param_names = ('a',)", "", "has the values"),
        ("time", "pass", "time_it.pretty_name = ''", "no pretty_name"),
        ("time", "version = len", "", "of no version"),
    ],
)
def test_what_is_missing_is_found(kind, body, more, what):
    (one,) = of_source(PLANTED.format(kind=kind, body=body, more=more))
    found = problems(one)
    assert len(found) == 1 and what in found[0]


@pytest.mark.parametrize(
    ("title", "count"),
    [
        ("It: 10,000 times", 10_000),
        ("It, 2,000 times", 2_000),
        ("1 GiB of it", LEAST),
        ("It", None),
    ],
)
def test_batches_are_read_from_titles(title, count):
    (one,) = of_source(
        PLANTED.format(kind="time", body="pass", more=f"time_it.pretty_name = {title!r}")
    )
    assert operations(one) == count


def test_recordings_follow_each_other_in_any_order(tmp_path):
    """As rounds do; all of them write the same file, which one recorder at a time may have."""
    from asv_benches.host import bench_replay

    names = bench_replay.namespace(str(tmp_path / "a.trace"))
    loops = {name: way.loop(names) for name, way in bench_replay.WAYS.items()}
    for first in "pool, recorded", "Python, recorded, 0 callers":
        for loop in (loops[first], loops["loop, recorded"], loops["pool, recorded"]):
            assert loop.timeit(1) > 0
