"""The site of these pages: ``make docs``. docs/README.md orders them: its links make the site's menu."""

from __future__ import annotations

import re

from sphinx.application import Sphinx

project = "nemo_style_aligner"
extensions = ["myst_parser"]
html_theme = "furo"
html_title = project
html_copy_source = False
html_static_path = ["site.css"]
html_css_files = ["site.css"]
root_doc = "README"
exclude_patterns = ["site"]
myst_heading_anchors = 4
nitpicky = True
suppress_warnings = ["misc.highlighting_failure"]  # JSON that is shortened with ...


def setup(app: Sphinx) -> None:
    app.connect("source-read", _with_menu)


def _with_menu(app: Sphinx, name: str, source: list[str]) -> None:
    """Add the pages that an index links to, section by section, as the site's menu; GitHub sees none of it."""
    if name.rpartition("/")[2] == "README":
        for title, section in re.findall(r"^#+ (.*)\n((?:(?!^#).*\n)*)", source[0], re.MULTILINE):
            pages = dict.fromkeys(re.findall(r"\]\(([^)#:.]+)\.md", section))
            if pages:
                source[0] += "\n".join(["", "```{toctree}", ":hidden:", f":caption: {title}", *pages, "```", ""])
