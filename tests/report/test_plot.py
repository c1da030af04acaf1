"""The plot: a PNG for one curve and for several, with and without switches."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ds_dynatrain.report import Side, SwitchEvent

PNG = b"\x89PNG\r\n\x1a\n"

plots = pytest.importorskip("examples.plot")
pytest.importorskip("matplotlib")

STATIC = plots.Curve("static", {step: 5.0 / (step + 1) for step in range(20)}, {9: 0.6, 19: 0.3})
SWITCHING = plots.Curve("switching", {step: 5.0 / (step + 1) * (1 + 1e-7 * (step > 10)) for step in range(20)})
SWITCH = SwitchEvent(
    outcome="committed",
    generation=1,
    step=10,
    source=Side({"data": 2, "zero_stage": 1}, (0, 1)),
    target=Side({"data": 4, "zero_stage": 3}, (0, 1, 2, 3)),
)


@pytest.mark.parametrize("curves", [[STATIC], [STATIC, SWITCHING], [STATIC, SWITCHING, STATIC]])
@pytest.mark.parametrize("events", [[], [SWITCH, replace(SWITCH, outcome="rolled_back", step=15)]])
def test_plot_is_a_png(tmp_path: Path, curves: list[object], events: list[SwitchEvent]) -> None:
    path = plots.plot(tmp_path / "new" / "losses.png", curves, events)
    assert path == tmp_path / "new" / "losses.png"
    assert path.read_bytes().startswith(PNG)
