"""Golden plans: the bytes of some named changes, kept in a file, so that a change of the planner shows what it changes.

To accept new figures: python -m tests.dry_run.test_golden
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ds_dynatrain.dry_run.change import Question

FILE = Path(__file__).with_name("golden_plans.json")
CHANGES = {
    "8B, data 16 to 12": ("llama-3-8b", "data=16,zero_stage=1", "data=12"),
    "8B, stage 1 to 3": ("llama-3-8b", "data=16,zero_stage=1", "zero_stage=3"),
    "8B, tensor 8 to 4": ("llama-3-8b", "tensor=8,data=2,zero_stage=1", "tensor=4,data=4"),
    "70B, pipe 4 to 8": ("llama-3-70b", "pipe=4,data=8,zero_stage=1", "pipe=8,data=4"),
    "30B-A3B, expert 16 to 8": ("qwen3-30b-a3b", "data=32,expert=16,zero_stage=1", "expert=8"),
    "8x7B, pipe 2 to 4, expert 8": ("mixtral-8x7b", "pipe=2,data=16,expert=8,zero_stage=1", "pipe=4,data=8"),
}
"""Model and layouts of each change, on nodes of 8."""


def figures(name: str) -> dict[str, int]:
    """The bytes of a change."""
    model, source, target = CHANGES[name]
    found = Question.read(model, source, target, None, None, None, 8).answer().figures
    assert found is not None
    moved = found.bytes
    return {
        **{"kept": moved.kept, "cast": moved.cast, "sent": moved.sent, "between nodes": moved.between_nodes},
        **{"bound": moved.minimum, "peak memory": found.memory.peak},
    }


@pytest.mark.parametrize("name", CHANGES)
def test_a_plan_is_as_it_was(name: str) -> None:
    was, now = json.loads(FILE.read_text())[name], figures(name)
    differs = [
        f"{key} was {was[key]:,}, is {now[key]:,} ({now[key] - was[key]:+,})" for key in now if now[key] != was[key]
    ]
    assert not differs, f"{name}: {'; '.join(differs)}"


if __name__ == "__main__":
    FILE.write_text(json.dumps({name: figures(name) for name in CHANGES}, indent=1) + "\n")
