"""What `ds-dynatrain compare` makes of figures: JSON and back, ratios, tables, and a page that needs nothing else."""

from __future__ import annotations

import json
import re
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ds_dynatrain.cli.main import app
from ds_dynatrain.comparison import command, report
from ds_dynatrain.comparison import comparison as measuring
from ds_dynatrain.comparison.command import Size, WayName
from ds_dynatrain.comparison.job import BATCH, SHAPES, WAYS, ComparedChange, ComparedLayout, Task
from ds_dynatrain.comparison.report import page
from ds_dynatrain.comparison.results import PHASES, Comparison, Measure, ratios
from ds_dynatrain.errors import ConfigError
from ds_dynatrain.records import from_record, to_record
from tests.comparison.samples import CHANGE, LOSSES, OTHER, comparison

VOID = {"meta", "br", "link", "img", "hr"}


class Checked(HTMLParser):
    """A reader that wants every element closed in order, and notes what a page asks others for."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.seen: dict[str, int] = {}
        self.asks: list[str] = []
        self.identifiers: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen[tag] = self.seen.get(tag, 0) + 1
        for name, value in attrs:
            if name in ("src", "href", "xlink:href", "action", "data", "srcset") and not (value or "").startswith("#"):
                self.asks.append(f"{tag} {name}={value}")
            if name.startswith("on"):
                self.asks.append(f"{tag} {name}")
            if name == "id":
                self.identifiers.append(value or "")
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_figures_survive_a_file() -> None:
    found = comparison()
    assert Comparison.from_json(found.to_json()) == found


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 2}', '{"format": 1, "measures": [{"way": 3}]}', "null"])
def test_other_files_are_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no figures"):
        Comparison.from_json(text)
    (tmp_path / "x.json").write_text(text)
    result = CliRunner().invoke(app, ["compare", "--from", str(tmp_path / "x.json"), "--out", str(tmp_path / "out")])
    assert result.exit_code == 2
    assert not (tmp_path / "out").exists()


def test_the_ratio_is_that_of_the_issue() -> None:
    """(total - one steady step) ÷ pause: (8.2 - 0.2) ÷ 0.1, and ÷ (0.1 - 0.04) without the certificate."""
    ((way, whole, apart),) = ratios(comparison().of("8M", CHANGE))
    assert way.name == "live"
    assert whole == pytest.approx(80)
    assert apart == pytest.approx(8.0 / 0.06)
    assert ratios(comparison().of("30M", OTHER)) == []
    said = "".join(report.verdicts(comparison().of("8M", CHANGE)))
    assert "**80** with the certificate" in said
    assert "**133** without the certificate" in said
    assert "reached without the certificate" in said


def test_of_several_the_one_in_the_middle_counts() -> None:
    one = Measure("live", "8M", CHANGE, total=1.0, losses=LOSSES)
    found = Comparison("", "", 8, (one, replace(one, total=9.0), replace(one, reason="no"), replace(one, total=2.0)))
    assert found.of("8M", CHANGE)["live"].total == 2.0


def test_the_page_stands_alone() -> None:
    text = page(comparison())
    read = Checked(text)
    assert read.asks == []
    assert read.seen.get("script", 0) == read.seen.get("link", 0) == read.seen.get("img", 0) == 0
    assert read.seen["svg"] == 5  # one over the sizes; of two cases phases and losses; nothing of the impossible one
    assert len(read.identifiers) == len(set(read.identifiers))
    assert "a machine <2 cores>" in read.text
    assert "RuntimeError: <none> &" in read.text
    assert "second line" not in read.text
    for url in re.findall(r"https?://[^\"'\s>]+", text):
        assert url.startswith("http://www.w3.org/"), url  # names of SVG's own namespaces, which nobody fetches


def test_pictures_are_whole_and_the_same_each_time() -> None:
    found = comparison()
    measures = found.of("8M", CHANGE)
    drawn = report.phases(measures, "one")
    assert drawn == report.phases(measures, "one")
    for svg in (drawn, report.losses(measures, found.before, "two")):
        ElementTree.fromstring(svg)
    for used in ("drain", "convert", "first step"):
        assert used in drawn
    assert ">load<" not in drawn


def test_tables_have_all_ways_and_phases() -> None:
    text = report.document(comparison())
    for line in text.splitlines():
        assert not line.startswith("| ") or len(line.split(" | ")) in (len(report.HEAD), len(PHASES) + 1)
    assert "not possible" in text
    assert "80 ×" in text  # how much longer than live
    assert "8.0M parameters" in report.short(comparison())


def test_a_run_that_is_ended_keeps_what_it_has_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measures = [*comparison().measures[:2]]
    monkeypatch.setattr(measuring, "measure_in", lambda *_: measures.pop(0) if measures else sys.exit(143))
    change = ComparedChange(ComparedLayout(2, 1), ComparedLayout(4, 1))
    with pytest.raises(SystemExit):  # in the third
        command.measured([Size.SMALL], [change], [*WayName], 1.0, None, tmp_path)
    kept = Comparison.from_json((tmp_path / command.JSON).read_text())
    assert [each.way for each in kept.measures] == ["live", "deepspeed"] and kept.measures[0].change == str(change)


def test_the_choices_are_all_sizes_and_ways() -> None:
    assert [each.value for each in Size] == list(SHAPES)
    assert [each.value for each in WayName] == [way.name for way in WAYS.values()]
    said = CliRunner().invoke(app, ["compare", "--help"], env={"COLUMNS": "300", "TERM": "dumb"}).output
    for way in WAYS.values():
        assert re.search(rf"(?<=[<\[|]){way.name}(?=[|>\]])", said), way.name


@pytest.mark.parametrize("text", ["", "data=2", "data=2,zero_stage=1", "data=5,zero_stage=1:data=2,zero_stage=1"])
def test_what_is_no_change_is_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        ComparedChange.parse(text)
    result = CliRunner().invoke(app, ["compare", "--change", text, "--out", str(tmp_path / "out")])
    assert result.exit_code == 2


@pytest.mark.parametrize("wrong", [["--size", "9T"], ["--way", "telepathy"]])
def test_unknown_names_are_refused(wrong: list[str], tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["compare", *wrong, "--out", str(tmp_path / "out")])
    assert result.exit_code == 2
    said = " ".join(result.output.replace("│", " ").split())
    assert f"'{wrong[1]}' is not one of" in said and ("'tiny'" in said or "'live'" in said)


def test_defaults_are_what_they_are_called() -> None:
    for text in command.CHANGES:
        change = ComparedChange.parse(text)
        assert BATCH % max(change.source.data, change.target.data) == 0
    task = Task(WAYS["live-gloo"], "whole", "tiny", ComparedChange(ComparedLayout(2, 1), ComparedLayout(4, 3)), "x")
    assert from_record(Task, json.loads(json.dumps(to_record(task)))) == task and task.processes == 4
    assert "4 ranks, stage 3" in str(task.change)


def test_what_was_measured_is_drawn_again(tmp_path: Path) -> None:
    (tmp_path / "figures.json").write_text(comparison().to_json())
    arguments = ["compare", "--from", str(tmp_path / "figures.json"), "--out", str(tmp_path / "out")]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    written = {file.name for file in (tmp_path / "out").iterdir()}
    assert written == {command.JSON, command.TABLES, command.SHORT, command.PAGE, command.PICTURE}
    assert (tmp_path / "out" / command.JSON).read_text() == comparison().to_json()
    ElementTree.parse(tmp_path / "out" / command.PICTURE)
