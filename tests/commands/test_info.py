"""`arenapy info`: the facts are what the kernel says, and each says what it means."""

import gc
import importlib.util
import io
import json
import os
import resource
import sys
import types

import pytest
from rich.console import Console
from simulated_driver import simulated

from arenapy import cuda
from arenapy.base.text import format_bytes
from arenapy.commands import info
from arenapy.commands.info import Fact, facts, main, table
from arenapy.cuda import driver
from arenapy.linux import vm
from arenapy.linux.limits import HugePool, Limit, MemoryInfo, memory_info

GIB = 1 << 30
MIB = 1 << 20


def by_name(found):
    named = {fact.name: fact for fact in found}
    assert len(named) == len(found)
    return named


@pytest.fixture
def thp(tmp_path):
    """A fake /sys; call it with the words that transparent_hugepage's files choose."""

    def make(enabled, shmem):
        folder = tmp_path / "kernel/mm/transparent_hugepage"
        folder.mkdir(parents=True, exist_ok=True)
        for name, chosen in (("enabled", enabled), ("shmem_enabled", shmem)):
            words = ["always", "advise", "madvise", "never"]
            text = " ".join(f"[{word}]" if word == chosen else word for word in words)
            (folder / name).write_text(text + "\n")
        return tmp_path

    return make


def test_facts_are_those_of_this_machine():
    found = by_name(facts())
    assert found["page size"].value == os.sysconf("SC_PAGESIZE")
    assert found["MADV_POPULATE_WRITE"].value == vm.can_populate()
    assert found["release"].value == os.uname().release
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    assert found["memlock limit"].value == (None if soft == resource.RLIM_INFINITY else soft)
    assert {limit.name for limit in memory_info().limits} <= found.keys()


def test_every_fact_has_a_meaning_and_features_are_booleans():
    for fact in facts():
        assert fact.shown
        assert len(fact.meaning) > 10
        if fact.group == "kernel" and fact.name != "release":
            assert isinstance(fact.value, bool)
            assert fact.shown == ("yes" if fact.value else "no")


@pytest.mark.parametrize(
    ("mode", "gets"), [("always", True), ("madvise", True), ("never", False), (None, False)]
)
def test_thp_mode(thp, mode, gets):
    fact = by_name(facts(thp(mode, "never")))["transparent huge pages"]
    assert fact.value == mode
    assert ("gets them" in fact.meaning) == gets
    assert ("gets none" in fact.meaning) != gets


@pytest.mark.parametrize(("mode", "gets"), [("advise", True), ("always", True), ("never", False)])
def test_thp_of_shared_memory(thp, mode, gets):
    fact = by_name(facts(thp("never", mode)))["... for shared memory"]
    assert fact.value == mode
    assert ("gets them" in fact.meaning) == gets


@pytest.mark.parametrize(
    ("pool", "value", "meaning"),
    [
        (HugePool(2 * MIB, 10, 4, 0), 8 * MIB, "huge_pages='2M' works for up to 8 MiB"),
        (HugePool(GIB, 0, 0, 0), 0, "huge_pages='1G' raises an error"),
        (HugePool(GIB, 2, 0, 3), 0, "huge_pages='1G' may get up to 3 pages"),
        (HugePool(64 << 10, 1, 1, 0), 64 << 10, "no option"),
    ],
)
def test_huge_page_pools(monkeypatch, pool, value, meaning):
    monkeypatch.setattr(info, "huge_pools", lambda _sys: {pool.page_size: pool})
    found = [fact for fact in facts() if fact.name.startswith("hugetlbfs")]
    assert [fact.value for fact in found] == [value]
    assert found[0].shown == f"{pool.free} free of {pool.reserved}"
    assert meaning in found[0].meaning


def test_no_hugetlbfs(tmp_path):
    fact = by_name(facts(tmp_path))["hugetlbfs"]
    assert (fact.value, fact.shown) == (None, "not there")


@pytest.mark.parametrize(
    ("memlock", "capable", "meaning"),
    [
        (None, False, "any size"),
        (64 << 10, False, "up to 64 KiB in all"),
        (64 << 10, True, "CAP_IPC_LOCK"),
        (0, False, "raises an error"),
    ],
)
def test_limits(monkeypatch, memlock, capable, meaning):
    machine = Limit("the machine", 64 * GIB, 2 * GIB, "")
    group = Limit("cgroup /job (memory.max)", 8 * GIB, 2 * GIB, "")
    made = MemoryInfo(
        64 * GIB, 2 * GIB, 6 * GIB, group, (machine, group), memlock, swap_total=0, swap_free=0
    )
    monkeypatch.setattr(info, "memory_info", lambda: made)
    monkeypatch.setattr(info, "_has_capability", lambda _number: capable)
    found = by_name(facts())
    assert found[group.name].shown == "6 GiB free of 8 GiB"
    assert "the limit that applies" in found[group.name].meaning
    assert "does not limit" in found["the machine"].meaning
    assert "cgroup" not in found
    assert found["swap"].shown == "none"
    assert meaning in found["memlock limit"].meaning


