"""A wait that goes on says so, once."""

from __future__ import annotations

import logging

import pytest

from ds_dynatrain.engine.members import waiting


def test_it_names_whom_it_waits_for_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    monkeypatch.setattr(waiting.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(waiting.logger, "propagate", True)
    wait = waiting.Wait(lambda: "b/0")
    with caplog.at_level(logging.WARNING):
        for now[0] in (1.0, 9.9, 10.1, 30.0):
            wait.look()
    assert [record.getMessage() for record in caplog.records] == ["waiting for 10 s already: for b/0"]
