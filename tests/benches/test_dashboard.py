"""The dashboard of the committed results: all benchmarks, several commits, peers, no network."""

import json
import re
import shutil
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager
from html.parser import HTMLParser
from urllib.request import urlopen

import asv_suite
import pytest
from browser import SOON, browser, keep, messages, needs_browser, until

pytest.importorskip("asv")

from asv.machine import MachineCollection

from asv_benches.dashboard import dashboard, history, look, offline

GPU = "reference-h200/index.html"  # the pages of the other machine
#: A graph, and lines in it: ours and a peer's.
GRAPHS = {
    "host.bench_latency.Block.track_call": ("arena.alloc(64)", "bytearray(64)"),
    "instructions.bench_instructions.Block.track_instructions": (
        "pool.alloc(64)",
        "np.empty(64, 'u1')",
    ),
    "numpy_programs.bench_numpy.Expression.track_run": ("arenapy", "mimalloc"),
    "host.bench_faults.Faults.track_array": ("64 KiB; arena", "64 KiB; np.empty"),
    "host.bench_export.Export.track_call": ("memoryview(b)", "memoryview(bytearray)"),
    "gpu.bench_gpu.Block.track_block": ("arenapy.Pool", "torch.empty"),
}
RESULTS = dashboard.RESULTS
NAMES = [one.name for one in asv_suite.discover()]

has_packages = pytest.mark.skipif(
    bool(offline.missing()), reason=f"no {' '.join(offline.missing())} here"
)


# ---- what is committed


def figures(results=RESULTS, machine="*"):
    """{benchmark: {commit: whether there is a figure}}, of the version that the benchmark has."""
    known = json.loads((results / "benchmarks.json").read_text())
    known.pop("version")
    found = {name: {} for name in known}
    for commit, paths in dashboard.commits_of(results).items():
        for path in paths:
            if not path.match(f"{machine}/*"):
                continue
            one = json.loads(path.read_text())
            columns = one["result_columns"]
            for name, row in one["results"].items():
                entry = dict(zip(columns, row, strict=False))
                if name in known and entry["version"] == known[name]["version"]:
                    values = entry["result"] or []
                    found[name][commit] = any(isinstance(value, int | float) for value in values)
    return found


def lacking(found):
    """What a dashboard of these figures would not show."""
    said = [f"{name} is not in the results" for name in NAMES if name not in found]
    said += [f"{name} is in the results and nowhere else" for name in found if name not in NAMES]
    for name, commits in found.items():
        if name in GRAPHS and sum(commits.values()) < dashboard.least_commits(name):
            said.append(f"{name} has figures of {sum(commits.values())} commits")
    return said


def test_the_results_have_every_benchmark_and_enough_commits_of_the_main_ones():
    """If not: `dashboard.py run`, or for what only has another name `dashboard.py list`."""
    assert lacking(figures()) == []


def test_what_the_results_lack_is_found(monkeypatch):
    found = figures()
    name = next(iter(GRAPHS))
    names = list(NAMES)
    monkeypatch.setattr("test_dashboard.NAMES", [*names, "host.bench_new.track_it"])
    assert lacking(found) == ["host.bench_new.track_it is not in the results"]
    monkeypatch.setattr("test_dashboard.NAMES", [one for one in names if one != name])
    assert lacking(found) == [f"{name} is in the results and nowhere else"]
    monkeypatch.undo()
    found[name] = dict.fromkeys(list(found[name])[:4], True)
    assert lacking(found) == [f"{name} has figures of 4 commits"]


def test_a_graph_of_the_host_has_five_commits(tmp_path, capsys):
    """A GPU's has three. What has fewer is named, and has no graph."""
    for machine in dashboard.machines(RESULTS):
        part = dashboard.of_machine(RESULTS, machine, tmp_path)
        shown = set(json.loads((part / "benchmarks.json").read_text())) - {"version"}
        counts = {name: sum(of.values()) for name, of in figures(machine=machine).items()}
        least = {name: 3 if name.startswith("gpu.") else 5 for name in counts}
        assert shown == {name for name, count in counts.items() if count >= least[name]}
        few = {name for name, count in counts.items() if 0 < count < least[name]}
        named = capsys.readouterr().out.rpartition(": ")[2]
        assert few == {*filter(None, named.strip().split(", "))}
        assert shown >= {name for name in GRAPHS if counts[name]}


def test_the_results_are_small_and_name_no_place():
    files = list(RESULTS.rglob("*.json"))
    assert sum(path.stat().st_size for path in files) < 2_000_000
    for path in files:
        text = path.read_text()
        assert not re.search(r'"[^"]*(/home/|/root\b|/tmp/|/usr/)', text), path.name
    assert all(path.name.startswith("reference") for path in RESULTS.iterdir() if path.is_dir())


