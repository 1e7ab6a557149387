"""The gate for instructions: which commit it compares with, what it lets pass, what it fails."""

import subprocess

import pytest

pytest.importorskip("Cython")  # what is counted is compiled

from asv_benches.instructions import counts as instructions
from asv_benches.instructions import regressions
from asv_benches.instructions.counts import Counts
from asv_benches.instructions.regressions import Change, NothingToCompare

NAME = "pool.alloc(64)"


class Repository:
    """A git repository of commits that touch one file of the package."""

    def __init__(self, root):
        self.root = root
        (root / "arenapy").mkdir(parents=True)
        self("init", "-q", "-b", "main")
        self.commits = 0

    def __call__(self, *arguments):
        identity = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
        command = ["git", "-C", str(self.root), *identity, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    def commit(self, message="one"):
        self.commits += 1
        (self.root / "arenapy" / "pool.pyx").write_text(f"# {self.commits}\n")
        self("add", "-A")
        self("commit", "-q", "-m", message)
        return self("rev-parse", "HEAD")


@pytest.fixture
def repository(tmp_path):
    return Repository(tmp_path / "repository")


def base(repository, **how):
    return regressions.base_of(repository.root, **how)


# ---- the base


def test_the_base_is_the_commit_before_or_head_with_changes(repository):
    first, second = repository.commit(), repository.commit()
    assert base(repository) == first
    (repository.root / "arenapy" / "pool.pyx").write_text("# changed\n")
    assert base(repository) == second
    assert base(repository, base=first[:9]) == first
    assert regressions.changed_since(second, repository.root) == ["arenapy/pool.pyx"]


def test_a_branch_is_compared_with_where_it_left_the_other(repository):
    fork = repository.commit()
    repository("switch", "-q", "-c", "work")
    work = [repository.commit() for _ in range(3)]
    repository("switch", "-q", "main")
    ahead = repository.commit()
    repository("switch", "-q", "work")
    assert base(repository) == work[1]
    assert base(repository, since="main") == fork
    # On the branch itself, and of what is merged already, the commit before is what there is.
    assert base(repository, since="work") == work[1]
    repository("switch", "-q", "main")
    assert base(repository, since="main") == fork != ahead


def test_without_a_base_there_is_a_reason(repository, tmp_path):
    with pytest.raises(NothingToCompare, match="not a git repository"):
        regressions.base_of(tmp_path)
    repository.commit()
    with pytest.raises(NothingToCompare, match="HEAD is the first commit"):
        base(repository)
    with pytest.raises(NothingToCompare, match="git does not know it"):
        base(repository, base="nothing")
    with pytest.raises(NothingToCompare, match="no commit in common"):
        base(repository, since="nothing")
    repository.commit()
    shallow = tmp_path / "shallow"
    origin = repository.root.as_uri()
    subprocess.run(["git", "clone", "-q", "--depth=1", origin, shallow], check=True)
    with pytest.raises(NothingToCompare, match=r"this clone is shallow.*--deepen=1"):
        regressions.base_of(shallow)


# ---- what commits accept


def test_messages_of_all_commits_since_accept(repository):
    first = repository.commit()
    repository.commit(f"a\n\nInstructions-accepted: {NAME} (a guard)")
    repository.commit("b\n\nInstructions-accepted: np.* (what this buys)\nOther: x")
    repository.commit("c: Instructions-accepted: nothing (not a trailer)\n\nand more")
    fields = "pool.empty(8, [('x', 'f4'), ('n', 'i4')])"
    repository.commit(f"d\n\nInstructions-accepted: {fields} (a reason)")
    found = regressions.accepted_since(first, repository.root)
    assert sorted(found) == sorted(
        [("np.*", "what this buys"), (NAME, "a guard"), (fields, "a reason")]
    )


@pytest.mark.parametrize("line", [NAME, f"{NAME} ()", f"{NAME} ( )", "(a reason)"])
def test_a_reason_is_needed(repository, line):
    first = repository.commit()
    repository.commit(f"a\n\nInstructions-accepted: {line}")
    with pytest.raises(ValueError, match="should be: NAME"):
        regressions.accepted_since(first, repository.root)


@pytest.mark.parametrize(
    ("pattern", "name", "meant"),
    [
        (NAME, NAME, True),
        (NAME, "pool.alloc(64 KiB)", False),
        ("pool.alloc(*", "pool.alloc(64 KiB)", True),
        ("*", "anything", True),
        ("b[64:128]", "b[64:128]", True),
        ("b[64:128]", "b6", False),
        ("pool?alloc(64)", NAME, False),
    ],
)
def test_only_stars_are_special(pattern, name, meant):
    assert regressions.matches(pattern, name) is meant


# ---- the verdict


def judge(before, after, accepted=(), limit=5.0):
    before, after = Counts(before, {}, ""), Counts(after, {}, "")
    found = regressions.changes(before.found, after.found, accepted)
    return regressions.report(found, before, after, accepted, limit)


@pytest.mark.parametrize(
    ("before", "after", "status"),
    [(100, 105, 0), (100, 105.1, 1), (100, 50, 0), (2, 2.9, 0), (2, 3.1, 1)],
)
def test_more_than_five_percent_fails(before, after, status, capsys):
    assert judge({NAME: before}, {NAME: after}) == status
    said = capsys.readouterr().out
    assert (f"Instructions-accepted: {NAME} (reason)" in said) is bool(status)
    assert judge({NAME: before}, {NAME: after}, [(NAME, "meant")]) == 0


def test_what_is_accepted_must_be_there(capsys):
    assert judge({NAME: 100}, {NAME: 100}, [("pool.aloc(64)", "meant")]) == 1
    assert "names no benchmark" in capsys.readouterr().out


def test_what_is_new_passes_and_what_is_lost_does_not(capsys):
    assert judge({}, {NAME: 100}) == 0
    assert judge({NAME: 100, "b": 1}, {"b": 1}) == 1
    assert f"LOST: {NAME}" in capsys.readouterr().out


def test_what_seems_to_have_regressed_is_counted_again(monkeypatch, tmp_path):
    """The least difference holds: one is noise, one is real, one was accepted."""
    real, noise, accepted = "pool.alloc(4 KiB)", NAME, "slab.alloc()"
    counted = []

    def count(groups, gate, path, stir):
        counted.append((tuple(groups), path == tmp_path, stir))
        after = {real: 120.0, noise: 103.0 if stir == 2 else 110.0, accepted: 110.0}
        return Counts(dict.fromkeys(after, 100.0) if path == tmp_path else after, {}, "")

    monkeypatch.setattr(instructions, "count", count)
    found = [
        Change(real, 100, 130), Change(noise, 100, 112), Change(accepted, 100, 110, "meant"),
        Change("np.empty(64, 'u1')", 100, 90),
    ]  # fmt: skip
    again = {one.name: one for one in regressions.count_again(found, tmp_path, 5)}
    assert again[real].percent == pytest.approx(20)
    assert again[noise].percent == pytest.approx(3) and not again[noise].regressed(5)
    assert again[accepted].after == 110 and len(again) == 4
    assert sorted(counted) == [
        (("Block",), here, stir) for here in (False, True) for stir in regressions.STIRS
    ]
    counted.clear()
    assert regressions.count_again(found[2:], tmp_path, 5) == found[2:] and not counted


def test_what_was_not_warm_has_no_count(monkeypatch, tmp_path):
    """Twice as many runs that cost less: something of the first ones happened only there."""
    totals = {
        (0, 1): 90_000,
        (0, 2): 80_000,
        (1, 1): 90_000,
        (1, 2): 90_000 + 7 * instructions.RUNS,
    }

    def run(command, **_):
        said = ""
        if "--prepare" not in command:
            for (way, times), total in totals.items():
                trigger = f"desc: Trigger: Client Request: Frame {way} {times}"
                (tmp_path / f"out.{way}{times}").write_text(f"{trigger}\ntotals: {total}\n")
            said = '{"arenapy": "arenapy/__init__.py", "absent": {}}'
        return subprocess.CompletedProcess(command, 0, said, "")

    monkeypatch.setattr(instructions.subprocess, "run", run)
    counts, dumps = instructions.run(tmp_path, ["Frame"])
    first, second = list(instructions.GROUPS["Frame"].ways)[:2]
    assert counts.found == {second: 7.0} and second in dumps
    assert "not warm" in counts.absent[first]
