"""Sphinx configuration. The reference is made from the installed package, so install it first."""

import ast
import sys
from pathlib import Path

import arenapy

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "memory_map"))
sys.path += [str(HERE), str(HERE.parent)]  # behind what is installed

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
    "sphinx_copybutton",
]
source_suffix = {".md": "markdown", ".rst": "restructuredtext"}
exclude_patterns = ["_build"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_title = f"arenapy {version}"
copybutton_exclude = ".linenos, .gp, .go"  # of an example with prompts, its input alone

autodoc_member_order = "groupwise"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88
numpydoc_show_class_members = False
numpydoc_class_members_toctree = False
# Parameters documented are those that exist, in their order.
numpydoc_validation_checks = {"PR02", "PR03"}

# No inventories are fetched: the documentation builds without a network.
intersphinx_mapping: dict[str, tuple[str, str | None]] = {}

doctest_global_setup = "import arenapy\nimport numpy as np"
doctest_test_doctest_blocks = ""  # tests/package/test_reference.py runs those of docstrings

# Properties among the attributes of a dataclass, which numpydoc refers to from the class.
nitpick_ignore = [("py:obj", "hit_rate"), ("py:obj", "fragmentation")]
# Types in signatures that are other projects', or too small for an entry of their own.
nitpick_ignore_regex = [
    ("py:class", r"(collections|os|socket|numpy|hypothesis|st)\..*"),
    ("py:class", "NDArray|DTypeLike|Axes|View|Scope|Events|HasBlocks|Site"),
    ("py:class", r"arenapy\.memory\.messages\.Connection"),
    ("py:class", r"(arenapy\.(\w+\.)*)?(A|Descriptor|Limit|Operation|Recordable|Reservation)"),
]


def make_pages(app):
    """Pages that are not in the repository, since all of them stands elsewhere in it."""
    import evidence_page

    from asv_benches.figures import pages

    made = pages.pages() | {"evidence.md": evidence_page.page()}
    pages.write_pages(made, Path(app.srcdir))


def make_example(app, error):
    """The page of a trace that traces.md refers to."""
    if error is None and app.builder.format == "html":
        from make import make_page

        (app.outdir / "memory_map.html").write_text(make_page(), encoding="utf-8")


def read_stubs():
    """{"Class.method" or "function": (arguments, what it returns)}, as the stubs have it.

    Compiled modules do not know their annotations. Of overloads and properties there is nothing.
    """
    found, again = {}, set()
    for path in sorted(Path(arenapy.__file__).parent.rglob("*.pyi")):
        for node in ast.parse(path.read_text()).body:
            inside = node.body if isinstance(node, ast.ClassDef) else [node]
            prefix = f"{node.name}." if isinstance(node, ast.ClassDef) else ""
            for one in inside:
                if isinstance(one, ast.FunctionDef):
                    again |= {prefix + one.name} & found.keys()
                    found[prefix + one.name] = one
    return {name: node for name, node in found.items() if name not in again}


STUBS = read_stubs()


def is_private(annotation):
    """Whether a name in it is the stub's own, as `_Shape` is."""
    names = [one.id for one in ast.walk(annotation) if isinstance(one, ast.Name)]
    return any(name.startswith("_") for name in names)


def without_private_names(arguments):
    """What such a name stands for is said by the section Parameters."""
    for one in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]:
        if one.annotation and is_private(one.annotation):
            one.annotation = None
    return arguments


def signature_of_stub(app, what, name, obj, options, signature, returns):
    """Types, for what is compiled."""
    if what == "class":
        stub = STUBS.get(f"{obj.__name__}.__init__")
    else:
        stub = STUBS.get(getattr(obj, "__qualname__", ""))
    if stub is None or signature is None or "->" in signature:
        return None
    arguments = without_private_names(stub.args)
    bound = (
        what in ("class", "method") and arguments.args and arguments.args[0].arg in ("self", "cls")
    )
    if bound:
        arguments = ast.arguments(**{**vars(arguments), "args": arguments.args[1:]})
    told = stub.returns and what != "class" and not is_private(stub.returns)
    return f"({ast.unparse(arguments)})", ast.unparse(stub.returns) if told else None


def setup(app):
    """Sphinx calls this."""
    app.connect("autodoc-process-signature", signature_of_stub, priority=400)  # before numpydoc
    app.connect("builder-inited", make_pages)
    app.connect("build-finished", make_example)