def test_results_of_a_python_that_was_there_do_not_say_where(tmp_path):
    place = "/opt/somebody/bin/python"
    found = {"commit_hash": "12345678abc", "env_name": f"existing-py{place.replace('/', '_')}",
             "python": place, "params": {"machine": "m", "python": place}}  # fmt: skip
    path = tmp_path / f"12345678-{found['env_name']}.json"
    path.write_text(json.dumps(found))
    dashboard.forget_place(path)
    (left,) = tmp_path.iterdir()
    assert "somebody" not in left.name + left.read_text()
    assert json.loads(left.read_text())["params"]["machine"] == "m"


# ---- the site


class Links(HTMLParser):
    """What a page loads: scripts, styles, pictures, frames."""

    def __init__(self):
        super().__init__()
        self.found = []

    def handle_starttag(self, tag, attributes):
        if tag in ("script", "link", "img", "iframe"):
            self.found += [value for name, value in attributes if name in ("src", "href")]


def loaded(page):
    """The addresses of what a page loads, and of what its local styles load."""
    links = Links()
    links.feed(page.read_text())
    found = list(links.found)
    for address in links.found:
        style = page.parent / address.partition("?")[0]
        if style.suffix == ".css" and style.is_file():
            found += re.findall(r"(?:url\(|@import\s*)[\"']?([^\"')]+)", style.read_text())
    return found


def remote(page):
    return [address for address in loaded(page) if re.match(r"(\w+:)?//", address)]


def shown_lines(driver):
    """{label: points} of the graph that is shown."""
    return driver.execute_script("""
        const plot = window.$ && $("#main-graph").data("plot");
        return plot ? Object.fromEntries(plot.getData().map(
          one => [one.label, one.data.filter(p => p[1] !== null).length])) : {};
    """)


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    site = tmp_path_factory.mktemp("dashboard") / "site"
    dashboard.publish(site)
    return site


@contextmanager
def served(site):
    """The address of a site."""
    with dashboard.server(site) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(scope="module")
def shown(published):
    with served(published) as address, browser(1280, 1000) as driver:
        driver.address = address
        driver.get(address)
        yield driver


def go_to(driver, name):
    """The graph of a benchmark, on a page that has not shown another one."""
    driver.get("about:blank")
    driver.get(f"{driver.address}{GPU if name.startswith('gpu.') else ''}#{name}")
    until(lambda: shown_lines(driver), "a graph is drawn")


@has_packages
def test_pages_load_nothing_from_elsewhere(published):
    pages = list(published.glob("*.html"))
    assert len(pages) >= 2
    for page in pages:
        assert remote(page) == []
        for address in loaded(page):
            assert (
                address.startswith("data:")
                or address.startswith("../fonts")
                or (page.parent / address.partition("?")[0]).is_file()
            ), address


@has_packages
def test_a_remote_tag_is_found_and_not_published(published, tmp_path):
    page = tmp_path / "index.html"
    shutil.copytree(published, tmp_path, dirs_exist_ok=True)
    address = "https://cdn.example.org/new.js"
    page.write_text(
        page.read_text().replace("</head>", f'<script src="{address}"></script></head>')
    )
    assert remote(page) == [address]
    with pytest.raises(offline.MissingAssets, match=r"new\.js.*does not know"):
        offline.localize(tmp_path)


@has_packages
@needs_browser
@pytest.mark.parametrize(("machine", "page"), [("reference", ""), ("reference-h200", GPU)])
def test_the_grid_shows_every_benchmark_with_a_graph(shown, machine, page):
    shown.get(shown.address + page)
    wanted = {name for name, commits in figures(machine=machine).items()
              if sum(commits.values()) >= dashboard.least_commits(name)}  # fmt: skip
    assert wanted
    count = "return document.querySelectorAll('.benchmark-container').length"
    until(lambda: shown.execute_script(count) == len(wanted), "the grid is there")
    links = shown.find_elements("css selector", ".benchmark-container")
    assert {one.get_attribute("href").partition("#")[2] for one in links} == wanted
    keep(shown, f"dashboard-grid-{machine}")
    # Each is drawn when it comes into view, if it has figures.
    height = shown.execute_script("return document.documentElement.scrollHeight")
    for top in range(0, height, 800):
        shown.execute_script(f"window.scrollTo(0, {top}); $(window).trigger('scroll')")
    drawn = "return [...document.querySelectorAll('.benchmark-container')]" \
            ".filter(e => e.querySelector('canvas')).map(e => e.hash.slice(1))"  # fmt: skip
    until(lambda: wanted <= {*shown.execute_script(drawn)}, "the graphs are drawn")


