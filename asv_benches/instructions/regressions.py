"""Fails on what costs more than 5 % more instructions than in the commit before.

    python asv_benches/instructions/regressions.py [--base REV | --since BRANCH]
        [--limit PERCENT] [--again]

Counts both commits by callgrind (counts.py) with this checkout's benchmarks. The new one is
the working tree, whose extension modules must be built (an editable install does that); the base is
HEAD if there are uncommitted changes to the package, and HEAD's first parent if there are none. Of
a branch of many commits that is only the last: with --since the base is where it left the other
branch. It is built here, as this tree was, but only where it differs.

Counts are the same again to a percent, but for what the interpreter's own allocator does now and
then. So what seems to have regressed is counted twice more, with other things allocated before, and
the least difference holds. --again counts the working tree twice and says how far that differs.

A change that costs something on purpose says so in its commit's message, a line for each benchmark:

    Instructions-accepted: pool.alloc(64) (a guard against double frees)
    Instructions-accepted: np.* (what this buys)

`*` stands for anything. There must be a reason, and it has no " (" in it. A benchmark that the base
does not have is listed, not judged. Exit status: 0 kept, 1 not, 77 nothing to compare with (it says
why).
"""

import argparse
import fnmatch
import io
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

if not __package__:  # run as a script; behind what is installed
    sys.path.append(str(Path(__file__).resolve().parents[2]))

ROOT = Path(__file__).resolve().parents[2]
COUNTED = ("arenapy", "pyproject.toml")
# Not imported by what is counted.
ELSEWHERE = ("arenapy/testing/", "arenapy/commands/demo/")
TRAILER = "Instructions-accepted"
NOTHING = 77  # exit status, as test harnesses have it
LEAST = 1.0  # instruction: what less is is no regression
STIRS = (1, 2)  # for what is counted again
BUILD = """
from setuptools import Distribution
distribution = Distribution()
distribution.parse_config_files()
command = distribution.get_command_obj("build_ext")
command.build_lib, command.build_temp, command.inplace = {lib!r}, {temp!r}, True
distribution.run_command("build_ext")
"""


class NothingToCompare(Exception):
    """There is no base; says why."""


@dataclass(frozen=True)
class Change:
    """One benchmark in both commits."""

    name: str
    before: float
    after: float
    accepted: str | None = None  # the reason

    @property
    def percent(self):
        """More instructions than before; negative: fewer."""
        return 100 * (self.after - self.before) / self.before

    def regressed(self, limit):
        """True if the count has grown by more than `limit` percent."""
        return self.percent > limit and self.after - self.before >= LEAST


# ---- what git knows -----------------------------------------------------------------------