@pytest.mark.parametrize("nodes", [(), (0,), (0, 2)])
def test_nodes(monkeypatch, nodes):
    monkeypatch.setattr(info, "numa_nodes", lambda *_: nodes)
    fact = by_name(facts())["nodes with memory"]
    assert fact.value == list(nodes)
    assert ("from one node" in fact.meaning) == (len(nodes) > 1)


def test_no_folder_for_temporary_files_is_needed(monkeypatch):
    known = {fact.name: fact.value for fact in facts()}
    monkeypatch.setattr("tempfile._candidate_tempdir_list", lambda: [])
    monkeypatch.setattr("tempfile.tempdir", None)
    found = by_name(facts())
    assert found.keys() == known.keys()
    assert found["OFD locks"].value == known["OFD locks"]


def test_missing_features_say_so(monkeypatch):
    def refused(*_args):
        raise PermissionError("filtered")

    for name in ("memfd", "lease", "lock", "bind"):
        monkeypatch.setattr(vm, name, refused)
    monkeypatch.setattr(vm, "can_populate", lambda: False)
    monkeypatch.setattr(vm, "can_scan_pages", lambda: False)
    before = os.listdir("/proc/self/fd")
    features = [fact for fact in facts() if isinstance(fact.value, bool)]
    assert len(features) == 6
    assert not any(fact.value for fact in features)
    assert os.listdir("/proc/self/fd") == before


@pytest.fixture
def cuda_python(monkeypatch):
    """It seems to be installed, or not."""

    def be(there):
        known = importlib.util.find_spec
        monkeypatch.setattr(
            importlib.util,
            "find_spec",
            lambda name, *rest: (there or None) if name == "cuda" else known(name, *rest),
        )

    return be


def test_devices(cuda_python):
    cuda_python(True)
    gc.collect()  # what other tests had pinned
    with simulated() as one:
        # What another test has pinned may live on.
        pinned = 3 * MIB + {fact.name: fact.value for fact in facts()}.get("pinned by arenapy", 0)
        region = cuda.Pinned(mapped=False).region(3 * MIB)
        found = [fact for fact in facts() if fact.group == "CUDA"]
        assert [fact.name for fact in found] == ["device 0", "device 1", "pinned by arenapy"]
        assert [fact.value for fact in found] == [32 * MIB, 64 * MIB, pinned]
        assert found[1].shown == "64 MiB free of 128 MiB"
        assert "Simulated 1" in found[1].meaning
        assert found[2].shown == format_bytes(pinned)
        del region
        one.fails["cuMemGetInfo"] = 2
        assert [fact.name for fact in facts() if fact.group == "CUDA"] == ["devices"]


@pytest.mark.parametrize(
    ("there", "entries", "why"),
    [
        (False, "never asked", "cuda-python is not installed"),
        (True, None, "cuda-python, which is not installed: pip install 'arenapy-memory[cuda]'"),
        (True, {}, "cuInit of the installed cuda-python is nothing"),
    ],
)
def test_no_devices(monkeypatch, cuda_python, there, entries, why):
    """It is said why, in one line, and nothing is imported to find out that nothing is there."""
    cuda_python(there)
    driver.use(None)
    module = types.ModuleType("cuda.bindings")
    if entries is not None:
        module.cydriver = types.SimpleNamespace(__pyx_capi__=entries)
    monkeypatch.setitem(sys.modules, "cuda", types.ModuleType("cuda"))
    monkeypatch.setitem(sys.modules, "cuda.bindings", module if entries is not None else None)
    fact = by_name(facts())["devices"]
    assert (fact.value, fact.shown) == (None, "none")
    assert why in fact.meaning
    assert "\n" not in fact.meaning


def test_brackets_are_shown_as_they_are():
    """They are no markup: an extra's name stands in some."""
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(table([Fact("x", "n", None, "[red]", "pip install 'arenapy-memory[cuda]'")], 80))
    text = console.export_text()
    assert "memory[cuda]" in text
    assert "[red]" in text


def test_json_is_the_facts(capsys):
    assert main(["--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert [entry["name"] for entry in printed] == [fact.name for fact in facts()]
    assert printed[0].keys() == {"group", "name", "value", "shown", "meaning"}


@pytest.mark.parametrize("width", [60, 400])
def test_table_shows_all_of_each_fact(width):
    found = [*facts(), Fact("x", "a" * 70, None, "b" * 70, "c" * 100)]
    console = Console(width=width, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(table(found, width))
    text = console.export_text()
    console.file.close()
    assert text.count("c") >= 100
    assert max(map(len, text.splitlines())) <= width
    if width == 400:
        for fact in facts():
            assert fact.meaning in text


def test_table_breaks_no_word_at_80_columns():
    found = [
        Fact("x", "MADV_POPULATE_WRITE", True, "yes", "Shared(huge_pages='auto') gets them"),
        Fact("x", "the machine (MemAvailable)", 1, "22.12 GiB free of 23.54 GiB", "the limit"),
        Fact("x", "release", "", "6.18.44-generic", "the features below were tested " * 3),
    ]
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(table(found, 80))
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= 80
    for fact in found:
        assert all(word in text for word in f"{fact.name} {fact.shown} {fact.meaning}".split())


def test_wrong_argument(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--yaml"])
    assert caught.value.code == 2
    assert "arenapy info" in capsys.readouterr().err
