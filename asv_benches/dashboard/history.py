"""Results of commits that this clone does not have: a history of stand-ins, so that they are shown.

A shallow clone, or a copy without git's folder, has none of the commits that were measured. asv
asks git for their order and nothing else. So a repository of empty commits is made, with the dates
of the results, each tagged with the name of the commit that it stands for.
"""

import json
import os
import shutil
import subprocess
from pathlib import Path

SHORT = 8
WHO = {
    f"GIT_{role}_{what}": value
    for role in ("AUTHOR", "COMMITTER")
    for what, value in (("NAME", "results"), ("EMAIL", "results@localhost"))
}


def git(repository, *arguments, date=0):
    """The output of a git command in that repository."""
    when = {f"GIT_{role}_DATE": f"{date} +0000" for role in ("AUTHOR", "COMMITTER")}
    command = ["git", "-C", str(repository), *arguments]
    environment = os.environ | WHO | when
    return subprocess.run(
        command, capture_output=True, text=True, check=True, env=environment
    ).stdout.strip()


def stand_in(results, folder):
    """(repository, results) in `folder`, with commits that stand for those of `results`."""
    repository, copy = Path(folder, "repository"), Path(folder, "results")
    repository.mkdir()
    git(repository, "init", "-q", "-b", "main")
    shutil.copytree(results, copy)
    files = {}
    for path in copy.glob("*/*.json"):
        if path.name != "machine.json":
            found = json.loads(path.read_text())
            files.setdefault((found["date"], found["commit_hash"]), []).append((path, found))
    for (date, commit), entries in sorted(files.items()):
        git(repository, "commit", "-q", "--allow-empty", "-m", commit, date=date // 1000)
        git(repository, "tag", commit[:SHORT])
        twin = git(repository, "rev-parse", "HEAD")
        for path, found in entries:
            path.unlink()
            found["commit_hash"] = twin
            path.with_name(path.name.replace(commit[:SHORT], twin[:SHORT])).write_text(
                json.dumps(found)
            )
    return repository, copy
