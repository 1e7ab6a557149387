"""Graphs of all benchmarks over commits: measure, publish, look.

    python asv_benches/dashboard/dashboard.py COMMAND

    serve             what is committed under results/, in a browser
    run --last 5      measure the last commits here, then publish; --commits REV ...: these
    gpu               measure memory of this machine's GPU
    list              write down which benchmarks there are
    publish           only make the site

asv does the work (asv.conf.json); it and its peers are in the extra `bench`. Wheels of the last 12
commits are kept. The site needs no network: see offline.py for the Debian packages that it takes
scripts from.
"""

import argparse
import collections
import functools
import http.server
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

if not __package__:  # run as a script; behind what is installed
    sys.path.append(str(Path(__file__).resolve().parents[2]))

from asv_benches.dashboard import history, look, offline

HERE = Path(__file__).resolve().parents[1]
ROOT = HERE.parent
CONF = HERE / "asv.conf.json"
RESULTS = HERE / "dashboard" / "results"
SITE = HERE / ".asv" / "html"
MEASURED = ("arenapy", "pyproject.toml")  # a commit that touches nothing else has the same figures
LEAST_COMMITS = 5  # of a graph
LEAST_GPU_COMMITS = 3  # a machine with a GPU is there for hours only
#: Minutes a commit; the others (curves, layouts, programs, threads, traces) take an hour.
USUAL = "bench_(instructions|import|latency|export|faults|lifetime|numpy|prefault)"
#: asv's own are for machines that nobody waits for. Two rounds, one up the commits and one down, so
#: that a machine that is slow for a while is not slow for one commit alone.
FEW_SAMPLES = (
    "--interleave-rounds", "-a", "rounds=2", "-a", "repeat=5", "-a", "warmup_time=0",
)  # fmt: skip


class Refusal(Exception):
    """Something cannot be done. The text says what, and what to do about it."""


