"""The rules of which combinations are let in say what the table of `docs/dev/feasibility.md` say, cell by cell."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ds_dynatrain.space import Layout
from ds_dynatrain.support.axes import (
    EXPERTS,
    NATIVE_EXPERTS,
    PIPELINE,
    ULYSSES,
    Features,
    Rule,
    refusal,
)
from tests.engine.transitions import RANKS, combinations

DOCS = Path(__file__).parents[2] / "docs"
TEXT = (DOCS / "dev" / "feasibility.md").read_text().partition("<!-- feasibility -->")[2]
KINDS: dict[str, tuple[Features, tuple[str, ...]]] = {
    "module": (frozenset(), ("data", "tensor")),
    "transformers": (frozenset(), ("data", "tensor")),
    "pipeline": (frozenset({PIPELINE}), ("pipe", "data", "tensor")),
    "transformers experts": (frozenset({EXPERTS}), ("data", "expert", "tensor")),
    "native experts": (frozenset({NATIVE_EXPERTS}), ("data", "expert", "tensor")),
    "pipeline of native experts": (frozenset({PIPELINE, NATIVE_EXPERTS}), ("pipe", "data", "expert")),
    "pipeline of transformers experts": (frozenset({PIPELINE, EXPERTS}), ("pipe", "data", "expert")),
    "ulysses": (frozenset({ULYSSES}), ("data", "sequence", "tensor")),
    "ulysses with native experts": (frozenset({ULYSSES, NATIVE_EXPERTS}), ("data", "expert", "sequence")),
}
"""What a model of each kind has in it, and its axes."""
OK = "ok"
CORRECTED: tuple[Rule, ...] = (
    Rule((PIPELINE,), "clipped by the norm of the first stage alone", ("pipe",), stages=(0,)),
    Rule((NATIVE_EXPERTS,), "clipped by the mean over ranks of the norms of what each holds", ("expert",), stages=(0,)),
    Rule((EXPERTS,), "clipped by the mean over ranks of the norms of what each holds", ("expert",), stages=(0,)),
    Rule((EXPERTS,), "clipped by the norm of some experts", ("expert", "tensor"), stages=(1, 2)),
    Rule(
        (PIPELINE, NATIVE_EXPERTS),
        "hangs if a stage has no experts: it has one norm less to add up than the others",
        ("pipe",),
        stages=(1,),
    ),
    Rule((PIPELINE, EXPERTS), "raises if a stage has no experts", ("pipe",)),
    Rule(
        (ULYSSES,),
        "gradients are the mean over sequence ranks, in the other stages the sum",
        ("sequence",),
        stages=(3,),
    ),
)
"""What DeepSpeed trains otherwise than on one rank, and the adapters put right: it is let in."""


def cells(kind: str) -> dict[Layout, str]:
    """Every combination in the rows of a kind, and "ok" or what its note says."""
    notes, found = dict(re.findall(r"^(\d+)\. `(.*)`$", TEXT, re.M)), dict[Layout, str]()
    for row in re.findall(rf"^\| {kind} \| (.*?) \|$", TEXT, re.M):
        axes, *said = row.split(" | ")
        for sizes in axes.split(", "):
            place = {axis: int(size) for axis, size in re.findall(r"(\w+)=(\d+)", sizes)}
            for stage, word in zip(range(4), said, strict=True):
                layout = Layout(**place, zero_stage=stage)
                assert layout not in found, layout
                found[layout] = word if word == OK else notes[word.strip("()")]
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_what_trains_is_let_in_and_nothing_else(kind: str) -> None:
    """But for what DeepSpeed does otherwise than on one rank, and the adapters put right."""
    features, axes = KINDS[kind]
    table = cells(kind)
    assert table.keys() == set(combinations(axes, EXPERTS in features)), f"{kind!r}: run `make feasibility`"
    for layout, words in table.items():
        trains = words == OK or any(rule.holds(features, layout) for rule in CORRECTED)
        is_let_in = refusal(features, layout, RANKS) is None
        assert is_let_in <= trains, f"{layout} is let in, and the table of {kind!r} says: {words}"
        assert is_let_in or words != OK, f"{layout} is refused, and the table of {kind!r} says that it trains"


@pytest.mark.parametrize("rule", CORRECTED, ids=lambda rule: rule.why)
def test_what_is_put_right_is_not_right_in_deepspeed(rule: Rule) -> None:
    """In some combination of each rule."""
    kinds = [kind for kind, (features, _) in KINDS.items() if features == set(rule.features)]
    found = [words for kind in kinds for layout, words in cells(kind).items() if rule.holds(KINDS[kind][0], layout)]
    assert found and set(found) != {OK}
