"""The page of a trace: one HTML file with charts that zoom, which asks no network for anything.

What lives here: drawing a `trace_view.View` with Bokeh (the extra ``html``), which is imported when
drawing, and putting text around it. What does not: anything that is drawn.

Why Bokeh: of the libraries whose JavaScript may be put into a page it was the only one that moved
100,000 rectangles without a GPU in less than a second a step, and whose page stayed below 10 MB.
It needs no eval, so that the page forbids itself all other code.
"""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Iterable
from hashlib import sha256
from html import escape
from importlib.resources import files
from string import Template
from typing import TYPE_CHECKING, Any

import numpy as np

from arenapy.base.text import format_bytes
from arenapy.trace.holders import Holder, format_ns
from arenapy.trace.view import View

if TYPE_CHECKING:
    from bokeh.plotting import figure as _Figure

__all__ = ["page"]

#: Okabe and Ito's, which everybody can tell apart, and grey for all others.
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#9a9a9a")
#: Of sizes, which have an order: viridis, the largest are the darkest.
RAMP = ("#fde725", "#90d743", "#35b779", "#21918c", "#31688e", "#443983", "#440154")
IDLE = "#ebebeb"
MERGED = "#808080"
KEPT = "#d55e00"
FREED = "#56b4e9"
LINE = "#444444"
MAX_SPANS = 24  # whose addresses are written beside the map
BYTES = "0.[0] ib"

NO_BOKEH = """\
a page needs Bokeh, which cannot be imported ({error}). Install it:
  python -m pip install bokeh
or, in a clone of arenapy, with the extra of this package: python -m pip install '.[html]'"""

START = """\
const items = JSON.parse(document.getElementById("data").textContent);
for (const [place, item] of Object.entries(items)) Bokeh.embed.embed_item(item, place);"""


def page(view: View, title: str) -> str:
    """A page, as HTML.

    Raises
    ------
    ImportError
        Without Bokeh.
    """
    try:
        from bokeh.embed import json_item
        from bokeh.layouts import column
        from bokeh.resources import Resources
    except ImportError as error:
        raise ImportError(NO_BOKEH.format(error=error)) from error

    memory = _memory(view)
    charts = column([memory, _map(view, memory)], sizing_mode="stretch_width")
    items = {"charts": json_item(charts), "lifetimes": json_item(_lifetimes(view))}
    inline = Resources(mode="inline", components=["bokeh"], log_level="warn", minified=True)
    library = "\n".join(inline.js_raw).replace("</script", "<\\/script")
    template = Template((files(__package__) / "page.html").read_text("utf-8"))
    return template.substitute(
        title=escape(title),
        policy="default-src 'none'; img-src data: blob:; style-src 'unsafe-inline'; script-src "
        + " ".join(_hash(script) for script in (library, START)),
        figures="\n".join(
            f"<div><b>{escape(value)}</b>{escape(what)}</div>" for value, what in view.figures()
        ),
        sentences=_paragraphs(view.sentences()),
        notes=_paragraphs(view.notes()),
        legend=_legend(view),
        peak=_table(view, view.blocks.peak),
        end=_table(view, view.blocks.moments - 1),
        data=json.dumps(items, separators=(",", ":")).replace("<", "\\u003c"),
        library=library,
        start=START,
    )


def _hash(script: str) -> str:
    """The name of a script in a Content-Security-Policy: the hash of its text."""
    return f"'sha256-{b64encode(sha256(script.encode()).digest()).decode()}'"


# ---- charts


def _palette(view: View) -> list[str]:
    """A colour for each of the view's."""
    count = len(view.colours.names)
    if view.groups.ordered:
        return [RAMP[round(one)] for one in np.linspace(0, len(RAMP) - 1, count)]
    return list(COLOURS[:count])


def _figure(view: View, tools: str, label: str, height: int, **more: Any) -> _Figure:
    """An empty chart over time."""
    from bokeh.models import AdaptiveTicker, NumeralTickFormatter
    from bokeh.plotting import figure

    fig = figure(
        height=height,
        sizing_mode="stretch_width",
        tools=tools,
        y_axis_label=label,
        min_border_left=95,
        min_border_right=150,
        output_backend="canvas",
        **more,
    )
    fig.toolbar.logo = None
    fig.outline_line_color = None
    fig.grid.grid_line_color = "#efefef"
    fig.axis.minor_tick_line_color = None
    fig.axis.axis_label_text_font_style = "normal"
    fig.axis.axis_label_text_font_size = fig.axis.major_label_text_font_size = "13px"
    fig.yaxis.ticker = AdaptiveTicker(base=1024, mantissas=[1, 2, 4, 8, 16, 32, 64, 128, 256, 512])
    fig.yaxis.formatter = NumeralTickFormatter(format=BYTES)
    fig.xaxis.formatter.use_scientific = False
    return fig


