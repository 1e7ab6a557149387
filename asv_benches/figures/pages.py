"""The documentation's figures, made from the results files beside this one.

    python asv_benches/figures/pages.py [--check]

writes the table of README.md, and every figure in a sentence whose link names a row, as in

    [55 GB/s](gpu_figures.md#copies-big-files-managed-memory "Pinned region, to the device")

of one of the pages that Sphinx makes when it builds (host_figures, numpy_figures, gpu_figures,
claims; docs/conf.py calls `write_pages`), or as in

    [0.038 µs](asv_benches/figures/gpu.json "latency: arenapy.Pool, 1 MiB")

of a results file, where a page that Sphinx makes would not be found: in README.md. With --check it
writes nothing: the exit status is 1 if something is not what the results files say. A figure that
was measured and has changed since is told, and does not fail.
"""

import argparse
import re
import subprocess
import sys
import tomllib
from pathlib import Path

if not __package__:  # run as a script; behind what is installed
    sys.path.append(str(Path(__file__).resolve().parents[2]))

from asv_benches.support.report import figure
from asv_benches.support.results import load

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
TEXT = tomllib.loads(Path(__file__).with_name("texts.toml").read_text())
ON_THE_HOST = ("arenapy", ":!arenapy/cuda", ":!arenapy/commands/demo", ":!arenapy/testing")
ON_A_GPU = ("arenapy/cuda", "arenapy/commands/demo")
#: Results file: what its figures are of.
MEASURED = {
    "host.json": ON_THE_HOST,
    "numpy.json": ON_THE_HOST,
    "gpu.json": ON_A_GPU,
    "claims.json": ON_A_GPU,
}
PAGES = ("host", "numpy", "gpu")  # and claims
VERSIONS = ("numpy", "pyarrow")
GPU_VERSIONS = ("cuda-bindings", "cuda-core", "cupy-cuda13x", "torch", "rmm-cu13")
RUN = "asv_benches/figures/pages.py"
BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"
#: A figure in a sentence: what is shown; page and section, or a file; the row in either quotes.
SHOWN = re.compile(
    r"\[([^][]+)\]"
    r"\(((\w+_figures|claims)\.md#([\w-]+)|asv_benches/figures/(\w+\.json))"
    r" (\"[^\"]+\"|'[^']+')\)"
)


def stamped(stamp, with_gpu=True):
    """The machine of a section, in words. A GPU that the section does not use is left out."""
    with_gpu = with_gpu and stamp.get("gpu")
    gpu = f"{stamp['gpu']}, driver {stamp['driver']}, " if with_gpu else ""
    names = VERSIONS + (GPU_VERSIONS if with_gpu else ())
    versions = ", ".join(f"{name} {stamp[name]}" for name in names if stamp.get(name))
    return (
        f"{gpu}{stamp['cpu']} ({stamp['cores']} cores), Linux {stamp['kernel']}, "
        f"Python {stamp['python']}; {versions}; commit {stamp['commit'][:12]}, {stamp['date']}."
    )


def measured(line):
    """A figure with its unit; what has none is a number."""
    unit = line.unit.replace("us", "µs")
    return figure(line.value) + ("" if unit == "1" else f" {unit}")


def short(line):
    """The same for a sentence: two digits are enough there."""
    value = line.value
    unit = {"1": "", "x": " times", "us": " µs", "%": " %"}.get(line.unit, f" {line.unit}")
    whole = value >= 10 or value == int(value)
    return (f"{value:,.0f}" if whole else f"{value:#.2g}") + unit


