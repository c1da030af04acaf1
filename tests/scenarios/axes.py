"""Scenarios of the pipeline, tensor, sequence and expert axes."""

from __future__ import annotations

from typing import Any

from tests.scenarios.row import BF16, FP16, Event, Row, Run, layout, switched, to

STARTED: dict[str, Any] = {"undisturbed": "start"}
LLAMA: dict[str, Any] = {"model": "llama", "bound": 1e-4}
ULYSSES: dict[str, Any] = {"model": "ulysses", **STARTED}
PIPELINE: dict[str, Any] = {"model": "pipeline"}
MIXTRAL: dict[str, Any] = {"model": "mixtral", **STARTED, "bound": 1e-4}
MOE: dict[str, Any] = {"model": "moe", **STARTED, "bound": 1e-4}

ROWS = (
    switched("tensor", layout(4, 1), layout(2, 1, tensor=2), **LLAMA),
    switched("tensor", layout(2, 1, tensor=2), layout(1, 2, tensor=4), **LLAMA, full=True),
    switched("tensor", layout(2, 1, tensor=2), layout(4, 3), **LLAMA, full=True),
    switched("tensor", layout(1, 0), layout(2, 3, tensor=2), **LLAMA, full=True),
    switched("tensor in bf16", layout(2, 1), layout(2, 1, tensor=2), BF16, **{**LLAMA, "bound": 0.02}, full=True),
    switched("sequence", layout(2, 1), layout(2, 1, sequence=2), **ULYSSES),
    switched("sequence", layout(1, 3, sequence=4), layout(2, 1, sequence=2), **ULYSSES, full=True),
    switched("sequence", layout(2, 2, sequence=2), layout(4, 0), **ULYSSES, full=True),
    switched("pipe", layout(1, 1, pipe=2), layout(1, 1, pipe=4), **PIPELINE),
    switched("pipe", layout(1, 1, pipe=4), layout(2, 1, pipe=2), **PIPELINE, full=True),
    switched("pipe", layout(2, 1, pipe=2), layout(4, 1), **PIPELINE, full=True),
    switched("pipe", layout(4, 0), layout(2, 1, pipe=2), **PIPELINE, full=True),
    switched(
        "pipe in bf16", layout(2, 1, pipe=2), layout(1, 1, pipe=3), BF16, **PIPELINE, **{"bound": 0.02}, full=True
    ),
    switched(
        "pipe in fp16", layout(1, 1, pipe=2), layout(2, 1, pipe=2), FP16, **PIPELINE, **{"bound": 0.02}, full=True
    ),
    Row(
        "pipe: boundaries",
        Run(layout(2, 1, pipe=2), "pipeline", events=to(3, boundaries=(0, 2, 7))),
        ends={**layout(2, 1, pipe=2), "boundaries": (0, 2, 7)},
        resumes=True,
        full=True,
    ),
    switched("experts", layout(4, 1), layout(4, 1, expert=2), **MIXTRAL),
    switched("experts", layout(4, 1, expert=4), layout(2, 3, expert=2), **MIXTRAL, full=True),
    switched("experts", layout(4, 3, expert=2), layout(4, 2), **MIXTRAL, full=True),
    switched("experts and tensor", layout(2, 1, tensor=2, expert=2), layout(4, 1, expert=4), **MIXTRAL, full=True),
    switched("deepspeed.moe", layout(4, 1), layout(4, 2, expert=2), **MOE),
    switched("deepspeed.moe", layout(4, 2, expert=4), layout(2, 1, expert=2), **MOE, full=True),
    Row(
        "tensor, then stage, then data",
        Run(
            layout(2, 1, tensor=2),
            "llama",
            events=(
                Event(1, "switch", layout(1, 1, tensor=4)),
                Event(2, "switch", layout(1, 2, tensor=4)),
                *to(4, **layout(4, 3, tensor=1)),
            ),
        ),
        ends=layout(4, 3),
        bound=1e-4,
        resumes=True,
        full=True,
    ),
)
