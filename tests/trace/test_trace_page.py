"""The page of a trace in a real browser, from a file, with no network."""

import pickle
import re
from html.parser import HTMLParser

import numpy as np
import pytest
from browser import browser, keep, messages, needs_browser, pixels, until
from trace_programs import Torch, many_blocks, record_program

from arenapy import trace
from arenapy.commands.trace import main

bokeh = pytest.importorskip("bokeh")
#: Where a point of a chart is in the window, and what its axes show.
CHART = """
const chart = Bokeh.documents.map(d => d.get_model_by_name(arguments[0])).find(m => m);
const view = Bokeh.index.find_one(chart), box = view.el.getBoundingClientRect();
const [x, y] = arguments[1] || [0, 0];
return {
  x: box.x + view.frame.x_scale.compute(x), y: box.y + view.frame.y_scale.compute(y),
  across: [chart.x_range.start, chart.x_range.end], up: [chart.y_range.start, chart.y_range.end],
};
"""
#: Every element, also those in the shadow of others.
EVERYTHING = """
function all(node) {
  return [...node.querySelectorAll("*")].flatMap(
    e => e.shadowRoot ? [e, ...all(e.shadowRoot)] : [e]);
}
"""
#: The text of what pops up.
TIPS = (
    EVERYTHING
    + """
return all(document).filter(e => e.matches(".bk-Tooltip"))
  .map(e => (e.shadowRoot || e).textContent).join(" ");
"""
)
READY = """
return window.Bokeh !== undefined && Bokeh.documents.length == 2
  && Bokeh.documents.every(d => d.is_idle)
  && document.getElementById("lifetimes").offsetHeight > 200
  && document.getElementById("charts").offsetHeight > 600;
"""


def evenly(path):
    """Make a trace's events a millisecond apart.

    Else the pictures are of how the machine ran the program: where it stood still for half a
    second, the blocks of another place fill the charts.
    """
    found = trace.load(path)
    found.events["time"] = np.arange(len(found)) * 10**6
    found.save(path)


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Pages by name: of a program, of torch, of more blocks than are drawn."""
    folder = tmp_path_factory.mktemp("pages")
    evenly(record_program(folder))
    (folder / "torch.trace").write_bytes(pickle.dumps(Torch().snapshot()))
    many_blocks(folder / "many.trace", 60_000)
    found = {}
    for name in "program", "torch", "many":
        found[name] = folder / f"{name}.html"
        assert main([str(folder / f"{name}.trace"), "--html", str(found[name])]) == 0
    return found


@pytest.fixture(scope="module")
def driver():
    with browser(1280, 1700) as found:
        yield found


@pytest.fixture
def shown(request, driver, pages):
    """A page, drawn; the tests leave it as they find it."""
    address = pages[request.param].as_uri()
    if driver.current_url != address:
        driver.get(address)
    until(lambda: driver.execute_script(READY), "the charts are drawn")
    yield driver
    assert messages(driver) == []
    # Nothing was fetched, or tried to be.
    script = "return performance.getEntriesByType('resource').map(e => e.name)"
    assert driver.execute_script(script) == []


def element(driver, css):
    return driver.find_element("css selector", css)


def chart(driver, name, point=None):
    return driver.execute_script(CHART, name, point)


def point_at(driver, x, y):
    """The pointer at a point of the window, coming from beside it."""
    from selenium.webdriver import ActionChains

    actions = ActionChains(driver)
    for step in (3, 0):
        actions.w3c_actions.pointer_action.move_to_location(round(x) - step, round(y))
    return actions


def share_of(picture, colour):
    """Of the pixels of about that colour, '#rrggbb'."""
    wanted = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)])
    return float((np.abs(picture.astype(int) - wanted).max(axis=-1) < 60).mean())


class Links(HTMLParser):
    """What a page refers to outside of itself, its scripts' kinds, and its texts."""

    def __init__(self):
        super().__init__()
        self.found, self.tags = [], []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.found += [value for name, value in attributes if name in ("src", "href", "action")]


# ---- the file


def test_a_page_is_one_file(pages):
    for page in pages.values():
        text = page.read_text(encoding="utf-8")
        links = Links()
        links.feed(text)
        assert links.found == [] and "link" not in links.tags
        assert "default-src 'none'" in text and "unsafe-eval" not in text
        assert len(re.findall("sha256-", text)) >= 2
        assert len(text) < 10e6


@pytest.mark.full
def test_100_000_blocks_one_by_one_are_less_than_10_mb(tmp_path):
    many_blocks(tmp_path / "a.trace", 100_000)
    out = tmp_path / "a.html"
    assert main([str(tmp_path / "a.trace"), "--html", str(out), "--blocks", "100000"]) == 0
    text = out.read_text(encoding="utf-8")
    assert len(text) < 10e6
    assert "merged" not in text.split('id="data"')[0]


def test_names_are_text(tmp_path):
    events = np.zeros(1, trace.EVENT)
    events["operation"], events["nbytes"], events["site"] = 1, 5, 1
    name = "</script><script>alert(1)</script>"
    made = trace.Trace(events, name[:31], sites=((), (trace.Frame(f"/{name}", 3, name),)))
    made.save(tmp_path / "a.trace")
    assert main([str(tmp_path / "a.trace"), "--html", str(tmp_path / "a.html")]) == 0
    text = (tmp_path / "a.html").read_text(encoding="utf-8")
    assert "<script>alert" not in text
    assert text.count("<script") == 3 and text.count("</script>") == 3


