"""The page in a real headless browser, Chromium or Chrome, where one is installed."""

from __future__ import annotations

import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from urllib.parse import quote

import pytest

from ds_dynatrain.elastic.messages import Agent, Figures, Report, Tally
from ds_dynatrain.elastic.token import Reading
from tests.comparison.test_browser import BROWSERS
from tests.elastic.served import ANY, Served, enter, serving, told
from tests.elastic.watched import READERS, status, switched

HOSTILE = "<img src=x onerror=alert(1)>data=2"


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    """A job of two members that has switched; what one says of itself would be markup, if it were taken for that."""
    with serving(reading=Reading(ANY, READERS), job="run-7 & <b>co</b>") as served:
        a = served.join("a")
        enter(a, told(a).generation)
        b = served.join("b")
        told(a), told(b)
        a.send(switched(1, pause_ms=250.0, step=5, target=HOSTILE))
        a.send(switched(2, committed=False, step=6, reason="member 1 said no"))
        b.send(Report(ready=True, entered=2))
        starter = served.connect()
        starter.send(Agent(node="starter"))
        for step in (4, 9, 14):
            spent = {"stepping_seconds": 0.6 * step, "held_seconds": 0.1 * step}
            tally = Tally(steps=step, samples=12 * step, generation=2, **spent)
            figures = Figures(loss=2.5, learning_rate=1e-4, memory_bytes=12 * 10**9, memory_limit=80 * 10**9)
            a.send(Report(ready=True, entered=2, step=step, layout=HOSTILE, tally=tally, figures=figures))
        ended = threading.Event()

        def beat() -> None:
            while not ended.wait(0.02):
                b.send(Report(ready=True, entered=2, figures=Figures(loss="not finite", gpu_percent=97.0)))

        beating = threading.Thread(target=beat)
        beating.start()
        yield served
        ended.set()
        beating.join()
        starter.close()


@pytest.fixture(scope="module")
def shown(served: Served, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """(the page once it has looked at the job, what the browser complains of)"""
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None:
        pytest.skip(f"no browser here: none of {', '.join(BROWSERS)} is installed")
    folder: Path = tmp_path_factory.mktemp("browser")
    command = [program, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--dump-dom"]
    where = served.url.replace("://", f"://anybody:{quote(READERS)}@")
    command += [f"--user-data-dir={folder}", "--virtual-time-budget=5000", f"{where}/"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    return done.stdout, "\n".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)


def table(page: str, name: str) -> list[str]:
    """The rows of a table, as a reader sees them."""
    found = re.search(rf'<table id="{name}">(.*?)</table>', page, re.DOTALL)
    assert found, page[-2000:]
    rows = [re.sub(r"<[^>]+>", " ", row) for row in found[1].split("</tr>")]
    return [" ".join(unescape(row).split()) for row in rows if row]


def test_it_shows_the_job_and_complains_of_nothing(served: Served, shown: tuple[str, str]) -> None:
    page, complaints = shown
    assert not complaints
    assert status(served.url)["state"] == "running"
    assert "<b>running</b>" in page and page.count("<canvas") == 4 and re.search(r'id="lost-contact"[^>]*hidden', page)
    assert table(page, "changes")[1:] != [] and "join" in table(page, "changes")[1]
    assert "rolled back: member 1 said no" in table(page, "switches")[1]
    assert any(row.startswith("productive") for row in table(page, "goodput"))
    assert "run-7 & <b>co</b>" in unescape(re.sub(r"<[^>]+>", " ", page.split("<header>")[1].split("</h1>")[0]))


def test_figures_starting_nodes_and_old_heartbeats(shown: tuple[str, str]) -> None:
    page, _ = shown
    head, _, a, _, b, starter, starts = table(page, "members")
    assert head.startswith("rank phase step loss learning rate memory GPU layout")
    assert " 2.5 0.0001 12.0 of 80 GB " in a and a.endswith(" log and stack") and "not finite 97 %" in b
    assert starter == "starter" and starts.startswith("its workers start, for ")
    bad = re.findall(r'<td class="number bad">(.*?)</td>', page)
    assert len(bad) == 2 and bad[0].endswith(" s") and bad[1] == "not finite", "a sends no heartbeats"
    assert 'href="doing?a%2F0"' in page and "<b>2.5</b><span>loss</span>" in page


def test_what_members_say_is_text(shown: tuple[str, str]) -> None:
    page, _ = shown
    assert "<img" not in page and any(HOSTILE in row for row in table(page, "members"))
