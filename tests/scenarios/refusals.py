"""Scenarios of what is refused: the error has its text on every rank, and nothing has changed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.scenarios.row import Event, Layout, Row, Run, layout


def refused(
    name: str, start: Layout, asked: Mapping[str, Mapping[str, Any]], model: str = "gpt", full: bool = False
) -> Row:
    """Return switches that are refused after two steps, each with its text, and a job that goes on."""
    events = tuple(Event(2, "switch", sizes, raises=text) for text, sizes in asked.items())
    run = Run(start, model, events=events, steps=4)
    alike = (("{row}/run/end", "{undisturbed}/end"),)
    return Row(f"refused: {name}", run, undisturbed="start", bound=0.0, alike=alike, full=full)


def unusable(name: str, text: str, start: Layout | None = None, model: str = "gpt", **config: Any) -> Row:
    """Return a configuration that `initialize` refuses on every rank."""
    return Row(f"not started: {name}", Run(start or layout(2, 1), model, config), fails=text, bound=None)


ROWS = (
    refused(
        "what no layout is, and axes that the model does not have",
        layout(2, 1),
        {
            "needs 8 members and this launch has 4 processes": {"data": 8},
            "step 1 has passed: this is step 2": {"data": 4, "at": 1},
            "at='soon' is not a whole number": {"data": 4, "at": "soon"},
            "zero_stage=4 is no ZeRO stage; give one of 0, 1, 2, 3": {"zero_stage": 4},
            "the model has no pipe axis: it is not a deepspeed.PipelineModule": {"pipe": 2},
            "AutoTP cannot cut GPT": {"tensor": 2},
            "the model has no sequence axis": {"sequence": 2},
            "the model has no expert axis": {"expert": 2},
            "give 2 shares that are 12 samples together": {"shares": (8, 8)},
            "no layout was given": {},
        },
    ),
    refused(
        "a pipeline at stage 2",
        layout(2, 1, pipe=2),
        {"DeepSpeed trains pipelines only in ZeRO stages 0 and 1": {"zero_stage": 2}},
        "pipeline",
        full=True,
    ),
    refused(
        "experts that do not divide",
        layout(3, 1),
        {"expert=3 does not divide the 4 experts": {"expert": 3}},
        "mixtral",
        full=True,
    ),
    refused(
        "a late change of tensor ranks",
        layout(2, 1),
        {"switch with late=False": {"tensor": 2, "late": True}},
        "llama",
        full=True,
    ),
    Row(
        "refused: another one while one is pending",
        Run(
            layout(2, 1),
            events=(
                Event(2, "switch", {"data": 4, "at": 5}),
                Event(3, "switch", {"data": 3}, "is pending"),
            ),
        ),
        ends=layout(4, 1),
    ),
    Row(
        "refused: a save in the window of a late switch",
        Run(
            layout(2, 1),
            events=(
                Event(2, "switch", {**layout(4, 3), "late": True}),
                Event(2, "save", raises="CheckpointError", within=True),
            ),
            steps=4,
        ),
        ends=layout(4, 3),
    ),
    Row(
        "refused: another batch size",
        Run(layout(2, 1), events=(Event(2, "resize", raises="UnsupportedError"),), steps=4),
    ),
    unusable("a key that is misspelt", "did you mean 'layout'?", dynatrain={"layuot": {}}),
    unusable("a value of another type", "expected number, got '20' (string)", dynatrain={"timeout_seconds": "20"}),
    unusable("more ranks than processes", "needs 8 processes and this launch has 4", layout(8, 1)),
    unusable("a lean job without a folder", "dynatrain.fallback.path", dynatrain={"safety": "lean"}),
    unusable("a transport that is gone", '"ring" is gone', dynatrain={"transport": "ring"}),
    unusable(
        "an optimizer that scales whole parameters",
        "it scales a step by norms of whole parameters",
        optimizer={"type": "Lamb", "params": {"lr": 1e-3}},
    ),
    unusable("a key of DeepSpeed's that was not tried", "hpz", zero_optimization={"zero_hpz_partition_size": 2}),
    unusable(
        "exact at stage 0", "an exact job has data ranks at ZeRO stages 1 to 3", layout(2, 0), dynatrain={"exact": True}
    ),
    unusable(
        "exact with balance", "dynatrain.balance beside dynatrain.exact", dynatrain={"exact": True, "balance": {}}
    ),
    unusable("stages of a model without", "the model has no pipe axis", layout(1, 1, pipe=2)),
    unusable(
        "a tag that is not there",
        "is no checkpoint of ds_dynatrain",
        layout(4, 1),
        dynatrain={"resume": {"path": "{row}", "tag": "x"}},
    ),
)
