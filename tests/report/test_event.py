"""Events: both written forms, the file, the log, the table."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from ds_dynatrain.report import CertificateSummary, EventWriter, Side, SwitchEvent, log_event, read_events
from ds_dynatrain.report.table import table

EVENT = SwitchEvent(
    outcome="committed",
    generation=3,
    step=20,
    source=Side({"data": 2, "zero_stage": 1, "pipe": 1}, (0, 1)),
    target=Side({"data": 4, "zero_stage": 3, "pipe": 1}, (0, 2, 1, 3)),
    bytes_kept=1_000_000,
    bytes_local=250_000,
    bytes_sent=12_340_000,
    bytes_minimum=12_340_000,
    phases_ms={"drain": 0.2, "rebuild": 8.1, "move": 25.0, "verify": 7.4},
    pause_ms=41.3,
    certificate_ms=7.4,
    peak_memory_bytes=3_000_000,
    memory_bound_bytes=4_000_000,
    certificate=CertificateSummary(58, ("weight", "master", "exp_avg", "exp_avg_sq"), "00ff"),
)
FAILED = replace(EVENT, outcome="rolled_back", certificate=None, reason="exp_avg of blocks.0.up.weight differs")


def test_line_of_a_committed_switch() -> None:
    assert EVENT.line() == (
        "switch 3 at step 20: data=2 zero_stage=1 -> data=4 zero_stage=3 in 41 ms "
        "(drain 0, rebuild 8, move 25, verify 7), sent 12.3 MB (minimum 12.3), certificate ok (58 tensors, 7 ms)"
    )


def test_lines_of_the_other_ends() -> None:
    head = "switch 3 at step 20: data=2 zero_stage=1 -> data=4 zero_stage=3"
    assert FAILED.line() == (
        f"{head} rolled back after 41 ms (drain 0, rebuild 8, move 25, verify 7): exp_avg of blocks.0.up.weight differs"
    )
    assert (
        replace(EVENT, warnings=("head.bias had no gradient",)).line().endswith("; warning: head.bias had no gradient")
    )


def test_an_axis_other_than_one_is_named() -> None:
    assert Side({"pipe": 2, "data": 1, "tensor": 1, "zero_stage": 0}, ()).describe() == "data=1 pipe=2 zero_stage=0"


def test_json_is_one_line_with_plain_values() -> None:
    line = EVENT.to_json()
    assert "\n" not in line
    read = json.loads(line)
    assert read["event"] == "switch"
    assert read["target"] == {"layout": {"data": 4, "zero_stage": 3, "pipe": 1}, "members": [0, 2, 1, 3]}
    assert list(read["phases_ms"]) == ["drain", "rebuild", "move", "verify"]


@pytest.mark.parametrize("event", [EVENT, FAILED])
def test_json_comes_back_equal(event: SwitchEvent) -> None:
    again = SwitchEvent.from_json(event.to_json())
    assert again == event
    assert list(again.phases_ms) == list(event.phases_ms)


@given(reason=st.text(), warnings=st.lists(st.text()).map(tuple), pause=st.floats(0, 1e9), sent=st.integers(0, 2**62))
def test_json_keeps_any_value(reason: str, warnings: tuple[str, ...], pause: float, sent: int) -> None:
    event = replace(FAILED, reason=reason, warnings=warnings, pause_ms=pause, bytes_sent=sent)
    assert "\n" not in event.to_json()
    assert SwitchEvent.from_json(event.to_json()) == event


@pytest.mark.parametrize(
    "line",
    ["", "no json", "[]", '{"event":"step"}', EVENT.to_json().replace("committed", "perhaps"), '{"event":"switch"}']
    + [EVENT.to_json().replace('"step"', '"stop"'), EVENT.to_json().replace('"source"', '"from"')],
)
def test_json_that_is_no_switch(line: str) -> None:
    with pytest.raises(ValueError):
        SwitchEvent.from_json(line)


def test_file_grows_by_one_line_an_event(tmp_path: Path) -> None:
    path = tmp_path / "new" / "switches.jsonl"
    for event in (EVENT, FAILED):
        EventWriter(path).write(event)
    assert len(path.read_text().splitlines()) == 2
    assert read_events(path) == [EVENT, FAILED]


def test_bad_line_of_a_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "switches.jsonl"
    path.write_text(EVENT.to_json() + "\n{}\n")
    with pytest.raises(ValueError, match=r"switches\.jsonl, line 2"):
        read_events(path)


def test_log_level_follows_the_outcome(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="ds_dynatrain"):
        for event in (EVENT, FAILED, replace(EVENT, warnings=("look",))):
            log_event(event)
    assert [record.levelno for record in caplog.records] == [logging.INFO, logging.WARNING, logging.WARNING]
    assert caplog.records[0].getMessage() == EVENT.line()


def test_table_has_a_row_an_event() -> None:
    made = table([EVENT, FAILED])
    assert made.row_count == 2
    console = Console(width=80)
    with console.capture() as capture:
        console.print(made)
    text = capture.get()
    for words in (
        "data=2 zero_stage=1",
        "data=4 zero_stage=3",
        "0,2,1,3",
        "12.3",
        "committed",
        "rolled back",
        "step 20: exp_avg of",
    ):
        assert words in text


def test_a_line_about_compiling_again_goes_into_its_event(tmp_path: Path) -> None:
    path = tmp_path / "switches.jsonl"
    later = replace(EVENT, generation=EVENT.generation + 1)
    writer = EventWriter(path)
    for event in (EVENT, later):
        writer.write(event)
        writer.write_recompile(replace(event, recompile_ms=12.5 * event.generation))
    found = read_events(path)
    assert [event.recompile_ms for event in found] == [12.5 * event.generation for event in (EVENT, later)]
    assert [replace(event, recompile_ms=None) for event in found] == [EVENT, later]
    writer.write_recompile(replace(EVENT, generation=99, recompile_ms=1.0))
    with pytest.raises(ValueError, match="line 5: a recompile line of a switch that is not in the file"):
        read_events(path)