def git(*arguments, root=ROOT):
    """The output of a git command."""
    command = ["git", "-C", str(root), *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stderr", None) or error
        raise Refusal(f"git {' '.join(arguments)}: {str(said).strip()}") from None


def asv(*arguments):
    """Run a command of asv; its output is shown."""
    command = [sys.executable, "-m", "asv", *arguments]
    done = subprocess.run(command, cwd=HERE)
    if done.returncode:
        raise Refusal(f"{' '.join(command)} ended with status {done.returncode}")


def commits_of(results):
    """{hash: files} of all results."""
    found = {}
    for path in sorted(Path(results).glob("*/*.json")):
        if path.name != "machine.json":
            found.setdefault(json.loads(path.read_text())["commit_hash"], []).append(path)
    return found


def unknown_commits(results, root=ROOT):
    """Of the commits that have results those that are not in the history of HEAD."""
    history = set(git("rev-list", "--first-parent", "HEAD", root=root).split())
    return [commit for commit in commits_of(results) if commit not in history]


def shown(results, folder, root=ROOT):
    """(repository, results) to publish: those of commits that this clone has, or all, with commits
    that stand for them (history.py), if it has none. Copies are made in `folder`."""
    files = commits_of(results)
    try:
        unknown = unknown_commits(results, root)
    except Refusal:  # this is not a repository
        unknown = list(files)
    if not files:
        raise Refusal(f"there are no results in {results}")
    if not unknown:
        return root, Path(results)
    if len(unknown) == len(files):
        print("note: no commit that has results is in the history of HEAD, as in a shallow clone: "
              "others stand for them, tagged with their names")  # fmt: skip
        return history.stand_in(results, folder)
    print(f"note: {len(unknown)} of {len(files)} commits with results are not in the history of "
          "HEAD, and are left out")  # fmt: skip
    copy = Path(folder, "results")
    shutil.copytree(results, copy)
    for commit in unknown:
        for path in files[commit]:
            (copy / path.relative_to(results)).unlink()
    return root, copy


def configuration(folder, **changes):
    """A file in `folder`: asv.conf.json with changes, which may be used from anywhere."""
    paths = {"repo": str(ROOT), "benchmark_dir": str(HERE), "env_dir": str(HERE / ".asv" / "env")}
    path = Path(folder, "asv.conf.json")
    path.write_text(json.dumps(json.loads(CONF.read_text()) | paths | changes))
    return str(path)


def least_commits(name):
    """With how many commits a benchmark has a graph."""
    return LEAST_GPU_COMMITS if name.startswith("gpu.") else LEAST_COMMITS


def of_machine(results, name, folder):
    """A copy, in `folder`, of one machine's results, and of the benchmarks that it can draw.

    asv would show every benchmark for every machine: empty tiles, files that are not there, and
    the machine's properties in front of each line of a legend.
    """
    copy = Path(folder, name)
    shutil.copytree(Path(results, name), copy / name)
    ran = collections.Counter(
        (benchmark, row[2])
        for path in (copy / name).glob("*-*.json")
        for benchmark, row in json.loads(path.read_text())["results"].items()
        if any(isinstance(value, int | float) for value in row[0] or [])
    )
    known = json.loads(Path(results, "benchmarks.json").read_text())
    list_version = {"version": known.pop("version")}
    commits = {key: ran[key, one["version"]] for key, one in known.items()}
    if few := [key for key, count in commits.items() if 0 < count < least_commits(key)]:
        print(f"note: {name} has measured {len(few)} benchmarks at too few commits for a graph: "
              f"{', '.join(few)}")  # fmt: skip
    kept = {key: one for key, one in known.items() if commits[key] >= least_commits(key)}
    (copy / "benchmarks.json").write_text(json.dumps(list_version | kept))
    return copy


def peers(results):
    """For asv, regular expressions of those lines whose regressions are not arenapy's.

    A benchmark without a line of arenapy's measures nothing else.
    """
    known = json.loads(Path(results, "benchmarks.json").read_text())
    known.pop("version")
    return [
        rf"{re.escape(name)}\((?!.*({look.OURS}))"
        for name, one in known.items()
        if any(re.search(look.OURS, value) for values in one["params"] for value in values)
    ]


def machines(results):
    """The names of the machines that have results, that with the most commits first."""
    count = {path.parent.name: len(list(path.parent.glob("*-*.json")))
             for path in Path(results).glob("*/machine.json")}  # fmt: skip
    return sorted(count, key=lambda name: (-count[name], name))


def publish(site=SITE, online=False, results=RESULTS):
    """Make the site of all results: the first machine's pages, and a folder for each other one."""
    if not online and (absent := offline.missing()):
        raise Refusal(
            f"the pages need files of Debian's packages: apt-get install {' '.join(absent)} "
            "(or --online: whoever looks loads them from elsewhere)"
        )
    with tempfile.TemporaryDirectory() as folder:
        repository, copy = shown(results, folder)
        first, *others = machines(copy)
        places = {first: "."} | {name: name for name in others}
        for name, place in places.items():
            part = Path(site, place)
            part_results = of_machine(copy, name, folder)
            path = configuration(
                folder, repo=str(repository), html_dir=str(part), results_dir=str(part_results),
                regressions_first_commits=dict.fromkeys(peers(part_results)),
            )  # fmt: skip
            asv("publish", "--no-pull", "--config", path)
            if not online:
                offline.localize(part)
            folders = {other: os.path.relpath(at, place) for other, at in places.items()}
            look.finish(part, name, folders)
    print(f"published: {site}")


def stale(site=SITE, results=RESULTS):
    """True if there is no site, or only one that is older than the results."""
    made = Path(site, "index.json")
    newest = max(path.stat().st_mtime for path in Path(results).rglob("*.json"))
    return not made.exists() or made.stat().st_mtime < newest


def server(site=SITE, port=0):
    """A server of the site for this machine only; `server_port` says where."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *arguments):
            pass

    handler = functools.partial(Quiet, directory=str(site))
    return http.server.ThreadingHTTPServer(("127.0.0.1", port), handler)


def serve(port, online):
    """Publish if need be, and serve until interrupted."""
    if stale():
        publish(online=online)
    with server(port=port) as found:
        print(f"http://127.0.0.1:{found.server_port}/  (Ctrl-C ends it)", flush=True)
        try:
            found.serve_forever()
        except KeyboardInterrupt:
            print()


def last_commits(count, root=ROOT):
    """The last commits of HEAD's first parents that touch what is measured, the oldest first."""
    found = git("rev-list", "--first-parent", f"-n{count}", "HEAD", "--", *MEASURED, root=root)
    return found.split()[::-1]


def described(name, results=RESULTS):
    """The description of a machine in the results, in asv's words; empty if there is none."""
    path = Path(results, name or "", "machine.json")
    known = json.loads(path.read_text()) if path.exists() else {}
    known.pop("version", None)
    return known


def machine_arguments(name):
    """asv's; the first time on a machine it is described without questions."""
    if known := described(name):  # or asv would write what it finds over that
        from asv.machine import MachineCollection

        MachineCollection.save(name, known)
        return ["--machine", name]
    named = ["--machine", name] if name else []
    asv("machine", "--yes", *named)
    return named


def run(last, bench, name, commits=()):
    """Measure commits, or the last ones, that are not measured yet, and publish."""
    commits = [git("rev-parse", f"{one}^{{commit}}").strip() for one in commits]
    commits = commits or last_commits(last)
    if not commits:
        raise Refusal(f"no commit here touches {' or '.join(MEASURED)}")
    python = "{}.{}".format(*sys.version_info)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "commits.txt")
        file.write_text("\n".join(commits) + "\n")
        asv(
            "run", f"HASHFILE:{file}", "--config", configuration(folder, results_dir=str(RESULTS)),
            "-E", f"virtualenv:{python}",
            "--skip-existing-successful", "--show-stderr", *FEW_SAMPLES,
            *(["--bench", bench] if bench else []), *machine_arguments(name),
        )  # fmt: skip
    tidy()
    print(f"{len(commits)} commits in {time.perf_counter() - start:.0f} s")
    publish()


