"""Scenarios of what a job can do besides: other groups, exact bits, balance, reports, roll-back."""

from __future__ import annotations

from typing import Any

from tests.scenarios.row import BF16, EXACT, Command, Event, Layout, Row, Run, full, layout, to, words

STOCK = {"train_micro_batch_size_per_gpu": None}
FROZEN = {"prefix": "blocks.0."}
REPORT = {"dynatrain": {"report": {"jsonl": "{folder}/report.jsonl"}}}
ADVISE = {"dynatrain": {"balance": {"mode": "advise", "every_steps": 2}}}
ACT = {"dynatrain": {"balance": {"mode": "act", "every_steps": 2}}}
PROFILED = {
    "pipeline": {"partition": "profile"},
    "dynatrain": {"balance": {"mode": "advise", "profile": "{row}/run/profile.json"}},
}


def exact(one: Layout, other: Layout, alone: Layout, more: dict[str, Any] | None = None, model: str = "gpt") -> Row:
    """Return a job with a switch that has the bits of one that trains in another layout from begin to end."""
    config = {**EXACT, **(more or {})}
    reports = "{row}/run/report.jsonl", "{undisturbed}/report.jsonl"
    return Row(
        f"exact: {model} {' '.join(more or {})} {words(one)} to {words(other)}",
        Run(one, model, config, to(3, **{**dict.fromkeys(one, 1), **other})),
        (Command(("compare-exact", *reports), prints="steps 1 to 6 are bit-identical"),),
        ends=other,
        bound=0.0,
        undisturbed=Run(alone, model, config),
        alike=(("{row}/run/end", "{undisturbed}/end"),),
    )


ALONE = layout(1, 1)

