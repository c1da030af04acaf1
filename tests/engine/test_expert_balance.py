"""Balance counts tokens of experts in living jobs, and swaps experts between ranks."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain, repeat
from typing import Any

import pytest
import torch
from deepspeed.moe.ep_experts import GroupedExperts
from torch import nn

from ds_dynatrain.adapters.versions.replaced import replaced
from ds_dynatrain.balance.adapters.expert_meter import ExpertMeter
from ds_dynatrain.balance.experts import busiest
from ds_dynatrain.errors import ConfigError
from ds_dynatrain.space import Layout
from tests.engine import axis_walks, pipelined_experts
from tests.engine.clocks import TICK, clock
from tests.engine.mixtures import autoep, native
from tests.engine.pool import RankPool
from tools.burning import Burn, burn
from tools.told_routes import told

if importlib.util.find_spec("transformers") is None:
    pytest.skip("AutoEP converts models of transformers'", allow_module_level=True)

SKEWED = (0.4, 0.3, 0.2, 0.1)
"""Shares of the first layer's experts, which swap."""
EVEN = {count: (1 / count,) * count for count in (4, 8)}
"""Shares of the second layer's, by their number."""
PER_TOKEN = 20 * TICK


@contextmanager
def heavy() -> Iterator[None]:
    """In it experts burn time for each of their tokens, by a clock that counts."""
    whole = GroupedExperts.forward

    def forward(experts: Any, x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        seconds = PER_TOKEN * int(counts.sum())
        burn(seconds)
        made: torch.Tensor = Burn.apply(whole(experts, x, counts), 2 * seconds, [])  # type: ignore[no-untyped-call]
        return made

    with replaced(GroupedExperts, forward=forward):
        yield


def acting(layout: Layout) -> dict[str, Any]:
    """Train where experts of the first layer are skewed; what balance found and did."""
    is_piped, events, engines = layout.pipe > 1, list[Any](), list[Any]()
    make = pipelined_experts.autoep if is_piped else autoep
    block = {"mode": "act", "experts": True, "every_steps": 3, "window_steps": 2, "safety": 0.0}

    def shares(router: str) -> tuple[float, ...]:
        return (EVEN[8] if router.startswith("3.") else SKEWED) if is_piped else EVEN[4] if ".1." in router else SKEWED

    def step_seconds() -> float:
        return 0.1 if engines[0].layout.experts is None else 0.09

    subject, said = make(use_grouped_mm=False), list[str]()
    with (
        clock(True, step_seconds),
        heavy(),
        axis_walks.started(subject, "fp32", layout, balance=block) as made,
        told(lambda: made.engine.module, shares),
    ):
        engine = made.engine
        engines.append(engine)
        engine.on_switch(events.append)
        for batch in chain(*repeat(made.loader, 2)):
            subject.step(engine, batch)
            if engine.balancer.profile is not None:
                said.append(str(engine.balancer.advise()))
        assert not any("forward" in vars(part) for part in engine.module.modules() if isinstance(part, GroupedExperts))
        return {"events": events, "profile": engine.balancer.profile, "said": said}


ONE = {"data": 4, "expert": 2}


@pytest.mark.not_on_device("there it is wall time, and ranks share cores")
@pytest.mark.parametrize(
    "layout",
    [
        Layout(**ONE, zero_stage=2),
        *(pytest.param(Layout(**ONE, zero_stage=stage), marks=pytest.mark.full) for stage in (0, 1, 3)),
        pytest.param(Layout(pipe=2, data=2, expert=2, zero_stage=1), marks=pytest.mark.full),
    ],
)
def test_experts_swap_and_all_members_agree(pool: RankPool, layout: Layout) -> None:
    ranks = pool.run(acting, layout=layout, seconds=240)
    first = ranks[0]
    for rank in ranks:
        assert rank["profile"] == first["profile"] and rank["said"] == first["said"]
        event = rank["events"][0]
        assert (event.cause, event.outcome, event.bytes_sent) == ("balance", "committed", event.bytes_minimum)
        skewed, even = event.target.layout["experts"]
        assert skewed == [[2, 1], [0, 3]] and even == [[*range(len(even[0]))], [*range(len(even[0]), 2 * len(even[0]))]]
        assert len(rank["events"]) == 1 and event.predicted_gain > 0.03
    measured = first["profile"].experts
    assert [busiest(each.tokens, each.rows) for each in measured] == pytest.approx([1.0, 1.0], abs=0.02)
    assert measured[0].tokens == pytest.approx(SKEWED, abs=0.02)
    assert measured[0].backward_seconds == pytest.approx(2 * measured[0].forward_seconds, rel=0.1)
    assert [each.layer for each in measured] == ([1, 3] if layout.pipe > 1 else [0, 0])
    told_first = re.search(rf"experts of {measured[0].name}: most tokens ÷ mean ([\d.]+) now", first["said"][0])
    assert told_first is not None and float(told_first[1]) == pytest.approx(1.4, abs=0.03)


def refused() -> None:
    """Layers of `deepspeed.moe`."""
    with (
        pytest.raises(ConfigError, match=r"deepspeed\.moe pads each expert's tokens to the largest count"),
        axis_walks.started(native(2), "fp32", Layout(data=2, expert=2, zero_stage=1), balance={"experts": True}),
    ):
        pass


def test_what_swaps_do_not_help_is_refused(pool: RankPool) -> None:
    pool.run(refused)


def test_compiled_models_are_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].compile(backend="eager")
    with pytest.raises(ConfigError, match=r"dynatrain\.balance\.experts: '0' is compiled"):
        ExpertMeter(model)