def git(*arguments, root=ROOT):
    """The output of a git command. Raises CalledProcessError."""
    command = ["git", "-C", str(root), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def base_of(root=ROOT, base=None, since=None):
    """The commit to compare with: `base`, or where HEAD left `since`, or the one before."""
    try:
        git("rev-parse", "--git-dir", root=root)
    except (OSError, subprocess.CalledProcessError):
        raise NothingToCompare("this is not a git repository") from None
    if since is not None:
        base = left(since, root)
    dirty = bool(git("status", "--porcelain", "--", *COUNTED, root=root).strip())
    wanted = base or ("HEAD" if dirty else "HEAD^1")
    try:
        return git("rev-parse", "--verify", f"{wanted}^{{commit}}", root=root).strip()
    except subprocess.CalledProcessError:
        shallow = git("rev-parse", "--is-shallow-repository", root=root).strip() == "true"
        why = "HEAD is the first commit" if base is None else "git does not know it"
        why = "this clone is shallow: git fetch --deepen=1" if shallow else why
        raise NothingToCompare(f"there is no {wanted}: {why}") from None


def left(since, root=ROOT):
    """Where HEAD's history left that of a branch; None: HEAD is part of it."""
    try:
        fork = git("merge-base", "HEAD", since, root=root).strip()
    except subprocess.CalledProcessError:
        raise NothingToCompare(
            f"HEAD and {since} have no commit in common that this clone knows: git fetch it"
        ) from None
    return None if fork == git("rev-parse", "HEAD", root=root).strip() else fork


def changed_since(base, root=ROOT):
    """Files that are counted and differ between a commit and the working tree."""
    names = git("diff", "--name-only", base, "--", *COUNTED, root=root).splitlines()
    names += git(
        "ls-files", "--others", "--exclude-standard", "--", *COUNTED, root=root
    ).splitlines()
    return [
        name
        for name in names
        if name.endswith((".py", ".pyx", ".pxd", ".toml")) and not name.startswith(ELSEWHERE)
    ]


def accepted_since(base, root=ROOT):
    """[(pattern, reason)] of the trailers of all commits since; raises ValueError for bad ones."""
    form = f"%(trailers:key={TRAILER},valueonly,unfold)"
    found = []
    for line in git("log", f"--format={form}", f"{base}..HEAD", root=root).splitlines():
        if line.strip():
            entry = re.fullmatch(r"(\S.*) \((.*\S.*)\)", line.strip())  # a name may have " ("
            if entry is None:
                raise ValueError(f"{TRAILER}: {line.strip()!r} should be: NAME (reason)")
            found.append((entry[1], entry[2]))
    return found


# ---- the verdict --------------------------------------------------------------------------


def matches(pattern, name):
    """True if the pattern matches a name; only `*` is special."""
    return fnmatch.fnmatchcase(name, re.sub(r"([\[?])", r"[\1]", pattern))


def changes(before, after, accepted):
    """The benchmarks that both commits have, in the order of `after`."""
    return [
        Change(
            name,
            before[name],
            count,
            next((reason for pattern, reason in accepted if matches(pattern, name)), None),
        )
        for name, count in after.items()
        if name in before
    ]


def report(found, before, after, accepted, limit):
    """Print; the exit status. `before` and `after` are Counts."""
    for one in found:
        verdict = ""
        if one.regressed(limit):
            verdict = f"accepted: {one.accepted}" if one.accepted else "REGRESSED"
        print(f"{one.before:12.1f} {one.after:12.1f} {one.percent:+8.2f} %  {one.name}  {verdict}")
    for name in after.found:
        if name not in before.found:
            why = before.absent.get(name, "not there")
            print(f"{'-':>12} {after.found[name]:12.1f} {'':10}  {name}  (not in the base: {why})")
    gone = [name for name in before.found if name not in after.found]
    for name in gone:
        print(f"LOST: {name} ran in the base and does not run now: {after.absent.get(name)}")
    idle = [pattern for pattern, _ in accepted
            if not any(matches(pattern, name) for name in after.found)]  # fmt: skip
    for pattern in idle:
        print(f"{TRAILER}: {pattern!r} names no benchmark")
    bad = [one for one in found if one.regressed(limit) and not one.accepted]
    for one in bad:
        print(
            f"\n{one.name}: {one.before:.1f} -> {one.after:.1f} instructions, {one.percent:+.1f} %"
        )
    if bad:
        print(
            f"\nMore than {limit:g} %. If that is meant, the commit's message says so and why:\n\n"
            + "\n".join(f"    {TRAILER}: {one.name} (reason)" for one in bad)
            + "\n\nWhere it comes from: python asv_benches/instructions/counts.py --annotate NAME"
        )
    if not found and not gone:
        print("nothing that is counted here is in the base")
    return 1 if bad or gone or idle else 0


# ---- the base, built and counted ----------------------------------------------------------


def lay_out(base, target, root=ROOT):
    """The files of a commit. Those that are the same here keep their times, and what was built from
    them comes along: then only what differs is built."""
    data = subprocess.run(
        ["git", "-C", str(root), "archive", base, "--", *COUNTED], capture_output=True, check=True
    ).stdout
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        archive.extractall(target, filter="data")
    now = time.time()
    for file in target.rglob("*"):
        if file.is_file():
            twin = root / file.relative_to(target)
            same = twin.is_file() and twin.read_bytes() == file.read_bytes()
            os.utime(file, ns=(twin.stat().st_mtime_ns,) * 2 if same else (int(now * 1e9),) * 2)
    if (root / "build").is_dir():
        shutil.copytree(root / "build", target / "build", symlinks=True)


def build(tree):
    """Compile a tree in place, as an editable install does."""
    stays = f"build/editable-{sysconfig.get_config_var('SOABI')}"
    code = BUILD.format(lib=f"{stays}/lib", temp=f"{stays}/temp")
    done = subprocess.run([sys.executable, "-c", code], cwd=tree, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"the base does not build:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")


def count_both(tree, make, groups=None, stir=0):
    """Counts of the base, once `make` has made it, and of the working tree, both at once."""
    from asv_benches.instructions import counts as instructions

    groups = tuple(instructions.GROUPS) if groups is None else groups
    with ThreadPoolExecutor(1) as pool:
        after = pool.submit(instructions.count, groups, gate=True, path=ROOT, stir=stir)
        make()
        before = instructions.count(groups, gate=True, path=tree, stir=stir)
        return before, after.result()


def count_again(found, tree, limit):
    """Count again what seems to have regressed, and keep the least difference of each."""
    from asv_benches.instructions import counts as instructions

    found = list(found)
    for stir in STIRS:
        doubted = {one.name: i for i, one in enumerate(found)
                   if one.regressed(limit) and not one.accepted}  # fmt: skip
        groups = [
            key for key, group in instructions.GROUPS.items() if doubted.keys() & {*group.gate}
        ]
        if not doubted:
            break
        print(f"counted again: {', '.join(doubted)}")
        before, after = count_both(tree, lambda: None, groups, stir)
        for name, i in doubted.items():
            if name in before.found and name in after.found:
                again = Change(name, before.found[name], after.found[name], found[i].accepted)
                found[i] = min(found[i], again, key=lambda one: one.percent)
    return found


def print_repeatability():
    """Count the working tree twice: how far the counts differ."""
    from asv_benches.instructions import counts as instructions

    first, second = (instructions.count(gate=True, path=ROOT, stir=stir) for stir in (0, 1))
    found = changes(first.found, second.found, [])
    for one in sorted(found, key=lambda one: -abs(one.percent)):
        print(f"{one.percent:+8.2f} %  {one.name}")
    within = sum(abs(one.percent) < 2 for one in found)
    print(f"{within} of {len(found)} are within 2 %")


def main(argv=None):
    """Build, count, compare; the exit status is the verdict."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base", metavar="REV", help="compare with this commit")
    parser.add_argument("--since", metavar="BRANCH", help="compare with where HEAD left it")
    parser.add_argument("--limit", type=float, default=5.0, metavar="PERCENT")
    parser.add_argument("--again", action="store_true", help="how far repetitions differ")
    options = parser.parse_args(argv)
    if options.base and options.since:
        parser.error("--base and --since: which?")
    from asv_benches.instructions import counts as instructions

    if reason := instructions.can_count():
        print(f"nothing is counted: {reason}")
        return NOTHING
    if options.again:
        print_repeatability()
        return 0
    try:
        base = base_of(base=options.base, since=options.since)
    except NothingToCompare as reason:
        print(f"nothing to compare with: {reason}")
        return NOTHING
    changed = changed_since(base)
    subject = git("log", "-1", "--format=%h %s", base).strip()
    print(f"base {subject}; changed since: {len(changed)} files")
    accepted = accepted_since(base)
    if not changed:
        print("nothing that is counted has changed")
        return 0
    start = time.perf_counter()
    built = start

    def make_base():
        nonlocal built
        lay_out(base, tree)
        build(tree)
        built = time.perf_counter()

    with tempfile.TemporaryDirectory(prefix="arenapy-base.") as folder:
        tree = Path(folder)
        before, after = count_both(tree, make_base)
        for counts, place in ((before, tree), (after, ROOT)):
            if Path(counts.arenapy).parents[1] != place:
                raise RuntimeError(f"{counts.arenapy} was counted, which is not in {place}")
        control = instructions.CONTROL
        if abs(Change(control, before.found.pop(control), after.found.pop(control)).percent) > 0.5:
            raise RuntimeError(f"{control} has another count in the base: they were not run alike")
        found = changes(before.found, after.found, accepted)
        found = count_again(found, tree, options.limit)
    status = report(found, before, after, accepted, options.limit)
    print(f"{time.perf_counter() - start:.0f} s, {built - start:.0f} s of them to build the base")
    return status


if __name__ == "__main__":
    sys.exit(main())
