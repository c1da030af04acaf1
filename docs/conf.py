"""The site: `make docs` builds it into build/docs, from the pages as they stand, without a network.

The source folder is the whole repository, so that links from pages to the README, the examples and the tools lead
somewhere. `docs/index.md` is the first page. Each of its headings but `Contributors` becomes a group of the navigation,
with the pages of `docs/` that stand below it.
"""

from __future__ import annotations

import re
from typing import Any

from ds_dynatrain.version import __version__

project = "ds_dynatrain"
author = "The ds_dynatrain developers"
release = version = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc"]
root_doc = "docs/index"
include_patterns = [
    *("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "docs/*.md", "docs/*/*.md"),
    *("examples/README.md", "examples/elastic/README.md", "examples/rl/README.md", "ds_dynatrain/README.md"),
    "tools/README.md",
]
exclude_patterns = ["build", ".venv*"]
html_theme = "alabaster"
html_theme_options = {"description": "DeepSpeed jobs that change their layout while they train", "fixed_sidebar": True}
html_static_path = ["site.css"]
html_css_files = ["site.css"]
templates_path = ["templates"]
html_show_copyright = False
myst_heading_anchors = 4
suppress_warnings = [
    "myst.header",  # tables that commands have written into a section begin with headings of level 4
    "toc.not_included",  # pages for contributors; a test says that the navigation has all others
]
default_role = "code"  # docstrings write `name`
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
autodoc_default_options = {"members": True, "member-order": "bysource"}
GROUP = re.compile(r"^## (.*?)\n(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!\.\./)([^)#\s]+\.md)\)")


def add_contents(app: Any, name: str, source: list[str]) -> None:
    """The groups of the first page as Sphinx's tables of contents, which a reader of the file need not see."""
    if name != root_doc:
        return
    for title, body in GROUP.findall(source[0]):
        pages = "\n".join(dict.fromkeys(LINK.findall(body)))
        if pages and title != "Contributors":
            source[0] += f"\n```{{toctree}}\n:hidden:\n:caption: {title}\n\n{pages}\n```\n"


def setup(app: Any) -> None:
    """What Sphinx calls."""
    app.connect("source-read", add_contents)