ROWS = (
    exact(layout(2, 1), layout(4, 3), ALONE),
    *full(exact(layout(3, 2), layout(2, 1), ALONE)),
    *full(
        exact(layout(4, 2), layout(2, 3), ALONE, model="gpt with dropout"),
        exact(layout(4, 3), layout(3, 3), ALONE, BF16),
        exact(layout(2, 1, pipe=2), layout(1, 1, pipe=4), ALONE, model="pipeline"),
    ),
    Row(
        "exact: saved and loaded in another world",
        Run(layout(4, 1), config=EXACT, events=(Event(3, "save"),)),
        (Run(layout(2, 3), config=EXACT, load="{row}/run/before"),),
        bound=0.0,
        undisturbed=Run(ALONE, config=EXACT),
        alike=(("{row}/run/end", "{row}/then1/end"), ("{row}/run/end", "{undisturbed}/end")),
        full=True,
    ),
    Row(
        "frozen from the start, as plain DeepSpeed has it",
        Run(layout(2, 1), events=(Event(0, "freeze", FROZEN), *to(3, **layout(4, 3)))),
        ends=layout(4, 3),
        undisturbed=Run(layout(4, 1), "frozen", STOCK, loop="stock"),
        full=True,
    ),
    Row(
        "frozen in the middle, and switched",
        Run(layout(4, 3), events=(Event(2, "freeze", FROZEN), Event(3, "switch", layout(2, 1)))),
        ends=layout(2, 1),
        undisturbed="start",
        full=True,
    ),
    Row(
        "frozen, switched, and trained again",
        Run(
            layout(2, 2),
            events=(
                Event(1, "freeze", FROZEN),
                Event(2, "switch", layout(4, 1)),
                Event(4, "freeze", {**FROZEN, "trained": True}),
            ),
        ),
        ends=layout(4, 1),
        undisturbed="start",
    ),
    Row(
        "frozen in a pipeline",
        Run(layout(2, 1, pipe=2), "pipeline", events=(Event(2, "freeze", {"prefix": "1."}), *to(4, pipe=4, data=1))),
        ends=layout(1, 1, pipe=4),
        undisturbed="start",
        full=True,
    ),
    Row(
        "frozen, trained again in another group, and switched",
        Run(
            layout(4, 2),
            events=(
                Event(1, "freeze", FROZEN),
                Event(3, "regroup", {**FROZEN, "decay": 0.1}),
                Event(4, "switch", layout(2, 3)),
            ),
        ),
        ends=layout(2, 3),
        undisturbed="start",
        full=True,
    ),
    Row(
        "another rate, and switched",
        Run(layout(2, 1), events=(Event(2, "set_rate", {"rate": 1e-2}), *to(3, **layout(4, 3)))),
        ends=layout(4, 3),
        undisturbed="start",
        full=True,
    ),
    Row(
        "a replica that has drifted",
        Run(
            layout(4, 1),
            events=(Event(5, "drift", {"name": "last.bias", "member": 2}), Event(5, "switch", layout(2, 3))),
        ),
        outcomes=("rolled_back",),
        reason="last.bias",
        bound=None,
    ),
    Row(
        "a request that no boundary comes for",
        Run(layout(2, 1), events=(Event(3, "switch", {"data": 4, "at": 100}),)),
        outcomes=("cancelled",),
    ),
    Row(
        "asked twice for the same",
        Run(layout(2, 1), events=(Event(2, "switch", {"data": 4, "at": 4}), Event(3, "switch", {"data": 4, "at": 4}))),
        ends=layout(4, 1),
        outcomes=("committed",),
    ),
    Row(
        "a report file",
        Run(layout(2, 1), config=REPORT, events=(Event(2, "switch", layout(4, 3)), Event(4, "switch", layout(3, 2)))),
        ends=layout(3, 2),
        reports=("committed", "committed"),
    ),
    Row(
        "plans ask nobody and change nothing",
        Run(layout(2, 1), events=(Event(2, "plan", layout(4, 3)), Event(3, "plan", {"data": 8})), steps=4),
        notes={
            "plan data=4 zero_stage=3": "",
            "plan data=8": "data=8 zero_stage=1 needs 8 members and this launch has 4 processes",
        },
    ),
    Row(
        "an evaluation in each world",
        Run(layout(2, 1), events=(Event(3, "evaluate"), Event(3, "switch", layout(4, 3)), Event(4, "evaluate"))),
        ends=layout(4, 3),
        notes={"evaluated": [60, 60]},
    ),
    Row(
        "balance: timed, and nothing moves",
        Run(layout(2, 1, pipe=2), "pipeline", ADVISE, (Event(5, "save_profile"),)),
        (
            Command(("balance", "{row}/run/profile.json", "--stages", "2"), prints="proposed"),
            Run(layout(2, 1, pipe=2), "pipeline", PROFILED),
        ),
        full=True,
    ),
    Row(
        "balance: a switch to what is suggested",
        Run(layout(1, 1, pipe=2), "pipeline", ADVISE, (Event(5, "suggest"),)),
        notes={"suggested": True},
        full=True,
    ),
    Row("balance: may move, and trains the same", Run(layout(2, 1, pipe=2), "pipeline", ACT), ends=None, full=True),
    Row("balance: without stages", Run(layout(4, 2), config=ADVISE, events=to(3, **layout(2, 1))), ends=layout(2, 1)),
    Row(
        "Trainer of Hugging Face: three worlds",
        Run(
            layout(2, 1),
            "llama",
            events=(Event(2, "switch", layout(4, 3)), Event(4, "switch", layout(3, 2))),
            loop="trainer",
        ),
        ends=layout(3, 2),
        outcomes=("committed",),
        bound=1e-4,
        undisturbed=Run(layout(4, 1), "llama", loop="stock trainer"),
        full=True,
    ),
    Row(
        "Trainer of Hugging Face: tensor ranks",
        Run(layout(4, 1), "llama", events=(Event(3, "switch", layout(2, 1, tensor=2)),), loop="trainer"),
        ends=layout(2, 1, tensor=2),
        full=True,
        bound=1e-4,
        undisturbed=Run(layout(4, 1), "llama", loop="stock trainer"),
    ),
    Row(
        "Lightning: two worlds",
        Run(layout(2, 1), events=(Event(3, "switch", layout(4, 3)),), loop="lightning", steps=5),
        ends=layout(4, 3),
        full=True,
    ),
    Row(
        "Lightning: fewer ranks",
        Run(layout(4, 2), events=(Event(2, "switch", layout(3, 1)),), loop="lightning", steps=5),
        ends=layout(3, 1),
        full=True,
    ),
)