def _use_wheel(fig: _Figure) -> None:
    from bokeh.models import WheelZoomTool

    fig.toolbar.active_scroll = fig.select_one(WheelZoomTool)


def _memory(view: View) -> _Figure:
    """Live bytes over time, a layer a colour, below what was reserved."""
    from bokeh.models import ColumnDataSource, HoverTool, Label, Range1d, VAreaStep

    curves = view.curves
    live = curves.live.sum(axis=0)
    most = float(max(live.max(), 0 if curves.reserved is None else curves.reserved.max()))
    first, last = float(view.x[0]), float(view.x[-1])
    room = (last - first) * 0.01 or 1.0
    fig = _figure(
        view,
        "xpan,xwheel_zoom,xbox_zoom,reset",
        "memory",
        230,
        name="memory",
        toolbar_location=None,
        x_range=Range1d(first - room, last + room, bounds=(first - room, last + room)),
        y_range=(0, most * 1.12 or 1.0),
    )
    stacked = np.vstack([np.zeros_like(live), curves.live[view.layers]])
    heights = np.cumsum(stacked, axis=0).astype("f8")
    palette = [_palette(view)[one] for one in view.layers]
    for low, high, colour in zip(heights[:-1], heights[1:], palette, strict=True):
        source = ColumnDataSource({"x": curves.x, "y1": low, "y2": high})
        fig.add_glyph(
            source,
            VAreaStep(
                x="x", y1="y1", y2="y2", step_mode="after", fill_color=colour, fill_alpha=0.85
            ),
        )
    columns = {"x": curves.x, "live": live.astype("f8"), "text": [_at(view, x) for x in curves.x]}
    told = [("at", "@text"), ("live", "@live{0.00 ib}")]
    if curves.reserved is not None:
        columns["reserved"] = curves.reserved.astype("f8")
        told.append(("reserved", "@reserved{0.00 ib}"))
    source = ColumnDataSource(columns)
    unseen = fig.step("x", "live", source=source, mode="after", line_alpha=0)
    if curves.reserved is not None:
        fig.step(
            "x", "reserved", source=source, mode="after",
            line_color=LINE, line_width=1.5, line_dash=[6, 4],
        )  # fmt: skip
    fig.add_tools(HoverTool(renderers=[unseen], mode="vline", tooltips=told))
    peak = view.blocks.peak
    high = int(view.blocks.live[peak])
    fig.scatter([view.x[peak]], [high], size=7, color=LINE)
    right = view.x[peak] > (first + last) / 2
    fig.add_layout(
        Label(
            x=view.x[peak], y=high, x_offset=-8 if right else 8, y_offset=2,
            text=f"peak {format_bytes(high)}", text_align="right" if right else "left",
            text_font_size="13px", text_color="#1d1d1f", background_fill_color="#ffffffcc",
        )
    )  # fmt: skip
    fig.xaxis.major_label_text_font_size = "0px"
    fig.xaxis.major_tick_line_color = fig.xaxis.minor_tick_line_color = None
    _use_wheel(fig)
    return fig


def _at(view: View, x: float) -> str:
    return f"event {x:,.0f}" if view.by_events else f"{x:.6g} {view.unit}"


def _map(view: View, memory: _Figure) -> _Figure:
    """The blocks, and what is reserved beneath them."""
    from bokeh.models import HoverTool, LinearColorMapper, Range1d

    height = view.axis.height or 1.0
    room = height * 0.02
    fig = _figure(
        view,
        "pan,wheel_zoom,box_zoom,reset",
        "address, from the lowest on",
        470,
        name="map",
        toolbar_location="above",
        x_range=memory.x_range,
        y_range=Range1d(-room, height + room, bounds=(-room, height + room)),
    )
    fig.xaxis.axis_label = "number of the event" if view.by_events else f"time ({view.unit})"
    _draw_reserved(view, fig)
    if view.merged is not None:
        _draw_merged(view, fig)
    palette = _palette(view)
    colour = {
        "field": "group",
        "transform": LinearColorMapper(palette=palette, low=-0.5, high=len(palette) - 0.5),
    }
    drawn = fig.quad(
        "left", "right", "top", "bottom", source=_columns(view), name="blocks",
        fill_color=colour, fill_alpha=0.8, line_color=colour, line_width=0.7,
    )  # fmt: skip
    told = [
        ("size", "@size"),
        ("lived", "@lived"),
        ("from", "@from"),
        ("thread", "@thread"),
        ("address", "@address"),
    ]
    if view.has_sites:
        told.insert(0, ("by", "@site"))
    if view.blocks.stream.any():
        told.append(("stream", "@stream"))
    fig.add_tools(HoverTool(renderers=[drawn], tooltips=told, point_policy="follow_mouse"))
    _name_spans(view, fig)
    _use_wheel(fig)
    return fig