# ---- in the browser


@needs_browser
@pytest.mark.parametrize("shown", ["program"], indirect=True)
@pytest.mark.full
def test_charts_are_drawn_in_the_colours_of_the_legend(shown):
    names = [one.text for one in shown.find_elements("css selector", "#legend span")]
    assert names[0].startswith("program.py:") and names[-1] == "reserved"
    picture = pixels(element(shown, "#charts"))
    assert share_of(picture, "#0072b2") > 0.03
    assert share_of(picture, "#e69f00") > 0.03
    assert 0.3 < share_of(picture, "#ffffff") < 0.95
    assert share_of(pixels(element(shown, "#lifetimes")), "#56b4e9") > 0.02
    keep(shown, "trace-program")
    figures = element(shown, ".figures").text
    assert "live at the peak" in figures and "reserved at the peak" in figures


@needs_browser
@pytest.mark.parametrize("shown", ["program"], indirect=True)
@pytest.mark.full
def test_tables_show_who_holds_memory_and_from_where_it_was_called(shown):
    for table in shown.find_elements("css selector", "table"):
        assert "program.py:13 remember" in table.text
    details = element(shown, "details:has(summary)")
    stack = details.find_element("css selector", "ol")
    assert not stack.is_displayed()
    details.find_element("css selector", "summary").click()
    assert stack.is_displayed()
    assert "/program.py:" in stack.text and "<module>" in stack.text


@needs_browser
@pytest.mark.parametrize("shown", ["program"], indirect=True)
@pytest.mark.full
def test_the_wheel_zooms_both_charts_and_the_arrow_goes_back(shown):
    from selenium.webdriver import ActionChains
    from selenium.webdriver.common.actions.wheel_input import ScrollOrigin

    whole = chart(shown, "map")
    before = pixels(element(shown, "#charts"))
    middle = [sum(whole["across"]) / 2, sum(whole["up"]) / 2]
    at = chart(shown, "map", middle)
    for _ in range(3):
        origin = ScrollOrigin.from_viewport(round(at["x"]), round(at["y"]))
        ActionChains(shown).scroll_from_origin(origin, 0, -240).perform()

    def width(name, axis="across"):
        low, high = chart(shown, name)[axis]
        return high - low

    full = whole["across"][1] - whole["across"][0]
    until(lambda: width("map") < 0.7 * full, "the map zooms")
    assert width("memory") == width("map")
    assert width("map", "up") < 0.7 * (whole["up"][1] - whole["up"][0])
    assert (pixels(element(shown, "#charts")) != before).mean() > 0.05
    reset = shown.execute_script(EVERYTHING + """
        const box = all(document).find(e => e.matches(".bk-tool-icon-reset"))
          .getBoundingClientRect();
        return [box.x + box.width / 2, box.y + box.height / 2];
    """)  # fmt: skip
    point_at(shown, *reset).click().perform()
    until(lambda: width("map") == full, "the map is whole again")


@needs_browser
@pytest.mark.parametrize("shown", ["program"], indirect=True)
def test_the_pointer_tells_about_a_block(shown):
    """One that is kept to the end, and lies alone: at the right side, in the colour of its site."""
    column = shown.execute_script("""
        const chart = Bokeh.documents.map(d => d.get_model_by_name("map")).find(m => m);
        const data = chart.renderers.find(r => r.name == "blocks").data_source.data;
        const at = data.site.findIndex(s => s.endsWith("remember"));
        return [(data.left[at] + data.right[at]) / 2, (data.bottom[at] + data.top[at]) / 2,
                data.size[at]];
    """)
    at = chart(shown, "map", column[:2])
    point_at(shown, at["x"], at["y"]).perform()
    text = until(lambda: shown.execute_script(TIPS), "something pops up")
    assert "program.py:13 remember" in text
    assert column[2] in text and "not freed" in text
    assert "0x7" in text and "thread" in text


@needs_browser
@pytest.mark.parametrize("shown", ["torch"], indirect=True)
@pytest.mark.full
def test_segments_far_apart_are_drawn_side_by_side(shown):
    """164 TiB of addresses, 20 MiB of blocks: both segments are on the map, named at its side."""
    height = chart(shown, "map")["up"][1]
    assert 18 << 20 < height < 30 << 20
    for address in Torch.LOW, Torch.HIGH:
        assert shown.execute_script(
            "const c = Bokeh.documents.map(d => d.get_model_by_name('map')).find(m => m);"
            "const side = c.right.find(a => a.type == 'LinearAxis');"
            "return JSON.stringify([...side.major_label_overrides.values()])"
        ).count(f"{address:#x}") == 1  # fmt: skip
    keep(shown, "trace-torch")
    assert share_of(pixels(element(shown, "#charts")), "#0072b2") > 0.05


@needs_browser
@pytest.mark.parametrize("shown", ["many"], indirect=True)
@pytest.mark.full
def test_what_is_merged_is_drawn_and_told(shown):
    notes = element(shown, "#notes").text
    assert "The map shows the 20,000 blocks with the largest rectangles" in notes
    assert "40,000 others" in notes
    assert "arenapy run --trace FILE --sites" in notes
    keep(shown, "trace-many")
    assert share_of(pixels(element(shown, "#charts")), "#ffffff") < 0.9
