"""Layers before the first trained one go not backward: what that leaves out, and that it changes nothing else."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.runtime.pipe import schedule

from ds_dynatrain.adapters.deepspeed.pipeline_host import frozen_layers, needless
from ds_dynatrain.adapters.versions.replaced import replaced
from ds_dynatrain.errors import CheckpointError
from ds_dynatrain.space import Layout
from tests.engine import freezing, jobs, oracle, pipelined_experts
from tests.engine.models import Sequences
from tests.engine.pipeline_walks import job, layout, settings
from tests.engine.pool import RankPool

COUNTED = (schedule.ForwardPass, schedule.BackwardPass, schedule.SendGrad, schedule.RecvGrad)


def test_layers_before_the_first_trained_one() -> None:
    prefixes = ("tied_modules.words", "1", "2", "tied_modules.words", "4")
    for trained, count in (
        ({"1.weight"}, 1),
        ({"2.norm.bias", "4.weight"}, 2),
        ({"tied_modules.words.weight"}, 0),
        ({"4.weight"}, 4),
        (set[str](), 5),
    ):
        assert frozen_layers(prefixes, trained) == count


@pytest.mark.parametrize("stages", [1, 2, 3, 5])
def test_whoever_waits_for_a_gradient_is_sent_one(stages: int) -> None:
    """Of two neighbours, wherever the first trained layer is."""
    for frozen in range(2 * stages + 1):
        left_out = [needless(2 * stage, 2 * stage + 2, frozen) for stage in range(stages)]
        for one, other in itertools.pairwise(left_out):
            assert (schedule.RecvGrad in one) == (schedule.SendGrad in other)
        assert [schedule.BackwardPass in each for each in left_out] == [2 * s + 2 <= frozen for s in range(stages)]


# ---- beside the same run as DeepSpeed makes it -----------------------------------------------------------------------


@contextmanager
def as_deepspeed(engine: Any) -> Iterator[None]:
    """In it gradients go through frozen layers down to the first stage, as far as there is a graph."""
    known = engine._INSTRUCTION_MAP

    def backward(held: Any, buffer_id: int) -> None:
        outputs = held.pipe_buffers["outputs"][buffer_id]
        if outputs.requires_grad:
            known[schedule.BackwardPass](held, buffer_id)

    passes = {**known, schedule.BackwardPass: backward}
    with replaced(engine, _frozen_layers=lambda: 0, _INSTRUCTION_MAP=passes):
        yield


@contextmanager
def counting(engine: Any) -> Iterator[Counter[str]]:
    """In it instructions of this stage that are carried out are counted."""
    known, found = engine._INSTRUCTION_MAP, Counter[str]()

    def counted(kind: type) -> Any:
        def run(held: Any, **given: Any) -> None:
            found[kind.__name__] += 1
            known[kind](held, **given)

        return run

    with replaced(engine, _INSTRUCTION_MAP={**known, **{kind: counted(kind) for kind in COUNTED}}):
        yield found


@dataclass
class Run:
    """What a rank saw. counts: of each place, its stage, and what that did in a step."""

    losses: list[float] = field(default_factory=list)
    counts: list[tuple[int, dict[str, int]]] = field(default_factory=list)
    state: Any = None


class Vectors(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """The words of `Sequences` as numbers: inputs that could require a gradient."""

    def __len__(self) -> int:
        return len(Sequences())

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        words, targets = Sequences()[index]
        return torch.sin(words[..., None] * torch.arange(1, 16) / 7.0), targets


def begun(name: str, given: dict[str, Any]) -> AbstractContextManager[jobs.Job]:
    """A job of a model by name; with experts in their own optimizer groups."""
    if name not in EXPERTS:
        return job(given, name, **({"data": Vectors()} if name == "vectors" else {}))
    build, more, _ = EXPERTS[name]
    model = build()
    return jobs.job({**given, **more}, model, model_parameters=pipelined_experts.groups(model))


def frozen_run(
    name: str, dtype: str, stage: int, more: Mapping[str, Any], frozen: list[str], plain: bool, compiled: bool = False
) -> Run:
    """Freeze the first layers, move boundaries over them, train some of them again.

    plain: as DeepSpeed makes it. compiled: every layer. Experts are shared by two data ranks at one place.
    """
    found = Run()
    places = EXPERTS[name][2] if name in EXPERTS else None
    path = [
        layout(4, 1, stage, (0, 1, 2, 4, 7)),
        layout(2, 2, stage, (0, 4, 7)),
        layout(2, 2, stage, (0, 1, 7)),
        layout(4, 1, stage, (0, 2, 3, 5, 7)),
    ]
    if name in EXPERTS:
        path[1] = path[1].replace(expert=2)  # what is trained changes where experts are whole
    with begun(name, settings(path[0], dtype, **more)) as made:
        engine = made.engine
        if compiled:
            engine.compile(backend="eager")
        found.losses.append(engine.train_batch().item())
        for number, target in enumerate(path):
            if number:
                engine.switch(target, at=engine.global_steps)
                engine.boundary()
                assert engine.last_switch.outcome == "committed", engine.last_switch.reason
            again = ("3.norm",) if name in EXPERTS else ("3.",)  # a group of experts that trains nothing is gone
            freezing.flip(engine.module, again if number == 2 else (), frozen if number == 0 else ())
            if engine.layout.expert == 1:
                assert engine.update_param_groups() == (number in (0, 2))
            if plain:
                with as_deepspeed(engine):
                    found.losses += [engine.train_batch().item() for _ in range(2)]
            else:
                found.losses.append(engine.train_batch().item())
                with counting(engine) as counts:
                    found.losses.append(engine.train_batch().item())
                found.counts.append((engine.grid.stage_id, dict(counts)))
        found.state = oracle.gather(engine, places)
    return found


EXPERTS: dict[str, tuple[Any, dict[str, Any], Any]] = {
    "experts": (pipelined_experts.model, {}, pipelined_experts.places),
    "AutoEP": (
        pipelined_experts.mixture,
        {"expert_parallel": pipelined_experts.AUTOEP},
        pipelined_experts.stacked,
    ),
}
"""How a model is built, what its configuration has, and where its local parameters lie."""
MICRO_BATCH = 3
PLACES = ((4, 3), (2, 1), (2, 1), (4, 2))
"""Of each place: stages, and the first one with something to train."""
RECOMPUTED = {"pipeline": {"activation_checkpoint_interval": 1, "use_reentrant": False}}
REENTRANT = {"pipeline": {"activation_checkpoint_interval": 1, "use_reentrant": True}}
IN_PAIRS = {"pipeline": {"activation_checkpoint_interval": 2, "use_reentrant": True}}
TIED = ["tied_modules.", "1.", "2.", "3."]
FIRST = ["0.", "1.", "2.", "3."]

CASES: dict[str, tuple[str, str, int, dict[str, Any], list[str]]] = {
    "tied weights": ("tied", "fp32", 1, {}, TIED),
    "tied weights, ZeRO 0": ("tied", "fp32", 0, {}, TIED),
    "tied weights, bf16": ("tied", "bf16 in fp32", 1, {}, TIED),
    "fp16": ("tied", "fp16", 1, {}, TIED),
    "recomputed": ("tied", "fp32", 1, RECOMPUTED, TIED),
    "autocast": ("tied", "fp32", 1, {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}, TIED),
    "offload": ("tied", "fp32", 1, {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}, TIED),
    "columns of unlike numbers of micro-batches": (
        "tied",
        "fp32",
        1,
        {"train_batch_size": 15, "dataloader_drop_last": True},
        TIED,
    ),
    "recomputed, reentrant": ("vectors", "fp32", 1, REENTRANT, FIRST),
    "recomputed in pairs, reentrant": ("vectors", "fp32", 1, IN_PAIRS, FIRST),
    "compiled layers": ("tied", "fp32", 1, {}, TIED),
    "compiled layers, recomputed": ("tied", "fp32", 1, RECOMPUTED, TIED),
    "experts": ("experts", "fp32", 1, {}, TIED),
    "experts, ZeRO 0": ("experts", "fp32", 0, {}, TIED),
    "experts, bf16": ("experts", "bf16 in fp32", 1, {}, TIED),
    "AutoEP": ("AutoEP", "fp32", 1, {}, TIED),
    "AutoEP, ZeRO 0": ("AutoEP", "fp32", 0, {}, TIED),
    "AutoEP, bf16": ("AutoEP", "bf16 in fp32", 1, {}, TIED),
}


@pytest.mark.full
@pytest.mark.parametrize("title", CASES)
def test_losses_are_those_of_a_run_that_goes_backward_everywhere(pool: RankPool, title: str) -> None:
    name, dtype, stage, more, frozen = CASES[title]
    given = {"name": name, "dtype": dtype, "stage": stage, "more": more, "frozen": frozen}
    given["compiled"] = title.startswith("compiled")
    found = pool.run(frozen_run, **given, plain=False, seconds=120)
    expected = pool.run(frozen_run, **given, plain=True, seconds=120)
    for one, other in zip(found, expected, strict=True):
        assert one.losses == other.losses == found[0].losses
    assert oracle.differences(expected[0].state, found[0].state) == []
    assert len(set(found[0].losses)) == len(found[0].losses)
    for place, (stages, first) in enumerate(PLACES):
        sent = awaited = 0
        for stage, counts in (rank.counts[place] for rank in found):
            assert ("BackwardPass" in counts) == (stage >= first), (place, stage)
            sent, awaited = sent + counts.get("SendGrad", 0), awaited + counts.get("RecvGrad", 0)
        assert sent == awaited == (stages - 1 - first) * more.get("train_batch_size", 12) // MICRO_BATCH


# ---- DeepSpeed's own checkpoints -------------------------------------------------------------------------------------


def saved_and_loaded(folder: str, name: str, dtype: str, at: Layout, to: Layout) -> str:
    """Saved by DeepSpeed where the first stage has nothing to train, and loaded in another layout; what was said."""
    first = ("tied_modules.", "0.", "1.", "2.")

    def begun(engine: Any) -> None:
        engine.train_batch()
        freezing.flip(engine.module, (), first)
        assert engine.update_param_groups()

    with job(settings(at, dtype), name) as made:
        begun(made.engine)
        made.engine.train_batch()
        made.engine.save_checkpoint(folder, "one")
        expected = oracle.gather(made.engine)
    with job(settings(to, dtype), name) as made:
        begun(made.engine)
        try:
            made.engine.load_checkpoint(folder, "one")
        except CheckpointError as error:
            made.engine.train_batch()
            return str(error)
        assert oracle.differences(expected, oracle.gather(made.engine)) == []
        made.engine.train_batch()
    return ""


FROZEN_FIRST = layout(2, 2, 1, (0, 3, 7))
OTHER = layout(2, 2, 1, (0, 5, 7))
LOADS: dict[str, tuple[str, str, Layout, Layout, str]] = {
    "one stage": ("tied", "fp32", FROZEN_FIRST, layout(1, 4), ""),
    "the same": ("tied", "fp32", FROZEN_FIRST, FROZEN_FIRST, ""),
    "four stages": ("tied", "fp32", FROZEN_FIRST, layout(4, 1), ""),
    "from four stages": ("tied", "fp32", layout(4, 1), FROZEN_FIRST, ""),
    "fp16": ("tied", "fp16", FROZEN_FIRST, layout(4, 1), ""),
    "bf16": ("uneven", "bf16 in fp32", FROZEN_FIRST, layout(1, 4), ""),
    "other boundaries": ("tied", "fp32", FROZEN_FIRST, OTHER, ""),
    "from other boundaries": ("tied", "fp32", OTHER, FROZEN_FIRST, "and this model has no such"),
    "without ZeRO": (
        "tied",
        "fp32",
        layout(2, 2, 0, (0, 3, 7)),
        layout(1, 4, 0),
        "load it in the layout that saved it",
    ),
}


@pytest.mark.full
@pytest.mark.parametrize(
    "title", [pytest.param(each, marks=pytest.mark.full if number else ()) for number, each in enumerate(LOADS)]
)
def test_checkpoints_of_deepspeeds(pool: RankPool, tmp_path: Path, title: str) -> None:
    name, dtype, at, to, words = LOADS[title]
    for said in pool.run(saved_and_loaded, folder=str(tmp_path), name=name, dtype=dtype, at=at, to=to):
        assert words in said and bool(said) == bool(words), said
