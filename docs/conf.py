"""Sphinx's configuration: `tox -e docs` builds the pages strictly."""

from __future__ import annotations

from importlib.metadata import version as installed_version

project = "fusepatch"
release = version = installed_version(project)
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
default_role = "code"  # docstrings mark code with single backticks
autodoc_class_signature = "separated"
autodoc_default_options = {"exclude-members": "__new__, __init__"}
autodoc_member_order = "bysource"
highlight_language = "none"
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build", "generate"]
html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_title = f"fusepatch {release}"
html_show_copyright = False
html_show_sphinx = False
html_show_sourcelink = False
nitpicky = True
myst_heading_anchors = 4
copybutton_exclude = ".linenos, .gp"
