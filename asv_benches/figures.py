"""The documentation's figures, made from the results files.

    python asv_benches/figures.py [--check]

Writes docs/host_figures.md, docs/gpu_figures.md, docs/claims.md and the table of README.md. With
--check writes nothing: the exit status is 1 if one of them is not what the results files say; and
it says so, without failing, if what was measured has changed since.
"""

import argparse
import json
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
    "host_results.json": ("arenapy", ":!arenapy/cuda", ":!arenapy/demo", ":!arenapy/testing"),
    "gpu_results.json": ("arenapy/cuda", "arenapy/demo"),
    "claims_results.json": ("arenapy/cuda", "arenapy/demo"),
}
VERSIONS = ("numpy", "pyarrow")
GPU_VERSIONS = ("cuda-bindings", "cuda-core", "cupy-cuda13x", "torch", "rmm-cu13")
BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"
ONLY_SHOWN = ("loop", "rmm-arena")  # of the replays: what is no allocator, or is not compared


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


def sections(text, results):
    """A page of sections of a results file, each with its machine."""
    lines = [f"# {text['title']}", "", text["head"]]
    for section, told in text["sections"].items():
        if section in results:
            found = results[section]
            made = of_traces(found) if "traces" in found else of_lines(found)
            lines += [f"## {told['title']}", "", told["about"], *made, ""]
            lines += [stamped(found["stamp"], text["of_a_gpu"]), ""]
    return "\n".join(lines).rstrip() + "\n"


def claims(text, results):
    """The page of claims."""
    lines = [f"# {text['title']}", "", text["head"]]
    rows = [
        (results[key]["said"], results[key]["verdict"]) for key in text["why"] if key in results
    ]
    lines += ["| said | here |", "| --- | --- |", *(f"| {a} | {b} |" for a, b in rows), ""]
    for key, why in text["why"].items():
        if key not in results:
            continue
        found = results[key]
        lines += [f"## {found['said']}", "", f"It {found['verdict']}.", why]
        told = {None: "", True: "yes", False: "no"}
        rows = [(one["what"], measured(one), told[one["kept"]]) for one in found["figures"]]
        lines += [*table(("", "measured", "as said"), rows), "", stamped(found["stamp"]), ""]
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


def pages():
    """{path: text} of all that is made."""
    host, gpu, said = (results_of(name) for name in MEASURED)
    path = ROOT / "README.md"
    made = {path: readme(TEXT["readme"], path.read_text(), host)}
    if host:
        made[DOCS / "host_figures.md"] = sections(TEXT["host"], host)
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
