"""Sphinx configuration; `./zb docs` builds with warnings fatal."""

from __future__ import annotations

from zbus import __version__

project = "zbus"
copyright = "the zbus authors"
release = __version__
extensions = ["myst_parser"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"zbus {__version__}"
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