def anchor(title):
    """The anchor of a heading, for links."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def table(heads, rows):
    """Of Markdown; the first column is text."""
    yield "| " + " | ".join(heads) + " |"
    yield "| --- |" + " ---: |" * (len(heads) - 1)
    for row in rows:
        yield "| " + " | ".join(row) + " |"


def of_lines(found):
    """Lines of a report."""
    rows = []
    for line in found["lines"]:
        unit = line.unit.replace("us", "µs")
        target = f"{line.target} {unit}" if line.target else ""
        kept = {True: "yes", False: "**no**", None: ""}[line.kept]
        rows.append((line.what.replace("|", "\\|"), measured(line), target, kept))
    return table(("", "measured", "target", "kept"), rows)


def made_of(found):
    """The table of a section."""
    return of_lines(found) if "lines" in found else table(found["head"], found["rows"])


def once(results, with_gpu=True):
    """The machine and commit of all sections, in words; None if they differ."""
    said = {stamped(found["stamp"], with_gpu) for found in results.values()}
    return said.pop() if len(said) == 1 else None


def sections(text, results):
    """A page of sections of a results file, each with its machine."""
    with_gpu = text["of_a_gpu"]
    same = once(results, with_gpu)
    lines = [f"# {text['title']}", "", text["head"], *([same, ""] if same else [])]
    for section, (title, about) in text["sections"].items():
        if section in results:
            found = results[section]
            lines += [f"## {title}", "", about, "", *made_of(found), ""]
            lines += [] if same else [stamped(found["stamp"], with_gpu), ""]
    return "\n".join(lines).rstrip() + "\n"


def claims(text, results):
    """The page of claims."""
    same = once(results)
    lines = [f"# {text['title']}", "", text["head"], *([same, ""] if same else [])]
    rows = [
        (f"[{results[key]['said']}](#{anchor(results[key]['said'])})", results[key]["verdict"])
        for key in text["why"]
        if key in results
    ]
    lines += ["| claim | here |", "| --- | --- |", *(f"| {a} | {b} |" for a, b in rows), ""]
    for key, why in text["why"].items():
        if key not in results:
            continue
        found = results[key]
        lines += [f"## {found['said']}", "", f"It {found['verdict']}.", why, ""]
        told = {None: "", True: "yes", False: "no"}
        rows = [(one.what, measured(one), told[one.kept]) for one in found["lines"]]
        lines += [*table(("", "measured", "as claimed"), rows), ""]
        lines += [] if same else [stamped(found["stamp"]), ""]
    return "\n".join(lines).rstrip() + "\n"


def readme(text, readme_text, results):
    """README.md with its table made anew; as it was while there are no results."""
    if not results:
        return readme_text
    values = {}
    for section, found in results.items():
        for line in found.get("lines", ()):
            values.setdefault((section, line.what), line)
    rows = []
    for row in text:
        one = values[tuple(row["ours"])]
        first = row["what"], measured(one)
        for name, *key in row["beside"]:
            peer = values[tuple(key)]
            ratio = one.value / peer.value
            rows.append((*first, f"{name}: {measured(peer)}", f"{ratio:.2f}"))
            first = "", ""
    lines = [*table(("", "arenapy", "compared with", "ratio"), rows), ""]
    lines.append(stamped(next(iter(results.values()))["stamp"], with_gpu=False))
    before, _, rest = readme_text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + "\n\n" + "\n".join(lines) + "\n\n" + END + after


def rows_of(found):
    """{row: what a sentence shows of it}; of a table of many columns "row: column"."""
    shown = {}
    for line in found.get("lines", ()):
        shown.setdefault(line.what, short(line))
    for row in found.get("rows", ()):
        for head, cell in zip(found["head"], row, strict=True):
            shown.setdefault(f"{row[0]}: {head}", re.sub(" x$", " times", cell.partition(" (")[0]))
    return shown


def every_row():
    """{(page, section): rows_of it} of all results, and {(file, None): {"section: row": ...}}."""
    rows = {}
    for name in MEASURED:
        key = name.removesuffix(".json")
        of_file = rows.setdefault((name, None), {})
        for section, found in load(name).items():
            shown = rows_of(found)
            of_file |= {f"{section}: {row}": value for row, value in shown.items()}
            if key in PAGES:
                title, _ = TEXT[key]["sections"][section]
                rows[f"{key}_figures", anchor(title)] = shown
            else:
                rows[key, anchor(found["said"])] = shown
    return rows


def in_text(text, rows):
    """A page with the figures in its sentences made anew."""

    def one(match):
        _, link, page, section, file, row = match.groups()
        at = rows.get((file or page, section), {})
        if row[1:-1] not in at:
            raise SystemExit(f"no results say {row} in {link}")
        return f"[{at[row[1:-1]]}]({link} {row})"

    return SHOWN.sub(one, text)


def pages():
    """{name: text} of the pages that Sphinx makes."""
    made = {f"{key}_figures.md": sections(TEXT[key], load(f"{key}.json")) for key in PAGES}
    return made | {"claims.md": claims(TEXT["claims"], load("claims.json"))}


def write_pages(made, folder=DOCS):
    """Write those of {name: text} that are not there, or are other ones."""
    for name, text in made.items():
        path = folder / name
        if not path.exists() or path.read_text() != text:
            path.write_text(text)


def written_by_hand():
    """{path: text} of the pages in the tree, and README.md, with their figures made anew."""
    rows, path = every_row(), ROOT / "README.md"
    made = {path: in_text(readme(TEXT["readme"], path.read_text(), load("host.json")), rows)}
    for page in sorted(DOCS.glob("*.md")):
        if page.name not in pages() and SHOWN.search(page.read_text()):
            made[page] = in_text(page.read_text(), rows)
    return made


def changed_since(commit, paths):
    """Files that were measured and are not what they were; None: git cannot say."""
    command = ["git", "-C", str(ROOT), "diff", "--name-only", commit, "--", *paths]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.split() if done.returncode == 0 else None


def tell_what_changed():
    """Say of which results the measured files are not what they were."""
    for name, paths in MEASURED.items():
        for commit in sorted({found["stamp"]["commit"] for found in load(name).values()}):
            changed = changed_since(commit, paths)
            if changed is None:
                print(f"note: git does not know {commit[:12]}, which figures in {name} are of")
            elif changed:
                print(
                    f"note: figures in {name} are of {commit[:12]}; since then {len(changed)} "
                    f"measured files have changed ({', '.join(changed[:5])}): measure again"
                )


def main():
    """Write the figures, or check them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    code = 0
    for path, made in written_by_hand().items():
        if not options.check:
            path.write_text(made)
        elif path.read_text() != made:
            print(f"{path.name} is not what the results say: run python {RUN}")
            code = 1
    if options.check:
        tell_what_changed()
    return code


if __name__ == "__main__":
    sys.exit(main())