@has_packages
@needs_browser
@pytest.mark.parametrize("name", GRAPHS)
def test_a_graph_has_points_of_commits_and_peers(shown, name):
    go_to(shown, name)
    ours, peer = GRAPHS[name]

    def points(label):
        lines = shown_lines(shown)
        return max((n for line, n in lines.items() if label in line), default=0)

    for label in ours, peer:
        least = dashboard.least_commits(name)
        until(lambda label=label, n=least: points(label) >= n, f"{label} is drawn")
    unit = json.loads((RESULTS / "benchmarks.json").read_text())[name]["unit"]
    assert unit in ("faults", "instructions", "ms", "μs", "ns")
    keep(shown, f"dashboard-{name.split('.')[1]}")


@has_packages
@needs_browser
def test_newer_scripts_than_asvs_show_the_same(shown):
    """Debian's jQuery and flot: names of benchmarks, a legend that can be read, labels once."""
    go_to(shown, next(iter(GRAPHS)))
    found = shown.execute_script("""
        const fill = e => getComputedStyle(e).fill;
        return {
          carets: [...document.querySelectorAll("label.nav-header b")].map(e => e.textContent),
          legend: fill(document.querySelector(".legendLayer .background")),
          entry: fill(document.querySelector(".legendLayer text")),
          labels: [...document.querySelectorAll("#main-graph *")].filter(
            e => !e.children.length && /^(commits|ns)$/.test(e.textContent)).length,
        };
    """)
    assert found["carets"] and not any(found["carets"])  # else the names are inside, and clipped
    assert found["legend"] == "rgb(255, 255, 255)" != found["entry"]
    assert found["labels"] == 2


@has_packages
@needs_browser
def test_nothing_was_asked_of_a_network(shown):
    shown.get(shown.address)
    names = "return performance.getEntriesByType('resource').map(e => e.name)"
    until(lambda: shown.execute_script(names), "something is loaded")
    assert all(one.startswith(shown.address) for one in shown.execute_script(names))
    for name in GRAPHS:
        go_to(shown, name)
    assert messages(shown) == []


@has_packages
@needs_browser
@pytest.mark.parametrize("page", ["", "#summarylist", "#regressions", f"#{next(iter(GRAPHS))}"])
def test_a_phone_shows_the_whole_menu_and_nothing_beside_the_page(shown, page):
    phone = {"width": 390, "height": 800, "deviceScaleFactor": 1, "mobile": True}
    shown.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", phone)
    try:
        shown.get("about:blank")
        shown.get(shown.address + page)
        drawn = "return document.querySelectorAll('canvas, table td').length"
        until(lambda: shown.execute_script(drawn), "there is something to see")
        keep(shown, f"dashboard-phone-{page.strip('#').partition('.')[0] or 'grid'}")
        widths = "return [document.documentElement.scrollWidth, innerWidth]"
        assert shown.execute_script(widths) == [390, 390]
        boxes = shown.execute_script("""
            return [...document.querySelectorAll("nav li")].map(e => e.getBoundingClientRect());
        """)
        for box in boxes:
            assert 0 <= box["left"] < box["right"] <= 390
            others = [one for one in boxes if one["top"] > box["top"]]
            assert all(one["top"] >= box["bottom"] for one in others)
        below = "return document.querySelector('nav').getBoundingClientRect().bottom"
        assert boxes[-1]["bottom"] <= shown.execute_script(below)
        beside = shown.execute_script("""
            return [...document.querySelectorAll("table.table td, table.table th")]
              .map(e => e.getBoundingClientRect().right).filter(right => right > innerWidth);
        """)
        assert not beside
        if canvas := shown.find_elements("css selector", "#overview canvas"):
            menu = shown.find_element("id", "graphdisplay-navigation")
            overview = canvas[0].rect
            assert overview["y"] + overview["height"] <= menu.rect["y"]
    finally:
        shown.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