def tidy(results=RESULTS):
    """Give each benchmark one line of asv's list, which would have twenty for it."""
    path = Path(results, "benchmarks.json")
    lines = (
        f"{json.dumps(key)}: {json.dumps(one)}" for key, one in json.loads(path.read_text()).items()
    )
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def write_list():
    """Which benchmarks there are, for the pages: also those that nobody has run yet."""
    with tempfile.TemporaryDirectory() as folder:
        path = configuration(folder, results_dir=folder)
        asv(
            "run", "--config", path, "-E", f"existing:{sys.executable}",
            "--bench", "just-discover", *machine_arguments("list"),
        )  # fmt: skip
        shutil.copy(Path(folder, "benchmarks.json"), RESULTS)
    tidy()


def gpu(name):
    """Measure the GPU with the packages of this Python; elsewhere everything is skipped."""
    commit = git("rev-parse", "HEAD").strip()
    with tempfile.TemporaryDirectory() as folder:
        asv(
            "run", "--config", configuration(folder, results_dir=str(RESULTS)),
            "-E", f"existing:{sys.executable}", "--set-commit-hash", commit, "--show-stderr",
            "--bench", "bench_gpu", *machine_arguments(name),
        )  # fmt: skip
    tidy()
    for path in RESULTS.glob(f"*/{commit[:8]}-existing-*.json"):
        forget_place(path)


def forget_place(path):
    """Give the results of a Python that was there its version for a name: asv takes its path."""
    version = "{}.{}".format(*sys.version_info)
    found = json.loads(path.read_text())
    commit = found["commit_hash"][:8]
    found["python"] = found["params"]["python"] = version
    found["env_name"] = f"existing-py{version}"
    path.unlink()
    path.with_name(f"{commit}-{found['env_name']}.json").write_text(json.dumps(found))


def main(argv=None):
    """Do what is asked for; 2 says that it cannot be done."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("serve", help="look at the results")
    one.add_argument("--port", type=int, default=8080, help="0: any that is free")
    one.add_argument("--online", action="store_true", help="scripts come from elsewhere")
    one = commands.add_parser("publish", help="make the site of the results")
    one.add_argument("--html", type=Path, default=SITE, metavar="DIR")
    one.add_argument("--online", action="store_true", help="scripts come from elsewhere")
    one = commands.add_parser("run", help="measure the last commits, and publish")
    one.add_argument("--last", type=int, default=5, metavar="N", help="commits (5)")
    one.add_argument("--commits", nargs="+", default=[], metavar="REV", help="these instead")
    one.add_argument("--bench", default=USUAL, metavar="REGEX", help=f"which ({USUAL})")
    one.add_argument("--all", action="store_true", help="every benchmark: about an hour a commit")
    one.add_argument("--machine", help="what to call this machine")
    one = commands.add_parser("gpu", help="measure this machine's GPU")
    one.add_argument("--machine", help="what to call this machine")
    commands.add_parser("list", help="write down which benchmarks there are")
    options = parser.parse_args(argv)
    try:
        if options.command == "serve":
            serve(options.port, options.online)
        elif options.command == "publish":
            publish(options.html, options.online)
        elif options.command == "run":
            bench = None if options.all else options.bench
            run(options.last, bench, options.machine, options.commits)
        elif options.command == "list":
            write_list()
        else:
            gpu(options.machine)
    except (Refusal, offline.MissingAssets) as reason:
        print(reason, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
