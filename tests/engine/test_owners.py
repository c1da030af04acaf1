"""`"owners": "nearest"`: flat buffers of stages 1 and 2 in the order by which fewer bytes move."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ds_dynatrain.errors import CheckpointError, ConfigError, SwitchRefused
from ds_dynatrain.plan import nearest
from ds_dynatrain.space import Layout
from tests.engine import jobs, oracle, pipeline_walks, walks
from tests.engine.pool import RankPool
from tests.engine.test_flat_orders import ACROSS

WIDTH, FEED, LAYERS = 32, 86, 32
"""The shapes of Llama 7B, divided by 128 in each dim."""


class Layer(nn.Module):
    """Four square matrices and three of the feed-forward part."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(WIDTH, FEED, bias=False) for _ in range(2))
        self.down = nn.Linear(FEED, WIDTH, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for mix in self.mix:
            hidden = hidden + mix(hidden) / 8
        return hidden + self.down(F.silu(self.gate(hidden)) * self.up(hidden))


class Llama(nn.Module):
    """Without attention, which has no tensor of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.words = nn.Embedding(250, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, 250, bias=False)

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        hidden = self.words(inputs)
        for layer in self.layers:
            hidden = layer(hidden)
        return F.cross_entropy(self.head(hidden).flatten(0, 1), targets.flatten())


def settings(owners: str, start: jobs.Sizes = (4, 2), late: bool = False, **more: Any) -> dict[str, Any]:
    made = jobs.config("fp32", start, **more)
    return {**made, "dynatrain": {**made["dynatrain"], "owners": owners, "late": late}}


def with_owners(config: dict[str, Any]) -> dict[str, Any]:
    return {**config, "dynatrain": {**config["dynatrain"], "owners": "nearest"}}


# ---- what moves, and what is trained ---------------------------------------------------------------------------------


def losses_case(owners: str, late: bool, schedule: jobs.Schedule, is_exact: bool = False, **more: Any) -> jobs.Record:
    """Train and switch; `orders` are the layout's orders by step, `planned` the bytes that were expected."""
    notes: dict[str, Any] = {"orders": [], "planned": []}

    def each(made: jobs.Job) -> None:
        engine = made.engine
        notes["orders"].append(engine.layout.order)
        if engine.global_steps in schedule:
            data, stage = schedule[engine.global_steps]
            kinds = engine._parts.vps
            notes["planned"].append(nearest(kinds, Layout(data=data, zero_stage=stage), range(4))[1].bytes_moved)

    config = settings(owners, late=late, **more)
    config["dynatrain"]["exact"] = is_exact
    record = jobs.run(config, max(schedule) + 2, schedule, each, model=Llama(), groups=False)
    record.notes |= notes
    return record


@pytest.mark.parametrize(
    ("more", "is_exact"),
    [
        ({"gradient_clipping": 0.0}, False),
        pytest.param({"gradient_clipping": 0.0, "train_micro_batch_size_per_gpu": 1}, False, marks=pytest.mark.full),
        pytest.param({"train_micro_batch_size_per_gpu": 1}, True, marks=pytest.mark.full),
    ],
    ids=["one micro-batch", "accumulated", "exact and clipped"],
)
def test_fewer_bytes_and_the_same_losses(pool: RankPool, more: dict[str, Any], is_exact: bool) -> None:
    """4 → 3 → 2 → 3 → 4 ranks, beside the same job in DeepSpeed's order.

    Clipping divides by a norm that each rank adds up over its own tensors, so its last bit is that of the order unless
    the job is exact.
    """
    schedule = {2: (3, 2), 4: (2, 2), 6: (3, 1), 8: (4, 2)}
    same: dict[str, Any] = {"late": False, "schedule": schedule, "is_exact": is_exact, **more}
    plain, found = (pool.run(losses_case, owners=owners, **same) for owners in ("deepspeed", "nearest"))
    assert jobs.global_losses(found) == jobs.global_losses(plain)
    numel, notes = sum(each.numel() for each in Llama().parameters()), found[0].notes  # masters come from fp32 weights
    shares = [record[0].events[0].bytes_sent / (8 * numel) for record in (plain, found)]
    assert shares == pytest.approx([1 / 3, 1 / 4], abs=0.01)
    assert [event.bytes_sent for event in found[0].events] == notes["planned"]
    assert notes["orders"][1] is None and all(order is not None for order in notes["orders"][2:8])
    assert plain[0].notes["orders"] == [None] * 10


@pytest.mark.full
def test_late_switches_are_the_same(pool: RankPool) -> None:
    schedule = {2: (3, 2), 4: (2, 2), 6: (3, 1), 8: (4, 2)}
    plain, found = (pool.run(losses_case, owners="nearest", late=late, schedule=schedule) for late in (False, True))
    assert [rank.losses for rank in found] == [rank.losses for rank in plain]
    assert found[0].notes["orders"] == plain[0].notes["orders"]
    assert all(event.late_ms > 0 for event in found[0].events)


@pytest.mark.parametrize(
    ("dtype", "path"),
    [
        ("bf16", [(4, 2), (3, 2), (3, 3), (3, 1), (4, 1)]),
        pytest.param("fp32", ACROSS, marks=pytest.mark.full),
        pytest.param("bf16 in fp32", [(2, 1), (3, 2), (4, 1), (2, 2), (3, 3), (4, 2)], marks=pytest.mark.full),
    ],
)
def test_states_are_what_they_were(pool: RankPool, dtype: str, path: list[jobs.Sizes]) -> None:
    """Two groups, a frozen tensor, tied weights; also across stages that have no order."""
    walks.compare(pool, with_owners(walks.settings(dtype)), path, {"depth": 4})


@pytest.mark.full
@pytest.mark.parametrize("option", ["round_robin_gradients", "parameter_alignment"])
def test_beside_options_of_the_order(pool: RankPool, option: str) -> None:
    config = with_owners(walks.settings("bf16", zero_optimization={option: True}))
    walks.compare(pool, config, [(4, 2), (3, 2), (2, 1), (3, 1), (4, 2)], {"depth": 4})


# ---- checkpoints -----------------------------------------------------------------------------------------------------


def saved_case(folder: Path) -> oracle.State | None:
    """A checkpoint in our format and one of DeepSpeed's, by a job in DeepSpeed's order on three ranks."""
    with jobs.job(settings("deepspeed", (3, 2)), Llama(), groups=False) as made:
        if made.engine.idle:
            return None
        jobs.train(made, 2)
        made.engine.save_checkpoint(str(folder / "stock"))
        made.engine.save(folder / "ours")
        return oracle.gather(made.engine)


def ordered_case(folder: Path) -> dict[str, Any]:
    """Three ranks in an order of their own load both, save, and are refused what cannot be."""
    found: dict[str, Any] = {}
    with jobs.job(settings("nearest"), Llama(), groups=False) as made:
        jobs.train(made, 4, {2: (3, 2)})
        engine = made.engine
        for name in ("stock", "ours"):
            assert engine.load_checkpoint(str(folder / name))[0] is not None
            found[name] = oracle.gather(engine)
        calls = {"save": lambda: engine.save_checkpoint(str(folder / "wrong")), "groups": engine.update_param_groups}
        for name, call in calls.items():
            with pytest.raises((CheckpointError, SwitchRefused)) as raised:
                call()
            found[name] = str(raised.value)
        found["text"] = str(engine.layout)
        engine.save(folder / "ordered")
    return found


def resumed_case(sizes: jobs.Sizes, folder: Path) -> oracle.State | None:
    with jobs.job(settings("nearest", sizes), Llama(), groups=False) as made:
        if made.engine.idle:
            return None
        made.engine.load(folder / "ordered")
        return oracle.gather(made.engine)


def test_checkpoints_in_an_order(pool: RankPool, tmp_path: Path) -> None:
    """Both formats are read into an order, ours is written from it, and DeepSpeed's is not written wrongly."""
    state = pool.run(saved_case, folder=tmp_path)[0]
    for found in pool.run(ordered_case, folder=tmp_path)[:3]:
        assert oracle.differences(state, found["stock"]) == oracle.differences(state, found["ours"]) == []
        assert "another order than DeepSpeed's" in found["save"] and "engine.save" in found["save"]
        assert "present groups" in found["groups"]
        assert found["text"] == "data=3 owners=nearest zero_stage=2"
    assert not (tmp_path / "wrong").exists()
    for sizes in ((3, 2), (2, 3)):
        for other in pool.run(resumed_case, sizes=sizes, folder=tmp_path)[: sizes[0]]:
            assert oracle.differences(state, other) == []


# ---- what cannot have it ---------------------------------------------------------------------------------------------


def refused_case() -> str:
    config = with_owners(pipeline_walks.settings(Layout(zero_stage=1, pipe=2)))
    with pytest.raises(ConfigError) as raised, pipeline_walks.job(config, "tied"):
        pass
    return str(raised.value)


def test_what_is_refused(pool: RankPool) -> None:
    for said in pool.run(refused_case):
        assert '"owners": "nearest" with a pipeline' in said and "leave dynatrain.owners out" in said
