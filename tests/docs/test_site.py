"""The navigation of the site has every page for users, and no other."""

from __future__ import annotations

import runpy

from tests.docs.pages import INDEX, ROOT, text_of

MOST_PAGES = 40
NOT_FOR_USERS = ("dev", "figures")


def test_the_navigation_has_the_pages_for_users() -> None:
    source = [text_of(INDEX)]
    conf = runpy.run_path(str(ROOT / "docs" / "conf.py"))
    conf["add_contents"](None, conf["root_doc"], source)
    listed = [line for block in source[0].split("```{toctree}")[1:] for line in block.split("```")[0].splitlines()]
    pages = [line for line in listed if line.endswith(".md")]
    there = (page.relative_to(INDEX.parent) for page in INDEX.parent.rglob("*.md") if page != INDEX)
    assert sorted(pages) == sorted(str(page) for page in there if page.parts[0] not in NOT_FOR_USERS)
    assert len(pages) <= MOST_PAGES
