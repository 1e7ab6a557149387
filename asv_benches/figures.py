"""The documentation's figures, made from the results files.

    python asv_benches/figures.py [--check]

Writes docs/host_figures.md, numpy_figures.md, gpu_figures.md and claims.md, the table of README.md,
and every figure elsewhere whose link names a row of one of those pages, as in

    [55 GB/s](gpu_figures.md#copies-big-files-managed-memory "Pinned region, to the device")

With --check writes nothing: the exit status is 1 if something is not what the results files say;
and it says so, without failing, if what was measured has changed since.
"""

import argparse
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HERE = Path(__file__).parent
DOCS = ROOT / "docs"
TEXT = tomllib.loads((HERE / "figures.toml").read_text())
#: Results file: what the figures are of.
MEASURED = {
    "host_results.json": (
        "arenapy",
        ":!arenapy/cuda",
        ":!arenapy/commands/demo",
        ":!arenapy/testing",
    ),
    "numpy_results.json": (
        "arenapy",
        ":!arenapy/cuda",
        ":!arenapy/commands/demo",
        ":!arenapy/testing",
    ),
    "gpu_results.json": ("arenapy/cuda", "arenapy/commands/demo"),
    "claims_results.json": ("arenapy/cuda", "arenapy/commands/demo"),
}
#: What is made of it, beside claims: the page's name in figures.toml.
PAGES = {"host": "host_results.json", "numpy": "numpy_results.json", "gpu": "gpu_results.json"}
GENERATED = {DOCS / f"{key}_figures.md" for key in PAGES} | {DOCS / "claims.md"}
VERSIONS = ("numpy", "pyarrow")
GPU_VERSIONS = ("cuda-bindings", "cuda-core", "cupy-cuda13x", "torch", "rmm-cu13")
BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"
ONLY_SHOWN = ("loop", "rmm-arena")  # of the replays: what is no allocator, or is not compared
#: A figure in the text of a page: what is shown, page, section, and the row in either quotes.
SHOWN = re.compile(r"\[([^][]+)\]\(((?:docs/)?(\w+)\.md#([\w-]+)) (\"[^\"]+\"|'[^']+')\)")


def results_of(name):
    """A results file; empty if there is none."""
    path = HERE / name
    return json.loads(path.read_text()) if path.exists() else {}


def stamped(stamp, with_gpu=True):
    """What a section was measured on; a GPU that it does not use is left out."""
    with_gpu = with_gpu and stamp.get("gpu")
    gpu = f"{stamp['gpu']}, driver {stamp['driver']}, " if with_gpu else ""
    names = VERSIONS + (GPU_VERSIONS if with_gpu else ())
    versions = ", ".join(f"{name} {stamp[name]}" for name in names if stamp.get(name))
    return (
        f"{gpu}{stamp['cpu']} ({stamp['cores']} cores), Linux {stamp['kernel']}, "
        f"Python {stamp['python']}; {versions}; commit {stamp['commit'][:12]}, {stamp['date']}."
    )


def figure(value):
    """Three digits, or all of a whole number."""
    return f"{value:,.0f}" if value == int(value) or value >= 100 else f"{value:.3g}"


def measured(line):
    """A figure with its unit; what has none is a number."""
    unit = line["unit"].replace("us", "µs")
    return figure(line["value"]) + ("" if unit == "1" else f" {unit}")


def short(line):
    """The same for a sentence: two digits are enough there."""
    value = line["value"]
    unit = {"1": "", "x": " times", "us": " µs", "%": " %"}.get(line["unit"], f" {line['unit']}")
    whole = value >= 10 or value == int(value)
    return (f"{value:,.0f}" if whole else f"{value:#.2g}") + unit


def anchor(title):
    """What a heading is linked by."""
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
        sense = "≥" if line["at_least"] else "≤"
        unit = line["unit"].replace("us", "µs")
        target = "" if line["limit"] is None else f"{sense} {line['limit']:g} {unit}"
        met = {"met": "yes", "MISSED": "**no**"}.get(line["verdict"], "")
        rows.append((line["what"].replace("|", "\\|"), measured(line), target, met))
    return table(("", "measured", "target", "kept"), rows)


def of_accounts(found):
    """What an allocator has taken, and what it says."""
    if "ratio" not in found:
        return ""
    said, of_device = f"{found['ratio']:.3f}", f"{found['device_ratio']:.3f}"
    return said if float(of_device) <= float(said) else f"{of_device} ({said})"


def of_traces(found):
    """Ratios of allocators (columns) on traces."""
    names = [name for name in found["traces"][0]["results"] if name not in ONLY_SHOWN]
    rows = []
    for trace in found["traces"]:
        cells = [of_accounts(trace["results"].get(name, {})) for name in names]
        rows.append((trace["trace"], *cells, "yes" if trace["kept"] else "**no**"))
    heads = ("", *names, "arenapy no worse than torch, CuPy and RMM's pool")
    return table(heads, rows)


def of_cells(found):
    """A table that was stored as such."""
    return table(found["head"], found["rows"])


def made_of(found):
    """The table of a section."""
    made = {"traces": of_traces, "rows": of_cells, "lines": of_lines}
    return next(make(found) for key, make in made.items() if key in found)


def once(results, with_gpu=True):
    """What all sections were measured on, if that is one machine and one commit; else None."""
    said = {stamped(found["stamp"], with_gpu) for found in results.values()}
    return said.pop() if len(said) == 1 else None