def _columns(view: View) -> Any:
    """The blocks that are drawn one by one."""
    from bokeh.models import ColumnDataSource

    found, some = view.blocks, view.drawn
    names = view.place_names
    data: dict[str, Any] = {
        "left": view.left[some],
        "right": view.right[some],
        "bottom": view.bottom[some],
        "top": view.top[some],
        "group": view.colours.of[some].astype("u1"),
        "thread": found.thread[some].astype("u2"),
        "size": [format_bytes(n) for n in found.nbytes[some].tolist()],
        "lived": [
            view.age_text(age) + ("" if freed else ", not freed")
            for age, freed in zip(
                view.ages[some].tolist(), found.is_freed[some].tolist(), strict=True
            )
        ],
        "from": [view.when(moment) for moment in found.start[some].tolist()],
        "address": [f"{address:#x}" for address in found.address[some].tolist()],
    }
    if view.has_sites:
        data["site"] = [names[site] for site in found.site[some].tolist()]
    if found.stream.any():
        data["stream"] = [f"{stream:#x}" for stream in found.stream[some].tolist()]
    return ColumnDataSource(data)


def _draw_reserved(view: View, fig: _Figure) -> None:
    had = view.mapped
    if had is None:
        return
    bottom = view.axis.place(had.address)
    top = view.axis.place(had.address + had.nbytes)
    fig.quad(
        left=view.x[had.start], right=view.x[had.end], bottom=bottom, top=top,
        fill_color=IDLE, line_color=None, level="underlay", name="reserved",
    )  # fmt: skip


def _draw_merged(view: View, fig: _Figure) -> None:
    from bokeh.models import LinearColorMapper

    merged = view.merged
    assert merged is not None
    shades = np.ceil(np.minimum(merged.share, 1) * 255 - 1e-6).astype("u1")
    greys = [f"{MERGED}{level:02x}" for level in range(1, 256)]
    mapper = LinearColorMapper(palette=greys, low=1, high=255, low_color="#ffffff00")
    fig.image(
        image=[shades], x=merged.left, y=0, dw=merged.right - merged.left, dh=merged.height,
        color_mapper=mapper, name="merged",
    )  # fmt: skip


def _name_spans(view: View, fig: _Figure) -> None:
    """The addresses at which parts of the map begin, at its right side; what was cut is dotted."""
    from bokeh.models import FixedTicker, LinearAxis, Span

    axis = view.axis
    size = (axis.end - axis.start).astype("f8")
    some = np.sort(np.argsort(-size, kind="stable")[:MAX_SPANS])
    for end, start in zip((axis.at + size)[:-1], axis.at[1:], strict=True):
        if len(size) <= MAX_SPANS:
            cut = Span(location=(end + start) / 2, dimension="width", line_color=LINE)
            cut.line_dash, cut.line_width = [2, 4], 1
            fig.add_layout(cut)
    ticks = axis.at[some].tolist()
    side = LinearAxis(ticker=FixedTicker(ticks=ticks))
    side.major_label_overrides = {
        tick: f"{start:#x}" for tick, start in zip(ticks, axis.start[some].tolist(), strict=True)
    }
    side.major_label_text_font_size = "11px"
    side.axis_line_color = None
    fig.add_layout(side, "right")


