"""How Sphinx builds the site: `make docs`. Warnings are errors there."""

import inspect
import re
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "src")]

import mathml  # noqa: E402
import pages  # noqa: E402

import peerbayes  # noqa: E402

project = "peerbayes"
author = "the peerbayes authors"
copyright = "the peerbayes authors, Apache-2.0"
version = release = peerbayes.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
exclude_patterns = ["_build", "**.ipynb_checkpoints"]

myst_enable_extensions = ["dollarmath", "colon_fence", "deflist"]
myst_heading_anchors = 3  # headings are linked to as on a code host: guide/data.md#corrupted-images
myst_links_external_new_tab = False

default_role = "py:obj"  # `peerbayes.fit` in a docstring is a link where there is such an object, and code elsewhere
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # they stand in the signature
autodoc_preserve_defaults = True
autodoc_default_options = {"members": True}
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False

copybutton_prompt_text = r"\$ |>>> |\.\.\. "
copybutton_prompt_is_regexp = True

html_theme = "furo"
html_title = "peerbayes"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sourcelink = False
html_math_renderer = "mathml"


def as_rst(_app, what, _name, described, _options, lines):
    """Let a docstring that napoleon has read be read as it is meant."""
    if what == "property":  # napoleon takes what stands before a colon for a type
        lines[:] = (inspect.getdoc(described) or "").splitlines()
    lines[:] = ["".join(_escaped(part) for part in re.split(r"(``.+?``)", line)) for line in lines]


def _escaped(part):
    return part if part.startswith("``") else re.sub(r"(?<!\\)\|", r"\\|", part)  # |x| is no substitution


def setup(app):
    """Write the pages that are made from the code; formulas are MathML, docstrings reStructuredText."""
    pages.write(HERE / "generated")
    mathml.setup(app)
    app.connect("autodoc-process-docstring", as_rst, priority=600)
    app.connect("source-read", lambda _app, name, source: pages.relink(name, source))
