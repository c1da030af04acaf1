"""Numbers, names and log lines of the pages are those of the code and of the tables."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

from typer.testing import CliRunner

from ds_dynatrain.cli.main import app
from ds_dynatrain.elastic.member import Ending
from ds_dynatrain.fallback.extension import TERMINATED
from ds_dynatrain.report import SwitchEvent
from ds_dynatrain.version import __version__
from tests.docs.pages import README, ROOT, blocks, in_words, section, text_of

LEVELS = {"info", "warning", "error"}
MOST_LINES = 110


def test_readme_is_short() -> None:
    assert len(text_of(README).splitlines()) <= MOST_LINES
    (script,) = blocks(README, "python")
    assert len(script.splitlines()) <= 30


def test_readme_has_the_numbers_of_the_table() -> None:
    table = section(ROOT / "docs" / "benchmarks.md", "Against a checkpoint and a restart")
    rows = {row[0]: row[1:] for row in (line.strip("| ").split(" | ") for line in table.splitlines() if "|" in line)}
    column = rows["training stands still (s)"].index("126.5M parameters, 2 ranks, stage 1 → 4 ranks, stage 1")
    said = [rows[way][column] for way in ("live, by memory", "checkpoint, restart", "DeepSpeed universal, restart")]
    assert re.findall(r"\*\*([\d.]+) s\*\*", text_of(README)) == said


def cells(page: str, mark: str) -> str:
    """Return the text that a tool has written into a page of figures, on one line."""
    return in_words(text_of(ROOT / "docs" / "figures" / page).partition(f"<!-- {mark} -->")[2].partition("<!-- /")[0])


def met(mark: str, case: str = "") -> tuple[int, int]:
    """Return how many changes of the cases that begin with this met their bar, and of how many."""
    rows = re.findall(rf"\| {case}[^|]*, [^|]*\| [^()]*?(\d+) of (\d+) \|", cells("training.md", mark))
    return sum(int(each) for each, _ in rows), sum(int(every) for _, every in rows)


def test_benchmarks_have_the_numbers_of_the_figures() -> None:
    page = text_of(ROOT / "docs" / "benchmarks.md")
    for mark, case, words in (
        ("bench_switch", "30M", "changes, missed by 19 ms"),
        ("bench_switch", "125M", "changes, missed by 4 to 207 ms"),
        ("bench_variants", "30M", "changes, missed by 19 to 79 ms"),
        ("bench_axes", "25M", "changes, missed by up to 0.17 s"),
    ):
        assert "met in {} of {} {}".format(*met(mark, case), words) in page
    for name, mark, written, quoted in (
        ("jobs.md", "bench_membership", "a node joins: pause | 21 | 62 |", "| 62 ms; stock torchrun"),
        ("jobs.md", "bench_membership", "have formed a world | 10 | 90 |", "| 90 ms; stock torchrun"),
        ("jobs.md", "bench_deaths", "30M, stage 1 | 0.59 |", "0.59 s at 30M"),
        ("jobs.md", "bench_deaths", "125M, stage 1 | 1.43 |", "1.43 s at 125M"),
        ("jobs.md", "goodput", "seconds lost | 27.2 | 26.5 | 26.2 | 127.6", "27.2 s lost of 261; stock 127.6 s"),
        ("jobs.md", "bench_world", "| 0.27 |", "| 0.27 s |"),
        ("training.md", "bench_checkpoint", "| 1.02 | ≥ 0.8 |", "1.02 and 1.13"),
        ("training.md", "bench_step", "-0.55 %", "−0.6 % to +0.9 %"),
        ("training.md", "bench_after", "| 0.955 |", "0.955 to 1.00"),
    ):
        assert written in cells(name, mark) and quoted in page


def test_the_version_is_one() -> None:
    said = CliRunner().invoke(app, ["--version"])
    assert said.exit_code == 0 and said.stdout == f"ds-dynatrain {__version__}\n"
    for file, line in (
        ("pyproject.toml", f'version = "{__version__}"'),
        ("CITATION.cff", f"version: {__version__}"),
        ("CHANGELOG.md", f"## {__version__}"),
    ):
        assert line in text_of(ROOT / file), file


def test_exit_codes() -> None:
    listed = section(ROOT / "docs" / "troubleshoot.md", "Exit codes")
    assert all(f"| {code} |" in listed for code in (*(int(each) for each in Ending), TERMINATED))


def test_every_field_of_an_event_is_described() -> None:
    said = section(ROOT / "docs" / "switching.md", "What a switch reports")
    assert [field.name for field in fields(SwitchEvent) if f"`{field.name}`" not in said] == []


def test_every_metric_is_described() -> None:
    code, page = (ROOT / place for place in ("ds_dynatrain/monitoring/metrics.py", "docs/monitoring.md"))
    names = set(re.findall(r'\(\s*"(dynatrain_\w+)"', text_of(code)))
    said = {name.removesuffix("_total") for name in re.findall(r"`(dynatrain_\w+)", text_of(page))}
    assert len(names) > 20 and names == said


def formats() -> Iterator[tuple[str, str, str]]:
    """Where something is logged, its level, and its words, with … for what is filled in."""
    for file in sorted((ROOT / "ds_dynatrain").rglob("*.py")):
        for node in ast.walk(ast.parse(text_of(file))):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args):
                continue
            said = node.args[0]
            if node.func.attr in LEVELS and "log" in ast.unparse(node.func.value).lower():
                if isinstance(said, ast.Constant) and isinstance(said.value, str):
                    words = re.sub(r"%[-+.\d]*[a-z]", "…", said.value).replace("%%", "%")
                    yield f"{file.relative_to(ROOT)}:{node.lineno}", node.func.attr, words


def described(page: Path) -> set[str]:
    """Return the log lines of the page, up to where they are cut off."""
    rows = re.findall(r"^\| (`.+?`) \| ", section(page, "Lines that ask for something"), re.MULTILINE)
    return set(re.findall(r"`([^`]+)`", "".join(rows) + section(page, "Lines that need nothing")))


def test_every_log_line_is_described() -> None:
    lines = described(ROOT / "docs" / "monitoring.md")
    missing, used = [], set()
    for where, level, words in formats():
        if len(re.findall(r"[a-z]{3,}", words)) == 0:  # all of it is filled in
            continue
        found = {line for line in lines if words.startswith(line)}
        used |= found
        if not found:
            missing.append(f"{where} {level}: {words}")
    assert not missing
    assert {line for line in lines - used if not line.startswith("switch … at step")} == set()