def sections(text, results):
    """A page of sections of a results file, each with its machine."""
    with_gpu = text["of_a_gpu"]
    same = once(results, with_gpu)
    lines = [f"# {text['title']}", "", text["head"], *([same, ""] if same else [])]
    for section, told in text["sections"].items():
        if section in results:
            found = results[section]
            lines += [f"## {told['title']}", "", told["about"], *made_of(found), ""]
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
    lines += ["| said | here |", "| --- | --- |", *(f"| {a} | {b} |" for a, b in rows), ""]
    for key, why in text["why"].items():
        if key not in results:
            continue
        found = results[key]
        lines += [f"## {found['said']}", "", f"It {found['verdict']}.", why]
        told = {None: "", True: "yes", False: "no"}
        rows = [(one["what"], measured(one), told[one["kept"]]) for one in found["figures"]]
        lines += [*table(("", "measured", "as said"), rows), ""]
        lines += [] if same else [stamped(found["stamp"]), ""]
    return "\n".join(lines).rstrip() + "\n"


def readme(text, readme_text, results):
    """README.md with its table made anew; as it was while there are no results."""
    if not results:
        return readme_text
    values = {}
    for section, found in results.items():
        for line in found["lines"]:
            values[section, line["what"]] = line
    rows = []
    for row in text:
        one = values[tuple(row["ours"])]
        first = row["what"], measured(one)
        for name, *key in row["beside"]:
            peer = values[tuple(key)]
            ratio = one["value"] / peer["value"]
            rows.append((*first, f"{name}: {measured(peer)}", f"{ratio:.2f}"))
            first = "", ""
    lines = [*table(("", "arenapy", "beside it", "ratio"), rows), ""]
    lines.append(stamped(next(iter(results.values()))["stamp"], with_gpu=False))
    before, _, rest = readme_text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + "\n\n" + "\n".join(lines) + "\n\n" + END + after


def rows_of(found):
    """{row: what a sentence shows of it}; of a table of many columns "row: column"."""
    shown = {}
    for line in [*found.get("lines", ()), *found.get("figures", ())]:
        shown.setdefault(line["what"], short(line))
    for trace in found.get("traces", ()):
        for name, one in trace["results"].items():
            shown[f"{trace['trace']}: {name}"] = of_accounts(one).partition(" ")[0]
    for row in found.get("rows", ()):
        for head, cell in zip(found["head"], row, strict=True):
            shown.setdefault(f"{row[0]}: {head}", cell)
    return shown


def every_row():
    """{(page, section): rows_of it} of all results."""
    rows = {}
    for key, name in PAGES.items():
        for section, told in TEXT[key]["sections"].items():
            found = results_of(name).get(section, {})
            rows[f"{key}_figures", anchor(told["title"])] = rows_of(found)
    for found in results_of("claims_results.json").values():
        rows["claims", anchor(found["said"])] = rows_of(found)
    return rows


def in_text(text, rows):
    """A page with the figures in its sentences made anew."""

    def one(match):
        _, link, page, section, row = match.groups()
        if (page, section) not in rows or row[1:-1] not in rows[page, section]:
            raise SystemExit(f"no results say {row} in {page}.md#{section}")
        return f"[{rows[page, section][row[1:-1]]}]({link} {row})"

    return SHOWN.sub(one, text)


def pages():
    """{path: text} of all that is made."""
    host, numpy, gpu, said = (results_of(name) for name in MEASURED)
    path = ROOT / "README.md"
    rows = every_row()
    made = {path: in_text(readme(TEXT["readme"], path.read_text(), host), rows)}
    for page in sorted(set(DOCS.glob("*.md")) - GENERATED):
        if SHOWN.search(page.read_text()):
            made[page] = in_text(page.read_text(), rows)
    if host:
        made[DOCS / "host_figures.md"] = sections(TEXT["host"], host)
    if numpy:
        made[DOCS / "numpy_figures.md"] = sections(TEXT["numpy"], numpy)
    if gpu:
        made[DOCS / "gpu_figures.md"] = sections(TEXT["gpu"], gpu)
    if said:
        made[DOCS / "claims.md"] = claims(TEXT["claims"], said)
    return made


def changed_since(commit, paths):
    """Files that were measured and are not what they were; None: git cannot say."""
    command = ["git", "-C", str(ROOT), "diff", "--name-only", commit, "--", *paths]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.split() if done.returncode == 0 else None


def tell_what_changed():
    """Say of which results the measured files are not what they were."""
    for name, paths in MEASURED.items():
        for commit in sorted({found["stamp"]["commit"] for found in results_of(name).values()}):
            changed = changed_since(commit, paths)
            if changed is None:
                print(f"note: git does not know {commit[:12]}, which figures in {name} are of")
            elif changed:
                print(
                    f"note: figures in {name} are of {commit[:12]}; since then {len(changed)} "
                    f"measured files have changed ({', '.join(changed[:5])}): measure again"
                )


def main():
    """Write the pages, or check them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    code = 0
    for path, made in pages().items():
        if not options.check:
            path.write_text(made)
        elif not path.exists() or path.read_text() != made:
            print(f"{path.name} is not what the results say: run python asv_benches/figures.py")
            code = 1
    if options.check:
        tell_what_changed()
    return code


if __name__ == "__main__":
    sys.exit(main())
