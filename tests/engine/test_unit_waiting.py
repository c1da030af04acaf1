"""A wait that goes on says so: to the log once, to the status again and again."""

from __future__ import annotations

import logging

import pytest

from ds_dynatrain.membership import liveness


def test_it_names_whom_it_waits_for(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    now, said, missing = [0.0], list[str](), ["b/0"]
    monkeypatch.setattr(liveness.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(liveness.logger, "propagate", True)
    with caplog.at_level(logging.WARNING), liveness.Wait(lambda: missing[0], said.append) as wait:
        for now[0] in (1.0, 9.9, 10.1, 15.0):
            wait.look()
        assert said == ["b/0"]
        missing[0], now[0] = "c/0", 21.0
        wait.look()
        assert said == ["b/0", "c/0"]
    assert said[-1] == ""
    assert [record.getMessage() for record in caplog.records] == [
        "waiting for 10 s already, for b/0; look at their logs if it goes on"
    ]


def test_a_short_one_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    now, said = [0.0], list[str]()
    monkeypatch.setattr(liveness.time, "monotonic", lambda: now[0])
    with liveness.Wait(lambda: "b/0", said.append) as wait:
        for now[0] in (9.0, 18.0, 27.0):
            wait.look()
            wait.rest()
    assert not said
