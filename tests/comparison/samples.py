"""Figures that nobody measured, to test what is made of figures."""

from __future__ import annotations

from ds_dynatrain.comparison.results import Comparison, Measure

CHANGE = "2 ranks, stage 1 → 4 ranks, stage 1"
OTHER = "4 ranks, stage 1 → 3 ranks, stage 2"
LOSSES = {step: 6.0 - step / 10 for step in range(1, 15)}


def comparison() -> Comparison:
    """Two sizes of one change and one of another, some ways impossible."""
    measures = []
    for size, parameters, factor in (("8M", 8_000_000, 1.0), ("30M", 30_000_000, 3.0)):
        measures += [
            Measure(
                "live",
                size,
                CHANGE,
                parameters,
                {"drain": 0.01, "move": 0.05 * factor, "proof": 0.03 * factor, "first step": 0.2},
                total=0.3 * factor,
                steady=0.2,
                pause=0.1 * factor,
                certificate=0.04 * factor,
                ahead=0.1,
                moved=96_000_000,
                peak=500_000_000,
                is_equal=True,
                losses=LOSSES,
            ),
            Measure(
                "deepspeed",
                size,
                CHANGE,
                parameters,
                {"save": 0.2, "convert": 3.0, "start": 2.0, "import": 2.0, "initialize": 1.0, "first step": 0.4},
                total=8.2 * factor,
                steady=0.2 * factor,
                written=112_000_000,
                peak=700_000_000,
                is_equal=True,
                losses=LOSSES,
            ),
            Measure("dcp", size, CHANGE, reason="RuntimeError: <none> & `nothing`\nsecond line"),
        ]
    measures.append(Measure("deepspeed", "30M", OTHER, reason="AssertionError"))
    return Comparison("a machine <2 cores>", "ds-dynatrain compare --out x", 8, tuple(measures))
