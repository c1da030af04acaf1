"""What a source promises: how long a tensor is valid, its world, its shards, and how much memory it takes."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as td
from torch import nn
from torch.distributed.tensor import Shard

from ds_dynatrain import weights
from ds_dynatrain.errors import ConfigError, WeightsError
from ds_dynatrain.space import Layout
from tests.engine import axis_walks, mixtures
from tests.engine.axis_walks import Subject
from tests.engine.language_models import _of
from tests.engine.pool import RankPool
from tests.engine.subjects import Texts, language_model, named_step, pipelined
from tests.engine.transitions import layout
from tests.weights import cases

TIED = partial(language_model, "llama tied")


def poisoned(engine: Any, subject: Subject) -> list[str]:
    """Keep all tensors of a pass, and return which of them outlived it, and what has become of the weights."""
    wanted = cases.expected(engine, subject)
    kept = dict(weights.source(engine, "module", "all", poison=True).iter_full())
    held = [name for name, tensor in kept.items() if not tensor.isnan().all()]
    return held + cases.differing(cases.expected(engine, subject), wanted)


def poisoned_case(path: list[Layout]) -> list[Any]:
    return cases.at_each(TIED, "bf16", path, poisoned)


def test_a_tensor_is_valid_until_the_next_one(pool: RankPool) -> None:
    for places in pool.run(poisoned_case, path=[layout("d2t2z3"), layout("d4z1")]):
        assert not any(places)


def stale_case() -> list[str]:
    """What is said of a source after a switch, in an open global batch, on an idle member and of a wrong name."""
    said, subject = list[str](), TIED()
    with axis_walks.started(subject, "bf16", layout("d2z3")) as made:
        engine, batches = made.engine, iter(made.loader)
        if engine.idle:
            with pytest.raises(WeightsError) as caught:
                weights.source(engine)
            said.append(str(caught.value))
        batch = next(batches)
        if engine.generation == 1:
            subject.step(engine, batch)
            source = weights.source(engine)
            engine.switch(layout("d4z3"), at=engine.global_steps)
            batch = next(batches)
            for call in (source.iter_full, source.runs, source.iter_local):
                said.append(_refusal(call))
        loss = engine(**batch).loss
        said.append(_refusal(weights.source(engine).iter_full))
        for names in ("flat", {"lm_head.weight": "head"}):
            with pytest.raises(ConfigError) as wrong:
                weights.source(engine, names)
            said.append(str(wrong.value))
        engine.backward(loss)
        engine.step()
    return said


def _refusal(call: Any) -> str:
    with pytest.raises(WeightsError) as caught:
        next(call())
    return str(caught.value)


def test_a_source_is_of_one_world(pool: RankPool) -> None:
    for rank, said in enumerate(pool.run(stale_case)):
        *former, window, names, missing = said
        assert "an accumulation window is open; call it after engine.step()" in window
        assert "names='flat'" in names and "names= has no name for" in missing
        if len(former) == 1:
            assert "this member is idle" in former[0]
        else:
            assert len(former) == 3, rank
            assert all("made in generation 1, data=2 zero_stage=3" in each for each in former)
            assert all("in generation 2, data=4 zero_stage=3" in each for each in former)


def sharded(engine: Any, subject: Subject) -> Any:
    """Put all ranks' shards together by their placements, and return what differs; or the error that is raised."""
    source = weights.source(engine)
    full = {name: tensor.clone() for name, tensor in weights.source(engine, full_on="all").iter_full()}
    try:
        mine = {name: tensor.clone() for name, tensor in source.iter_local()}
    except WeightsError as error:
        return str(error)
    wrong = []
    for meta in source.metadata:
        every: list[Any] = [None] * td.get_world_size()
        td.all_gather_object(every, mine[meta.name].float().numpy())
        shards = [torch.from_numpy(each) for each in every]
        assert meta.mesh_shape is not None and meta.placements is not None
        for size, placement in zip(meta.mesh_shape[::-1], meta.placements[::-1], strict=True):  # the last axis first
            rows = [shards[at : at + size] for at in range(0, len(shards), size)]
            is_cut = isinstance(placement, Shard)
            assert is_cut or all(torch.equal(row[0], other) for row in rows for other in row)
            shards = [torch.cat(row, placement.dim) if is_cut else row[0] for row in rows]
        wrong += [] if torch.equal(shards[0], full[meta.name].float()) else [meta.name]
    return wrong


def sharded_case(find: cases.Find, path: list[Layout]) -> list[Any]:
    return cases.at_each(find, "bf16", path, sharded)


def even() -> Subject:
    """A model in which four ranks divide all rows of all tensors."""
    return Subject(_of("Llama", vocab_size=52, num_key_value_heads=4), Texts, step=named_step)


@pytest.mark.parametrize(
    ("find", "path", "words"),
    [
        (even, "d2z1 > d4z3 > d2t2z1", ""),
        pytest.param(even, "d2t2z0 > d2z3 > d4z0", "", marks=pytest.mark.full),
        pytest.param(even, "d2t2z3", "take source.iter_full()", marks=pytest.mark.full),
        pytest.param(TIED, "d3z3", "do not hold 'model.", marks=pytest.mark.full),
        pytest.param(pipelined, "p2d2z1", "take source.iter_full()", marks=pytest.mark.full),
        pytest.param(partial(mixtures.autoep, "mixtral"), "d4e4z2", "experts", marks=pytest.mark.full),
    ],
)
def test_shards_are_as_placements_say(pool: RankPool, find: cases.Find, path: str, words: str) -> None:
    layouts = [layout(short) for short in path.split(" > ")]
    found = pool.run(sharded_case, find=find, path=layouts, seconds=120)
    places = [place for rank in found for place in rank or ()]
    assert places and all(words in place if words else place == [] for place in places)


def wide() -> nn.Module:
    """28 million parameters, of which a layer has 3.2."""
    sizes = {"vocab_size": 8192, "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 6}
    return _of("Llama", **sizes)()


def peak(engine: Any, subject: Subject) -> dict[str, int]:
    """Bytes of the largest bucket and of all weights, and how far resident memory rises in a pass."""
    source = weights.source(engine)
    sizes = [sum(each.numel for each in bucket) * 4 for bucket in source.buckets]
    sum(1 for _ in source.iter_full())  # connections and code are there after it
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    for _, tensor in source.iter_full():
        assert tensor.is_meta or tensor.sum().isfinite()
    return {"bucket": max(sizes), "whole": sum(sizes), "rise": _status("VmHWM") - before, "count": source.collectives}


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(name)).split()[1])


def peak_case() -> list[Any]:
    return cases.at_each(lambda: Subject(wide, Texts, step=named_step), "fp32", [layout("d4z3")], peak)


@pytest.mark.full
def test_memory_of_one_bucket(pool: RankPool) -> None:
    for (found,) in pool.run(peak_case, seconds=240):
        assert found["whole"] > 3 * found["bucket"] and found["count"] <= 6 + 2
        assert found["rise"] <= found["bucket"] + (64 << 20)
        assert found["rise"] < found["whole"] / 2
