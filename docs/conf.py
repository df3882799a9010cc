"""Sphinx's configuration: `tox -e docs` builds the pages strictly."""

from __future__ import annotations

from fusepatch import __version__

project = "fusepatch"
release = version = __version__
extensions = ["myst_parser", "sphinx_copybutton"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"fusepatch {release}"
html_show_copyright = False
html_show_sphinx = False
html_show_sourcelink = False
nitpicky = True
myst_heading_anchors = 4
copybutton_exclude = ".linenos, .gp"
