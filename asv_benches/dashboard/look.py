"""The look of every published page of asv's: arenapy's lines stand out, and a phone can show it.

asv has no setting for any of this, so a script and a style are put into its page, and a few places
of its own scripts are replaced. What lives here: which lines are arenapy's, and how lines, legends,
numbers and pages look. What does not: where the scripts
of asv's pages come from (offline.py).
"""

import json
from html import escape
from pathlib import Path

#: The label of a line matches this if arenapy does the work; for Python and JavaScript.
OURS = (
    r"\b(arenapy|arena|pool|slab|pool-class|isolated|recorded|with an alloc)\b"
    r"|\b(bump|slab|pool)_|\b(Pool|Slab|Bump)\(|prefault|Pinned region"
    r"|\(b\)|(^|[;,'\"] ?)b[.\[]|: b($|['\"])"
)

SCRIPT = """\
/* arenapy's lines first, thick and in strong colours; its peers' thin and pale. */
(function ($) {
  "use strict";
  var ours = new RegExp(OURS);
  var strong = ["#d62728", "#1f77b4", "#2ca02c", "#9467bd", "#e377c2", "#8c564b", "#17becf"];
  var pale = ["#8a8a8a", "#b9a26a", "#7fa3b5", "#a98bb0", "#86ab86", "#c09494", "#b5b5b5"];
  function styled(data) {
    var mine = [], others = [];
    $.each(data, function (i, one) {
      /* "way-pool.alloc(64); size-4 KiB": without the names of the parameters */
      var label = (one.label || "").replace(/(^|; )[a-z_]+-/g, "$1").replace(/"/g, "");
      (ours.test(label) ? mine : others).push($.extend({}, one, {label: label}));
    });
    if (!mine.length) { mine = others; others = []; }  /* only arenapy is measured */
    function look(lines, colors, width) {
      $.each(lines, function (i, one) {
        one.color = colors[i % colors.length];
        one.shadowSize = 0;
        one.lines = $.extend({}, one.lines, {lineWidth: width});
      });
    }
    look(mine, strong, 3);
    look(others, pale, 1.25);
    return {lines: mine.concat(others), mine: mine.length};
  }
  var plot = $.plot;
  $.plot = $.extend(function (place, data, options) {
    if (!data.length || data[0].label === undefined) { return plot(place, data, options); }
    options = $.extend(true, {legend: {backgroundOpacity: 0.5}}, options);  /* lines show through */
    var found = styled(data), made = plot(place, found.lines, options);
    $(place).find(".legendLayer text").slice(0, found.mine).css("font-weight", "bold");
    return made;
  }, plot);
})(jQuery);

function arenapyDigits(x) {  /* "1,050", where toPrecision(3) has "1.05e+3" */
  "use strict";
  return Math.abs(x) < 999.5 ? x.toPrecision(3) : Math.round(x).toLocaleString("en");
}
"""

#: Texts of asv's scripts, and their replacements.
REPLACED = {
    "asv.js": (
        ("x.toPrecision(3)", "arenapyDigits(x)"),
        ("(x / time_units[i][2]).toFixed(3) + time_units",
         "arenapyDigits(x / time_units[i][2]) + ' ' + time_units"),
    ),
    "graphdisplay.js": (("(v / multiplier).toPrecision(3)", "arenapyDigits(v / multiplier)"),),
    # The name of a benchmark ends where its parameters begin; they may have parentheses, too.
    "summarylist.js": (("match(/(.*)\\(.*$/)", "match(/(.*?)\\((?=['\"\\d])/)"),),
}  # fmt: skip

STYLE = """\
#overview { min-height: 0 !important; }  /* asv's is taller than the place that it has */
@media (max-width: 700px) {
  body { overflow-x: hidden; }
  .row, nav .nav { margin-left: 0 !important; margin-right: 0 !important; }
  nav.navbar-fixed-top { position: static; }
  nav .navbar-text { margin: 8px; }
  nav .nav > li { display: inline-block; vertical-align: top; float: none; }
  #title { white-space: normal; overflow-wrap: anywhere; height: auto; font-size: 14px; }
  #graph-display:not([style*="none"]) {
    display: flex; flex-direction: column-reverse; height: auto;
  }
  #graph-display > div, #summarylist-display > div, #summarygrid-display, #regressions-display {
    position: static !important; width: auto !important; overflow: visible !important;
  }
  #graph-display > div:last-child {
    height: 75vh; flex: none; position: relative !important; inset: 0 !important;
  }
  .legendLayer { font-size: 10px; }
  .benchmark-container { width: 100%; }
  #regressions-body { overflow-x: auto !important; }
  table.table, table.table > * { display: block; }
  table.table tr { display: flex; flex-wrap: wrap; border-top: 1px solid #ddd; padding: 4px 0; }
  table.table tr > * { border: 0 !important; padding: 2px 8px !important; }
  table.table tr > :first-child { flex: 0 0 100%; overflow-wrap: anywhere; }
}
"""


def finish(site, machine, others):
    """Put them into the page of a published site, with links to `others` ({machine: folder})."""
    site = Path(site)
    (site / "arenapy.js").write_text(SCRIPT.replace("OURS", json.dumps(OURS)))
    (site / "arenapy.css").write_text(STYLE)
    for name, places in REPLACED.items():
        script = (site / name).read_text()
        for old, new in places:
            assert old in script, (name, old)
            script = script.replace(old, new)
        (site / name).write_text(script)
    page = site / "index.html"
    text = page.read_text()
    head = (
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '    <link href="arenapy.css" rel="stylesheet">\n  </head>'
    )
    links = "".join(
        f'<li><a href="{escape(folder)}/index.html" target="_self">{escape(name)}</a></li>'
        for name, folder in others.items()
        if name != machine
    )
    draws = '<script language="javascript" type="text/javascript"\n            src="asv.js">'
    title = '<li id="nav-li-graphdisplay">'
    for old, new in (
        ("</head>", head),
        (draws, f'<script src="arenapy.js"></script>\n    {draws}'),  # behind flot's own plugins
        (title, f"{links}\n        {title}"),
    ):
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    page.write_text(text)
