"""Sphinx configuration. The reference is made from the installed package, so install it first."""

import sys
from pathlib import Path

import arenapy

sys.path.insert(0, str(Path(__file__).parent / "memory_map"))

project = "arenapy"
author = "The arenapy developers"
copyright = author
version = release = arenapy.__version__

extensions = [
    "myst_parser",
    "numpydoc",
    "sphinx.ext.autodoc",
    "sphinx.ext.doctest",
    "sphinx.ext.intersphinx",
]
source_suffix = {".md": "markdown", ".rst": "restructuredtext"}
exclude_patterns = ["_build"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_title = f"arenapy {version}"

autodoc_member_order = "groupwise"
autodoc_typehints = "none"  # numpydoc's Parameters sections say it in words
numpydoc_show_class_members = False
numpydoc_class_members_toctree = False
# Parameters documented are those that exist, in their order.
numpydoc_validation_checks = {"PR02", "PR03"}

# No inventories are fetched: the documentation builds without a network.
intersphinx_mapping: dict[str, tuple[str, str | None]] = {}

doctest_global_setup = "import arenapy\nimport numpy as np"

# Properties among the attributes of a dataclass, which numpydoc refers to from the class.
nitpick_ignore = [("py:obj", "hit_rate"), ("py:obj", "fragmentation")]


def make_example(app, error):
    """The page of a trace that traces.md refers to."""
    if error is None and app.builder.format == "html":
        from make import make_page

        (app.outdir / "memory_map.html").write_text(make_page(), encoding="utf-8")


def setup(app):
    """Sphinx calls this."""
    app.connect("build-finished", make_example)
