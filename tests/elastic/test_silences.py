"""Silences that are no deaths, in real jobs on hosts of their own: `tools/silences.py`, one round of each kind."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from tests.elastic.hosts import NoHostsError

TOOLS = Path(__file__).parents[2] / "tools"

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]


def test_nobody_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(TOOLS))
    try:
        found = importlib.import_module("silences").run(["cut 6", "stop 6", "all 6", "cut 20", "stop 20"], 1, tmp_path)
    except NoHostsError as reason:
        pytest.skip(str(reason))
    assert not [f"{name}: {each}" for name, wrong in found.items() for each in wrong if each]
