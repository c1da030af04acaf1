"""Modules of a model without stages are timed apart."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ds_dynatrain.errors import ConfigError
from tests.engine import jobs
from tests.engine.clocks import CLOCKS, clock
from tests.engine.pool import RankPool
from tools.burning import WIDTH, Burning, Points, burn

NAMES = ("encoder", "decoder.layers")


class Halves(nn.Module):
    """An encoder, layers of a decoder that are called twice, and a loss that takes its time."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Burning(0.003, 0.006)
        self.decoder = nn.ModuleDict({"layers": nn.Sequential(Burning(0.002, 0.001), Burning(0.002, 0.001))})
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        layers = self.decoder["layers"]
        made = layers(layers(self.encoder(hidden)))
        burn(0.01)
        return (self.head(made) - wanted).square().mean()


def settings(stage: int, block: dict[str, Any] | None) -> dict[str, Any]:
    given = jobs.config(start=(2, stage), train_batch_size=8, train_micro_batch_size_per_gpu=2)
    if block is not None:
        given["dynatrain"]["balance"] = {"mode": "advise", "every_steps": 2, **block}
    return given


def metered(stage: int, said: bool) -> list[Any]:
    """Profiles of two windows, before and after all four members work."""
    found: list[Any] = []
    with clock(said), jobs.job(settings(stage, {}), Halves(), data=Points(), groups=False) as made:
        engine = made.engine
        engine.meter(*NAMES)
        while engine.idle or engine.global_steps < 9:
            for batch in made.loader:
                if engine.global_steps == 4 and engine.layout.data == 2:
                    engine.switch(data=4, at=4)
                engine.backward(engine(*batch))
                engine.step()
                if engine.global_steps in (4, 8):
                    found.append(engine.balancer.profile)
                if engine.global_steps >= 9:
                    break
        with pytest.raises(ConfigError, match="the first window has begun"):
            engine.meter("encoder")
    return [profile for place, profile in enumerate(found) if profile is not found[place - 1] or not place]


@pytest.mark.not_on_device("there it is wall time, and ranks share cores")
@pytest.mark.parametrize("stage", [1, pytest.param(3, marks=pytest.mark.full)])
@pytest.mark.parametrize("said", CLOCKS)
def test_each_named_module_is_timed_and_the_rest(pool: RankPool, stage: int, said: bool) -> None:
    ranks = pool.run(metered, stage=stage, said=said, seconds=120)
    for profile in ranks[0]:
        assert profile.names == (*NAMES, "rest")
        forward, backward = (profile.seconds(f"{way}_seconds") for way in ("forward", "backward"))
        more = 1e-4 if said else 0.004 if stage < 3 else 0.01  # what gathers weights is the module's
        assert all(each <= took <= each + more for took, each in zip(forward, (0.003, 0.008, 0.01), strict=True))
        assert all(each <= took <= each + more for took, each in zip(backward, (0.006, 0.004, 0), strict=True))
        assert profile.kind_bytes("weight").tolist() == [80, 160, 80]
    assert len(ranks[0]) == 2 and ranks[2] == ranks[3] == ranks[0][1:]


def refusing() -> None:
    with jobs.job(settings(1, None), Halves(), data=Points(), groups=False) as made:
        with pytest.raises(ConfigError, match="without a `balance` block"):
            made.engine.meter("encoder")
    with jobs.job(settings(1, {}), Halves(), data=Points(), groups=False) as made:
        meter = made.engine.meter
        for names in ((), ("encoders",), ("encoder", "encoder"), ("",)):
            with pytest.raises(
                ConfigError, match="is no module of the model, or is named twice; name each once, of encoder, "
            ):
                meter(*names)
        with pytest.raises(ConfigError, match=r"'decoder' and 'decoder\.layers' share a module"):
            meter("decoder", "decoder.layers")
        made.engine.module.head.compile()
        with pytest.raises(ConfigError, match="'head' is compiled"):
            meter("encoder")


def test_what_cannot_be_timed_is_refused(pool: RankPool) -> None:
    pool.run(refusing)
