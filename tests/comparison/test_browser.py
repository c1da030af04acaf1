"""The page of `ds-dynatrain compare` in a real headless browser: Chromium or Chrome, where one is installed."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import dataclass
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from ds_dynatrain.comparison.report import page
from ds_dynatrain.comparison.results import Comparison
from tests.comparison.samples import comparison

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
WIDTHS = (1280, 800, 500)
"""Of a window, in pixels; Chromium makes none that is narrower than 500."""
LEGIBLE = 640
"""Pixels that a chart has at least; in a window that is narrower it is moved sideways, and the page is not."""
LOOK = """
const box = (element) => { const r = element.getBoundingClientRect(); return [r.left, r.top, r.width, r.height]; };
const all = (selector, of = document) => [...of.querySelectorAll(selector)];
const seen = {
  window: innerWidth,
  overflow: document.documentElement.scrollWidth - document.documentElement.clientWidth,
  headings: all("h1, h2").map((each) => [each.textContent, ...box(each)]),
  figures: all("figure svg").map((svg) => ({
    box: box(svg),
    texts: all("text", svg).map((each) => [each.textContent, ...box(each)]),
    shapes: all("path", svg).filter((each) => each.getBBox().width > 0 || each.getBBox().height > 0).length,
    broken: all("use", svg).filter((each) => !document.querySelector(each.getAttribute("xlink:href"))).length,
  })),
  tables: all("table").map((each) => [each.rows.length, ...box(each)]),
  hidden: all("details").map((each) => each.open),
  asked: performance.getEntriesByType("resource").map((each) => each.name),
};
const told = document.createElement("pre");
told.id = "seen";
told.textContent = JSON.stringify(seen);
document.body.append(told);
"""


@dataclass(frozen=True)
class Browser:
    """A browser that is started for each page anew, and has `folder` to itself."""

    program: str
    folder: Path

    def show(self, text: str, width: int) -> tuple[dict[str, Any], str]:
        """(what `LOOK` sees of a page in a window of that width, what the browser complains of)."""
        file = self.folder / "page.html"
        file.write_text(text.replace("</body>", f"<script>{LOOK}</script></body>"), encoding="utf-8")
        command = [self.program, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        command += [
            "--enable-logging=stderr",
            f"--user-data-dir={self.folder / 'profile'}",
            f"--window-size={width},900",
        ]
        done = subprocess.run([*command, "--dump-dom", file.as_uri()], capture_output=True, text=True, timeout=120)
        found = re.search(r'<pre id="seen">(.*?)</pre>', done.stdout, flags=re.DOTALL)
        assert found, done.stdout[-500:] + done.stderr
        said = "\n".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)
        return json.loads(unescape(found[1])), said


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Browser:
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        pytest.skip(f"no browser here: none of {', '.join(BROWSERS)} is installed")
    return Browser(found, tmp_path_factory.mktemp("browser"))


@pytest.fixture(scope="module")
def found() -> Comparison:
    return comparison()


@pytest.mark.parametrize("width", WIDTHS)
def test_everything_is_seen(browser: Browser, found: Comparison, width: int) -> None:
    """Nothing is wider than the window, no chart is empty, and every word of a chart stands inside it."""
    seen, complaints = browser.show(page(found), width)
    assert not complaints
    assert seen["window"] == width
    assert seen["overflow"] <= 0
    assert seen["asked"] == []
    assert len(seen["headings"]) == 1 + 1 + len(found.cases())
    assert all(each[3] > 0 and each[4] > 0 for each in seen["headings"])
    assert len(seen["figures"]) == 5
    for figure in seen["figures"]:
        left, top, wide, high = figure["box"]
        assert 600 < wide <= max(width, LEGIBLE) and high > 100, figure["box"]
        assert figure["shapes"] > 5 and not figure["broken"]
        for text, x, y, w, h in figure["texts"]:
            assert w > 0 and h > 0, f"{text!r} is not drawn"
            inside = left - 1 <= x and x + w <= left + wide + 1 and top - 1 <= y and y + h <= top + high + 1
            assert inside, f"{text!r} leaves its chart: {(x, y, w, h)} of {figure['box']}"
    assert not any(seen["hidden"]), "the seconds by phase are folded away"
    shown = [table for table in seen["tables"] if table[2:] != [0, 0, 0]]
    assert len(shown) >= len(found.cases()) and all(rows > 1 and high > 0 for rows, _, _, _, high in shown)


def test_a_page_that_is_too_wide_is_noticed(browser: Browser, found: Comparison) -> None:
    """That the check above can fail."""
    wide = '<p style="width: 3000px">too wide</p><script>console.error("complains")</script></body>'
    seen, complaints = browser.show(page(found).replace("</body>", wide), WIDTHS[0])
    assert seen["overflow"] > 0 and "complains" in complaints
