"""Weights that come back: bit-equal weights and masters in every layout, and nothing lost by what cannot be loaded."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch

from ds_dynatrain import weights
from ds_dynatrain.errors import WeightsError, WorldChanged
from ds_dynatrain.space import Layout
from tests.engine import mixtures, oracle
from tests.engine.axis_walks import Subject
from tests.engine.pool import RankPool
from tests.engine.subjects import language_model, module, pipelined
from tests.engine.transitions import layout
from tests.weights import cases

Pairs = list[tuple[str, torch.Tensor]]


def drawn(engine: Any) -> Pairs:
    """New float32 values for each tensor, the same on all ranks."""
    generator = torch.Generator().manual_seed(engine.global_steps)
    return [(meta.name, torch.randn(meta.shape, generator=generator) * 0.1) for meta in weights.source(engine).metadata]


def loading(engine: Any, subject: Subject, is_sent: bool) -> list[str]:
    """Load new values, and return what is not as it should be."""
    before, pairs = oracle.gather(engine, subject.places), drawn(engine)
    engine.load_weights(iter(pairs) if engine.rank == 0 or not is_sent else None)
    after = oracle.gather(engine, subject.places)
    for key in after.tensors:
        if key[1] in ("weight", "master"):
            del before.tensors[key]
    kept = oracle.State({key: after.tensors[key] for key in before.tensors}, after.steps, after.groups, after.counters)
    wrong = oracle.differences(before, kept)
    found = {name: tensor.clone() for name, tensor in weights.source(engine, full_on="all").iter_full()}
    wrong += cases.differing(found, {name: held.to(found[name].dtype).flatten() for name, held in pairs})
    masters = {name: held for (name, kind), held in after.tensors.items() if kind == "master"}
    plain = {name: held.flatten() for name, held in pairs if name in masters}  # experts have other names
    return wrong + cases.differing({name: masters[name] for name in plain}, plain)


def loading_case(find: cases.Find, path: list[Layout], is_sent: bool, dtype: str) -> list[Any]:
    """Load in each layout of a path, and train on."""
    return cases.at_each(find, dtype, path, partial(loading, is_sent=is_sent))


WALKS: dict[str, tuple[cases.Find, str]] = {
    "tied": (partial(language_model, "llama tied"), "d2t2z3 > d2t2z1 > d4z0"),
    "module": (module, "d4z3 > d3z2 > d2z1"),
    "experts": (partial(mixtures.autoep, "mixtral"), "d4e2z2 > d4e4z3"),
    "stages": (pipelined, "p2d2z1 > p4z0"),
}


@pytest.mark.parametrize(
    ("name", "is_sent", "dtype"),
    [
        ("tied", True, "bf16"),
        *(
            pytest.param(*given, marks=pytest.mark.full)
            for given in (
                ("tied", False, "fp32"),
                ("module", False, "bf16"),
                ("module", True, "fp32"),
                ("experts", False, "bf16"),
                ("stages", True, "bf16"),
            )
        ),
    ],
)
def test_weights_and_masters_are_those_given(pool: RankPool, name: str, is_sent: bool, dtype: str) -> None:
    find, path = WALKS[name]
    layouts = [layout(short) for short in path.split(" > ")]
    found = pool.run(loading_case, find=find, path=layouts, is_sent=is_sent, dtype=dtype, seconds=240)
    assert [places for places in found if any(places or ())] == []


def breaking(pairs: Pairs) -> Iterator[tuple[str, torch.Tensor]]:
    """All but the last tensor, and then an error."""
    yield from pairs[:-1]
    raise OSError("the receiver is gone")


SPOILED: dict[str, tuple[Callable[[Pairs], Any], str]] = {
    "unknown": (lambda pairs: [("model.layers.0.nothing.weight", pairs[0][1]), *pairs], "no tensor 'model.layers.0.no"),
    "shape": (lambda pairs: [(pairs[0][0], pairs[0][1][1:]), *pairs[1:]], r"values are expected; give the full tensor"),
    "missing": (lambda pairs: pairs[:-1], "1 of .* tensors are missing, such as"),
    "two values": (lambda pairs: [*pairs, (pairs[0][0], pairs[0][1] + 1)], "are one tensor, and have two values"),
    "another row": (
        lambda pairs: [(pairs[0][0], torch.cat([pairs[0][1][:-1], pairs[0][1][-1:] + 1])), *pairs],
        "are one tensor, and have two values",
    ),
    "meta": (lambda pairs: [(name, held.to("meta")) for name, held in pairs], "is on the meta device"),
    "integers": (lambda pairs: [(name, held.int()) for name, held in pairs], "floating-point values are expected"),
    "broken": (breaking, "the receiver is gone"),
}


def refused(engine: Any, subject: Subject) -> dict[str, tuple[str, list[str]]]:
    """What is said of each spoiled list, on its own and sent, and what has changed in the state."""
    before, pairs, found = oracle.gather(engine, subject.places), drawn(engine), {}
    for title, (spoil, _) in SPOILED.items():
        for is_sent in (False, True):
            with pytest.raises(WeightsError) as caught:
                engine.load_weights(spoil(pairs) if engine.rank == 0 or not is_sent else None)
            changed = oracle.differences(before, oracle.gather(engine, subject.places))
            found[f"{title}, {is_sent}"] = str(caught.value), changed
    with patch.object(engine._parts, "is_discarded", True):
        for call in (partial(engine.load_weights, pairs), partial(next, weights.source(engine).iter_full())):
            with pytest.raises(WorldChanged, match="aborted and formed anew in this global batch"):
                call()
    with pytest.raises(WeightsError) as caught:
        engine.load_weights(pairs if engine.rank else None)
    found["none"] = str(caught.value), []
    with pytest.raises(WeightsError) as caught:
        engine.load_weights((name, held + engine.rank) for name, held in pairs)
    return {
        **found,
        "differing": (str(caught.value), oracle.differences(before, oracle.gather(engine, subject.places))),
    }


def refused_case() -> list[Any]:
    """Try to load what cannot be loaded, and train on."""
    return cases.at_each(partial(language_model, "llama"), "bf16", [layout("d2t2z3"), layout("d2t2z1")], refused)


@pytest.mark.full
def test_nothing_is_lost_by_what_cannot_be_loaded(pool: RankPool) -> None:
    for places in pool.run(refused_case, seconds=120):
        for found in places:
            said, _ = found.pop("none")
            assert "gave None and others gave weights" in said
            said, changed = found.pop("differing")
            assert "members 0 and 1 gave different values" in said and not changed
            for title, (reason, changed) in found.items():
                assert not changed, title
                assert re.search(SPOILED[title.partition(",")[0]][1], reason), (title, reason)
