"""The site: `make docs` builds it into build/docs, from the pages as they stand, without a network.

The source folder is the whole repository, so that links from pages to the README, the examples and the tools lead
somewhere. `docs/index.md` is the first page. Each of its headings but `Contributors` becomes a group of the navigation,
with the pages of `docs/` that stand below it. The page of public names also gets their docstrings.
"""

from __future__ import annotations

import re
import sys
from itertools import groupby
from pathlib import Path
from typing import Any

from ds_dynatrain.version import __version__

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))

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
ITEM = re.compile(r"^(?=[\w*`]+(?:, [\w*`]+)*: )")
"""The beginning of a docstring's line that describes a parameter or attribute, such as `step: ...`."""
LINK = re.compile(r"\]\((?!\.\./)([^)#\s]+\.md)\)")


def add_contents(app: Any, name: str, source: list[str]) -> None:
    """Add Sphinx's tables of contents for the groups of the first page, which a reader of the file need not see."""
    if name != root_doc:
        return
    for title, body in GROUP.findall(source[0]):
        pages = "\n".join(dict.fromkeys(LINK.findall(body)))
        if pages and title != "Contributors":
            source[0] += f"\n```{{toctree}}\n:hidden:\n:caption: {title}\n\n{pages}\n```\n"


def add_docstrings(app: Any, name: str, source: list[str]) -> None:
    """Add the docstrings of all public names to the page that lists these names."""
    if name != "docs/reference/api":
        return
    from reference import directives

    source[0] += "\n## Details\n\n```{eval-rst}\n" + "\n".join(directives()) + "\n```\n"


def make_lists(app: Any, what: str, name: str, found: Any, options: Any, lines: list[str]) -> None:
    """Turn each paragraph of a docstring that describes parameters or attributes into a list."""
    done: list[str] = []
    for is_blank, paragraph in groupby(lines, lambda line: not line.strip()):
        each = list(paragraph)
        if not is_blank and ITEM.match(each[0]):
            each = [f"- {line}" if ITEM.match(line) else f"  {line.strip()}" for line in each]
        done += each
    lines[:] = done


def setup(app: Any) -> None:
    """Connect the functions that change pages. Sphinx calls this function."""
    app.connect("source-read", add_contents)
    app.connect("source-read", add_docstrings)
    app.connect("autodoc-process-docstring", make_lists)
