"""Makes a site that asv has published need no network: its scripts and styles lie beside it.

asv's pages load jQuery, flot, Bootstrap, stupidtable and md5 from elsewhere. Debian has all of
them, and so each tag is given the file of a Debian package. What lives here: which file stands for
which tag, and what asv expects of an older flot. What does not: publishing itself (dashboard.py).
"""

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

SHARE = Path("/usr/share/javascript")
VENDOR = "vendor"  # the folder of the site that they go into
TAG = re.compile(
    r"""<script\b[^>]*\bsrc="(?P<script>(?:https?:)?//[^"]+)"[^>]*>\s*</script>"""
    r"""|<link\b[^>]*\bhref="(?P<style>(?:https?:)?//[^"]+)"[^>]*>"""
)


@dataclass(frozen=True)
class Asset:
    """A file that a tag asks for: a pattern of its address, the file here, and its package."""

    asked: str
    file: str
    package: str


ASSETS = (
    Asset(r"/jquery-[\d.]+(\.min)?\.js$", "jquery/jquery.min.js", "libjs-jquery"),
    *(
        Asset(rf"/{name}(\.min)?\.js$", f"jquery-flot/{name}.min.js", "libjs-jquery-flot")
        for name in (
            "jquery.flot",
            "jquery.flot.time",
            "jquery.flot.selection",
            "jquery.flot.categories",
        )
    ),
    Asset(r"/stupidtable(\.min)?\.js$", "jquery-stupidtable/stupidtable.min.js",
          "libjs-jquery-stupidtable"),
    Asset(r"/md5(\.min)?\.js$", "blueimp-md5/md5.min.js", "node-blueimp-md5"),
    Asset(r"/bootstrap(\.min)?\.js$", "bootstrap/js/bootstrap.min.js", "libjs-bootstrap"),
    Asset(r"/bootstrap(\.min)?\.css$", "bootstrap/css/bootstrap.min.css", "libjs-bootstrap"),
)  # fmt: skip
PACKAGES = tuple(dict.fromkeys(asset.package for asset in ASSETS))

# Debian's flot is newer than the one that asv was written for: times are seconds there unless an
# axis says otherwise, and a legend's box is drawn as SVG says, black. It writes the axes' labels by
# itself, so that asv's plugin would write them again. jQuery no longer ends tags that end by
# themselves, and asv writes <b/>. And the plugin that puts bars side by side is not in Debian.
ORDER_BARS = r"/jquery\.flot\.orderBars(\.min)?\.js$"
AXIS_LABELS = "jquery.flot.axislabels.js"  # a file of asv's
ADAPTER = """\
/* What asv expects of jQuery 3.3, flot 0.8 and the plugin orderBars. */
(function ($) {
  "use strict";
  $("<style>").text(".legendLayer .background { fill: #fff; fill-opacity: 0.85; }")
    .appendTo("head");
  var alone = new RegExp("<(?!area|br|col|embed|hr|img|input|link|meta|param)" +
    "(([a-z][^/>\\\\s]*)[^>]*)/>", "gi");
  $.htmlPrefilter = function (html) { return html.replace(alone, "<$1></$2>"); };
  $.plot.plugins.push({
    name: "asv",
    version: "1",
    init: function (plot) {
      plot.hooks.processOptions.push(function (plot, options) {
        $.each(options.xaxes.concat(options.yaxes), function (i, axis) {
          if (axis.mode === "time") { axis.timeBase = "milliseconds"; }
        });
      });
      plot.hooks.processDatapoints.push(function (plot, series, points) {
        if (!series.bars.show || !series.bars.order) { return; }
        var shift = (series.bars.order - (plot.getData().length + 1) / 2) * series.bars.barWidth;
        for (var i = 0; i < points.points.length; i += points.pointsize) {
          if (points.points[i] !== null) { points.points[i] += shift; }
        }
      });
    }
  });
})(jQuery);
"""


class MissingAssets(Exception):
    """Files of Debian's are not there; says what to install."""


def local(address, share=SHARE):
    """The file for an address; None: nobody knows it. Also if the file is not there."""
    for asset in ASSETS:
        if re.search(asset.asked, address):
            return share / asset.file
    return None


def missing(share=SHARE):
    """Packages whose files are not there."""
    absent = [asset.package for asset in ASSETS if not (share / asset.file).is_file()]
    return tuple(dict.fromkeys(absent))


def localize(site, share=SHARE):
    """Give every page of a published site local scripts and styles; the names of what it uses.

    Raises
    ------
    MissingAssets
        If a package is missing, or asv's pages ask for something that is not known here.
    """
    if absent := missing(share):
        raise MissingAssets(
            f"the pages need files of Debian's packages: apt-get install {' '.join(absent)}"
        )
    vendor = Path(site, VENDOR)
    vendor.mkdir(exist_ok=True)
    used = []

    def replace(tag):
        address = tag["script"] or tag["style"]
        if re.search(ORDER_BARS, address):
            (vendor / "asv-flot.js").write_text(ADAPTER)
            name = "asv-flot.js"
        else:
            file = local(address, share)
            if file is None:
                raise MissingAssets(
                    f"asv's pages ask for {address}, which {Path(__file__).name} does not know: "
                    "add what stands for it"
                )
            shutil.copyfile(file, vendor / file.name)
            name = file.name
        used.append(name)
        # Checksums were of the other file; what is missing is told as before.
        text = tag[0].replace(address, f"{VENDOR}/{name}")
        return re.sub(r'\s+(integrity|crossorigin|referrerpolicy)="[^"]*"', "", text)

    Path(site, AXIS_LABELS).write_text("/* flot has these by now */\n")
    for page in sorted(Path(site).glob("*.html")):
        page.write_text(TAG.sub(replace, page.read_text()))
    return used
