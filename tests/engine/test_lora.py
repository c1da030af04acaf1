"""Models of which most is frozen: what a switch moves, that nothing of it changes, and checkpoints without it."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from torch import nn

from ds_dynatrain.space import Layout
from tests.engine import jobs, oracle
from tests.engine.models import SmallGPT, small_gpt
from tests.engine.pool import RankPool
from tools.minimum import bytes_minimum

STEPS = 8
RANK = 3


class Adapter(nn.Module):
    """A frozen linear layer and a low-rank part beside it, as in LoRA."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Parameter(torch.randn(RANK, base.in_features) * 0.2)
        self.up = nn.Parameter(torch.zeros(base.out_features, RANK))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.base(inputs)
        return outputs + inputs @ self.down.T @ self.up.T


def adapted(**sizes: Any) -> SmallGPT:
    """The small model with adapters in the frozen linear layers."""
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model = small_gpt(**sizes).requires_grad_(False)
        for block in model.blocks:
            for name in ("mix", "up", "down"):
                setattr(block, name, Adapter(getattr(block, name)))
    return model


def numels(model: nn.Module) -> tuple[int, int]:
    """(trained elements, frozen elements)."""
    held = list(model.parameters())
    return sum(each.numel() for each in held if each.requires_grad), sum(
        each.numel() for each in held if not each.requires_grad
    )


def lora_case(dtype: str, path: list[jobs.Sizes], listed: bool) -> tuple[jobs.Record, list[str], list[tuple[int, int]]]:
    """Walk the path, two steps in each place: (losses, what differs after a switch, (bytes sent, bytes at least))."""
    model = adapted(width=160, hidden=200)
    everything = list(model.parameters())
    trained = everything if listed else [held for held in everything if held.requires_grad]
    record, wrong, sent = jobs.Record(), list[str](), list[tuple[int, int]]()
    before: dict[str, Any] = {}
    with jobs.job(jobs.config(dtype, path[0]), model=model, model_parameters=trained) as made:
        engine = made.engine

        def note(event: Any) -> None:
            assert event.outcome == "committed", event.reason
            sent.append((event.bytes_sent, before.get("least", event.bytes_minimum)))
            if "state" in before and not engine.idle:
                wrong.extend(oracle.differences(before.pop("state"), oracle.gather(engine), counters=False))

        def each(job: jobs.Job) -> None:
            step = engine.global_steps
            if step % 2 == 0 and step // 2 < len(path):
                target = Layout(data=path[step // 2][0], zero_stage=path[step // 2][1])
                kinds = ["weight", "master", "exp_avg", "exp_avg_sq"]
                if engine.layout.zero_stage == target.zero_stage == 3:
                    kinds.append("stale_grad")
                before["least"] = bytes_minimum(engine._parts.vps, target, engine.plan(target).members, kinds)

        engine.on_switch(note)
        schedule = {2 * place: sizes for place, sizes in enumerate(path) if place}
        jobs.train(made, 2 * len(path), schedule, record, each)
    return record, wrong, sent


@pytest.mark.parametrize("dtype", ["fp32", pytest.param("bf16", marks=pytest.mark.full)])
@pytest.mark.parametrize("listed", [True, pytest.param(False, marks=pytest.mark.full)])
def test_walk(pool: RankPool, dtype: str, listed: bool) -> None:
    path: list[jobs.Sizes] = [(2, 1), (2, 2), (2, 0), (2, 3), (4, 3), (4, 1), (2, 2)]
    found = pool.run(lora_case, dtype=dtype, path=path, listed=listed)
    record, wrong, sent = found[0]
    assert wrong == [] and len(sent) == len(path) - 1
    for number, (bytes_sent, least) in enumerate(sent):
        assert bytes_sent == least, path[number : number + 2]
    trained, frozen = numels(adapted(width=160, hidden=200))
    assert trained * 10 < frozen
    assert sent[0][0] == 0, "1 -> 2 in the same world: nothing"
    assert sent[1][0] <= 12 * trained + 64, "2 -> 0: masters and moments of what is trained"
    assert sent[2][0] == 0, "0 -> 3: each rank has its part"
    if dtype == "fp32":
        losses = jobs.global_losses([each and each[0] for each in found])
        still = pool.run(lora_case, dtype=dtype, path=[(1, 0)] * len(path), listed=listed)
        assert jobs.furthest(losses, jobs.global_losses([still[0][0]])) <= 2e-6


def excluding_case(folder: Path, path: list[jobs.Sizes]) -> None:
    """In each layout of a path: `save_checkpoint` with frozen weights and without."""
    model = adapted()
    trained = [held for held in model.parameters() if held.requires_grad]
    with jobs.job(jobs.config("bf16", path[0]), model=model, model_parameters=trained) as made:
        engine = made.engine
        assert "exclude_frozen_parameters" in inspect.signature(engine.save_checkpoint).parameters

        def each(job: jobs.Job) -> None:
            tag = f"z{engine.layout.zero_stage}"
            engine.save_checkpoint(str(folder), tag=f"{tag} whole")
            engine.save_checkpoint(str(folder), tag, {"seen": 1}, exclude_frozen_parameters=True)
            assert engine.load_checkpoint(str(folder), tag, load_module_strict=False)[1]["seen"] == 1

        jobs.train(made, len(path), {step: sizes for step, sizes in enumerate(path) if step}, each=each)


def test_checkpoints_without_frozen_weights(pool: RankPool, tmp_path: Path) -> None:
    """As transformers saves a model with adapters; DeepSpeed's own reader finds what is trained, and no more."""
    pool.run(excluding_case, folder=tmp_path, path=[(2, 1), (4, 2), (3, 3)])
    names = {name: held.requires_grad for name, held in adapted().named_parameters()}
    trained = {name for name, flag in names.items() if flag}
    for tag in ("z1", "z2", "z3"):
        for sort, wanted in ((tag, trained), (f"{tag} whole", set(names))):
            files = sorted((tmp_path / sort).glob("*model_states.pt"))
            said = [torch.load(file, map_location="cpu", weights_only=False) for file in files]
            if tag != "z3":
                assert {name for each in said for name in each["module"]} >= wanted
            for each in said if sort == tag else ():
                assert not set(each["module"]) & (set(names) - trained) and not each["frozen_param_fragments"]
            if sort == "z1 whole":
                continue  # of frozen weights DeepSpeed's reader knows from stage 2 on
            found = get_fp32_state_dict_from_zero_checkpoint(str(tmp_path), sort, exclude_frozen_parameters=sort == tag)
            assert {name for name in found if name in names} == wanted, sort