def _lifetimes(view: View) -> _Figure:
    """A histogram: how many blocks lived how long."""
    from bokeh.models import ColumnDataSource, FixedTicker, HoverTool
    from bokeh.plotting import figure

    found = view.lifetimes
    fig = figure(
        height=230, sizing_mode="stretch_width", tools="", toolbar_location=None,
        x_axis_type="log", y_axis_label="blocks", name="lifetimes",
        x_axis_label="lived for" + ("" if view.is_timed else ", in events"),
        x_range=(float(found.edges[0]), float(found.edges[-1])), min_border_left=95,
        min_border_right=150, output_backend="canvas",
    )  # fmt: skip
    fig.outline_line_color = None
    fig.xgrid.grid_line_color = None
    fig.ygrid.grid_line_color = "#efefef"
    fig.axis.axis_label_text_font_style = "normal"
    fig.axis.axis_label_text_font_size = fig.axis.major_label_text_font_size = "13px"
    fig.yaxis.formatter.use_scientific = False
    fig.yaxis.minor_tick_line_color = None
    fig.y_range.start = 0
    text = format_ns if view.is_timed else "{:,.0f}".format
    first, last = (int(np.floor(np.log10(edge) + 1e-9)) for edge in found.edges[[0, -1]])
    ticks = [10.0**power for power in range(first, last + 1)]
    fig.xaxis.ticker = FixedTicker(ticks=ticks)
    fig.xaxis.major_label_overrides = {tick: text(tick) for tick in ticks}
    below = np.zeros(len(found.freed))
    for name, counts, colour in ("freed", found.freed, FREED), ("not freed", found.kept, KEPT):
        source = ColumnDataSource(
            {
                "left": found.edges[:-1],
                "right": found.edges[1:],
                "bottom": below,
                "top": below + counts,
                "count": counts.astype("f8"),
                "range": [
                    f"{text(low)} to {text(high)}"
                    for low, high in zip(found.edges, found.edges[1:], strict=False)
                ],
            }
        )
        bars = fig.quad(
            "left", "right", "top", "bottom", source=source, fill_color=colour,
            line_color="#ffffff", legend_label=name,
        )  # fmt: skip
        tooltips = [(name, "@count{0,0} blocks"), ("after", "@range")]
        fig.add_tools(HoverTool(renderers=[bars], tooltips=tooltips))
        below = below + counts
    fig.legend.orientation = "horizontal"
    fig.legend.border_line_color = None
    fig.add_layout(fig.legend[0], "above")
    return fig


# ---- text


def _paragraphs(lines: Iterable[str]) -> str:
    return "\n".join(f"<p>{escape(line)}</p>" for line in lines)


def _legend(view: View) -> str:
    shown = list(zip(_palette(view), view.colours.names, strict=True))
    if view.merged is not None:
        shown.append((MERGED, "smaller blocks, merged"))
    if view.mapped is not None:
        shown.append((IDLE, "reserved, in no block"))
    entries = [
        f'<span><i style="background:{colour}"></i>{escape(name)}</span>' for colour, name in shown
    ]
    if view.reserved is not None:
        entries.append('<span><i class="line"></i>reserved</span>')
    return "\n".join(entries)


def _table(view: View, moment: int) -> str:
    """The table of holders at a moment, in HTML."""
    rows = view.holders(moment)
    if not rows:
        return "<p>None: all blocks were freed.</p>"
    total = max(sum(row.nbytes for row in rows), 1)
    what = {"site": "allocated by", "size": ""}.get(view.groups.way, view.groups.way)
    head = (
        f"<tr><th>{what}<th class=n>blocks<th class=n>bytes<th class=n>share<th><th class=n>since"
    )
    return (
        f"<table><thead>{head}</thead><tbody>"
        + "\n".join(_row(view, row, total) for row in rows)
        + "</tbody></table>"
    )


def _row(view: View, row: Holder, total: int) -> str:
    share = row.nbytes / total
    return (
        f"<tr><td>{_who(view, row)}<td class=n>{row.blocks:,}"
        f"<td class=n>{format_bytes(row.nbytes)}<td class=n>{share:.1%}"
        f'<td class=share><div style="width:{share:.1%}"></div>'
        f"<td class=n>{view.when(row.since)}"
    )


def _who(view: View, row: Holder) -> str:
    """A name with its colour; the call stack, when it is clicked."""
    colour = _colour_of(view, row.group)
    mark = f'<i style="background:{colour}"></i><code>{escape(row.name)}</code>'
    if view.groups.way != "site" or not row.site:
        return mark
    frames = "\n".join(
        f"<li><code>{escape(frame.file)}:{frame.line} {escape(frame.function)}</code>"
        for frame in row.site
    )
    return f"<details><summary>{mark}</summary><ol>{frames}</ol></details>"


def _colour_of(view: View, group: int) -> str:
    """Of one of all groups; those that have none are drawn as others."""
    palette = _palette(view)
    if group < 0:
        return palette[-1]
    one = int(np.argmax(view.groups.of == group))  # a block of it
    return palette[int(view.colours.of[one])]
