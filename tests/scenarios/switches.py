"""Scenarios of the data axis, the ZeRO stage, precision and the ways to carry out a switch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.scenarios.row import Event, Row, Run

BF16 = {"bf16": {"enabled": True}}
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 5, "hysteresis": 2}}
LATE = {"dynatrain": {"late": True}}
LEAN = {"dynatrain": {"safety": "lean", "fallback": {"path": "{folder}/fallback"}}}
OFFLOAD = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}
DEFAULT: Mapping[str, Any] = {}


def to(at: int, **sizes: Any) -> tuple[Event, ...]:
    """Save the state after so many steps, and switch there."""
    return Event(at, "save"), Event(at, "switch", sizes)


def layout(data: int, stage: int, **sizes: int) -> dict[str, int]:
    """Return a layout by its sizes."""
    return {"data": data, **sizes, "zero_stage": stage}


def pair(
    kind: str,
    one: tuple[int, int],
    other: tuple[int, int],
    config: Mapping[str, Any] = DEFAULT,
    bound: float = 1e-5,
    undisturbed: str = "stock",
    **more: Any,
) -> Row:
    """Return a switch from one (data, ZeRO stage) to another one in the middle of a run."""
    name = f"{kind}: data {one[0]} stage {one[1]} to data {other[0]} stage {other[1]}"
    events = to(3, data=other[0], zero_stage=other[1])
    run = Run(layout(*one), config=config, events=events, **more)
    return Row(name, run, ends=f"data={other[0]} zero_stage={other[1]}", bound=bound, undisturbed=undisturbed)


ROWS = (
    pair("fp32", (2, 0), (4, 1)),
    pair("fp32", (2, 1), (4, 3)),
    pair("fp32", (4, 3), (3, 2)),
    pair("fp32", (3, 2), (2, 0)),
    pair("fp32", (4, 2), (2, 3)),
    pair("fp32", (2, 3), (4, 0)),
    pair("fp32", (1, 0), (4, 3)),
    pair("fp32", (4, 1), (1, 2)),
    pair("bf16", (2, 1), (4, 3), BF16, 0.02),
    pair("bf16", (4, 3), (2, 0), BF16, 0.02),
    pair("bf16", (4, 0), (3, 2), BF16, 0.02),
    pair("fp16", (2, 1), (4, 3), FP16, 0.02),
    pair("fp16", (4, 3), (2, 2), FP16, 0.02),
    pair("late", (2, 1), (4, 3), LATE),
    pair("late", (4, 3), (2, 2), LATE),
    pair("late bf16", (2, 2), (4, 1), BF16 | LATE, 0.02),
    pair("lean", (2, 1), (4, 3), LEAN),
    pair("lean", (4, 3), (2, 1), LEAN),
    pair("boundary", (2, 1), (4, 3), undisturbed="start", loop="boundary"),
    pair("windows", (3, 2), (4, 1), loop="windows"),
)