@has_packages
@needs_browser
def test_arenapys_lines_come_first_and_stand_out(shown):
    go_to(shown, next(iter(GRAPHS)))
    found = shown.execute_script("""
        return $("#main-graph").data("plot").getData().map((one, i) => [
          one.label, one.lines.lineWidth,
          getComputedStyle($("#main-graph .legendLayer text")[i]).fontWeight]);
    """)
    assert found[:3] == [[f"{call}", 3, "700"] for call in
                         ("arena.alloc(64)", "slab.alloc()", "pool.alloc(64)")]  # fmt: skip
    assert {(width, weight) for _, width, weight in found[3:]} == {(1.25, "400")}
    # The 1,000 of an axis has no exponent.
    go_to(shown, "instructions.bench_instructions.Block.track_instructions")
    texts = "return [...document.querySelectorAll('#main-graph text')].map(e => e.textContent)"
    ticks = shown.execute_script(texts)
    assert "1,000" in ticks and not [one for one in ticks if "e+" in one]
    # For lines of Python's: what only peers do is no regression.
    ours = re.compile(look.OURS)
    for line in ("'arenapy.Pool'", "'np.asarray(b)'", "'b[64:128]'", "'pool.alloc(4 KiB)'"):
        assert ours.search(line), line
    for line in ("'CuPy MemoryPool.malloc'", "'RMM PoolMemoryResource'", "'bytearray(64)'",
                 "'np.frombuffer(bytearray)'", "'memoryview(bytearray)[64:128]'"):  # fmt: skip
        assert not ours.search(line), line


def test_what_only_a_peer_does_is_no_regression():
    """And a benchmark without a line of arenapy's is judged: it measures nothing else."""
    ignored = [re.compile(one) for one in dashboard.peers(RESULTS)]

    def judged(line):
        return not any(one.match(line) for one in ignored)

    assert judged("gpu.bench_gpu.Block.track_block('arenapy.Pool', '4 KiB')")
    assert not judged("gpu.bench_gpu.Block.track_block('torch.empty', '4 KiB')")
    assert judged("host.bench_lifetime.Kept.track_bytes_over_kept_bytes")
    assert judged("host.bench_lifetime.Lifetime.track_reach('equal sizes')")


def test_what_is_written_about_a_machine_is_told_to_asv(tmp_path, monkeypatch):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "machine.json").write_text('{"machine": "mine", "cpu": "a fast one"}')
    assert dashboard.described("mine", tmp_path) == {"machine": "mine", "cpu": "a fast one"}
    assert dashboard.described("other", tmp_path) == dashboard.described(None, tmp_path) == {}
    home = tmp_path / "machines.json"
    monkeypatch.setattr(MachineCollection, "get_machine_file_path", lambda: str(home))
    assert dashboard.machine_arguments("reference") == ["--machine", "reference"]
    assert "num_cpu" in json.loads(home.read_text())["reference"]


# ---- clones without the commits


def test_commits_that_are_not_there_have_stand_ins(tmp_path):
    """As in a shallow clone: all of them, in the order of their dates, under their own names."""
    there = tmp_path / "shallow"
    there.mkdir()
    folder = tmp_path / "folder"
    folder.mkdir()
    dates = {commit: json.loads(paths[0].read_text())["date"] // 1000
             for commit, paths in dashboard.commits_of(RESULTS).items()}  # fmt: skip
    repository, results = dashboard.shown(RESULTS, folder, root=there)
    log = history.git(repository, "log", "--reverse", "--format=%H %ct %s").splitlines()
    assert [line.split()[1:] for line in log] == [
        [str(date), commit] for date, commit in sorted((d, c) for c, d in dates.items())
    ]
    twins = dashboard.commits_of(results)
    assert {*twins} == {line.split()[0] for line in log}
    for twin, paths in twins.items():
        tag = history.git(repository, "describe", "--tags", "--exact-match", twin)
        (before,) = [commit for commit in dates if commit.startswith(tag)]
        old = json.loads(dashboard.commits_of(RESULTS)[before][0].read_text())
        assert json.loads(paths[0].read_text()) == old | {"commit_hash": twin}
        assert paths[0].name.startswith(twin[:8])


def test_results_of_some_commits_are_left_out(tmp_path, monkeypatch, capsys):
    lost = min(dashboard.commits_of(RESULTS))
    monkeypatch.setattr(dashboard, "unknown_commits", lambda *_: [lost])
    root, results = dashboard.shown(RESULTS, tmp_path)
    assert root == dashboard.ROOT and "left out" in capsys.readouterr().out
    assert {*dashboard.commits_of(results)} == {*dashboard.commits_of(RESULTS)} - {lost}


def test_without_results_there_is_a_reason(tmp_path):
    with pytest.raises(dashboard.Refusal, match="no results"):
        dashboard.shown(tmp_path, tmp_path)


@has_packages
def test_serve_is_one_command(tmp_path):
    """As a person has it: it publishes, says where it serves, and ends with Ctrl-C."""
    command = [sys.executable, dashboard.__file__, "serve", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            line = next(line for line in process.stdout if line.startswith("http"))
            with urlopen(line.split()[0]) as page:
                assert b"asv" in page.read()
        finally:
            process.send_signal(signal.SIGINT)
        assert process.wait(SOON) == 0
