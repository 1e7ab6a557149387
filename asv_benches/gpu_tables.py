"""The documentation's tables of figures about GPUs, made from the results file.

    python asv_benches/gpu_tables.py [--check]

Writes docs/gpu_figures.md. With --check writes nothing: the exit status is 1 if the page is not
what the results file says; and it says so, without failing, if what was measured has changed since.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

if not __package__:  # run as a script
    sys.path.append(str(Path(__file__).resolve().parents[1]))

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).with_name("gpu_results.json")
PAGE = ROOT / "docs" / "gpu_figures.md"
MEASURED = ("arenapy/cuda", "arenapy/demo")  # what the figures are of

HEAD = """\
# Figures of a GPU

Made by `asv_benches/gpu_tables.py` from `asv_benches/gpu_results.json`, which
`asv_benches/gpu_report.py` and `gpu_replay.py` write. Medians of rounds in shuffled order; what is
compared took turns in one run. "Target" is what was promised before it was measured.
"""
TITLES = {
    "latency": "A block, made and dropped at once",
    "copies": "Copies, big files, managed memory",
    "pipeline": "The staging pipeline",
    "replay": "Memory: replayed traces",
}
ABOUT = {
    "latency": "From Python, the loop included. Blocks that stay, and kernels that run meanwhile, "
    "are not shown.",
    "copies": "Times of large copies are the device's, the others the wall's. A managed range is "
    "written by the host, filled by a kernel and read by the host again.",
    "pipeline": "`arenapy demo --gpu`: 1,000 batches of 8 MiB are filled, copied and computed.",
    "replay": "The most bytes taken of the device, over the most bytes live; in brackets what the "
    "allocator says that it has reserved, where that is less: the driver maps 2 MiB at a time. "
    "`torch training` was recorded by torch's memory history (`torch_training_trace.py`); the "
    "random ones follow the rule of RMM's benchmark.",
}
VERSIONS = ("numpy", "cuda-bindings", "cuda-core", "cupy-cuda13x", "torch", "rmm-cu13")


def stamped(stamp):
    """What a section was measured on."""
    versions = ", ".join(f"{name} {stamp[name]}" for name in VERSIONS if stamp.get(name))
    return (
        f"{stamp['gpu']}, driver {stamp['driver']}, {stamp['cpu']} ({stamp['cores']} cores), "
        f"Linux {stamp['kernel']}, Python {stamp['python']}; {versions}; commit "
        f"{stamp['commit'][:12]}, {stamp['date']}."
    )


def figure(value):
    """Three digits, or all of a whole number."""
    return f"{value:,.0f}" if value == int(value) or value >= 100 else f"{value:.3g}"


def table(heads, rows):
    """Of Markdown; the first column is text."""
    yield "| " + " | ".join(heads) + " |"
    yield "| --- |" + " ---: |" * (len(heads) - 1)
    for row in rows:
        yield "| " + " | ".join(row) + " |"


def of_lines(found):
    """Lines of the report."""
    rows = []
    for line in found["lines"]:
        sense = "≥" if line["at_least"] else "≤"
        unit = line["unit"].replace("us", "µs")
        target = "" if line["limit"] is None else f"{sense} {line['limit']:g} {unit}"
        met = {"met": "yes", "MISSED": "**no**"}.get(line["verdict"], "")
        rows.append((line["what"], f"{figure(line['value'])} {unit}", target, met))
    return table(("", "measured", "target", "kept"), rows)


def of_accounts(found):
    """What an allocator has taken, and what it says."""
    if "ratio" not in found:
        return ""
    said, of_device = f"{found['ratio']:.3f}", f"{found['device_ratio']:.3f}"
    return said if float(of_device) <= float(said) else f"{of_device} ({said})"


def of_traces(found):
    """Ratios of allocators (columns) on traces."""
    names = list(found["traces"][0]["results"])
    names = [name for name in names if name not in ("loop", "rmm-arena")]
    rows = []
    for trace in found["traces"]:
        cells = [of_accounts(trace["results"].get(name, {})) for name in names]
        rows.append((trace["trace"], *cells, "yes" if trace["kept"] else "**no**"))
    heads = ("", *names, "arenapy no worse than torch, CuPy and RMM's pool")
    return table(heads, rows)


def page(results):
    """All of it, as text."""
    lines = [HEAD]
    for section, title in TITLES.items():
        if section in results:
            found = results[section]
            made = of_traces(found) if section == "replay" else of_lines(found)
            lines += [f"## {title}", "", ABOUT[section], "", *made, "", stamped(found["stamp"]), ""]
    return "\n".join(lines).rstrip() + "\n"


def changed_since(commit):
    """Files that were measured and are not what they were; None: git cannot say."""
    command = ["git", "-C", str(ROOT), "diff", "--name-only", commit, "--", *MEASURED]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.split() if done.returncode == 0 else None


def main():
    """Write the page, or check it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    results = json.loads(RESULTS.read_text())
    text = page(results)
    if not options.check:
        PAGE.write_text(text)
        return 0
    for commit in sorted({found["stamp"]["commit"] for found in results.values()}):
        changed = changed_since(commit)
        if changed is None:
            print(f"note: git does not know {commit[:12]}, which the figures of GPUs are of")
        elif changed:
            print(f"note: figures of GPUs are of {commit[:12]}; since then {len(changed)} measured "
                  f"files have changed ({', '.join(changed[:5])}): run gpu_report.py")  # fmt: skip
    if not PAGE.exists() or PAGE.read_text() != text:
        print(f"{PAGE.name} is not what {RESULTS.name} says: run python asv_benches/gpu_tables.py")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
