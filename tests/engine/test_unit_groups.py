"""Groups of the user's own: who is in one; and the loss whose own `backward` survives."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ds_dynatrain.engine.discarded import Loss, guarded, plain
from ds_dynatrain.engine.fixed_launch import FixedLaunch
from ds_dynatrain.errors import ConfigError
from ds_dynatrain.reshard.context import OwnGroups
from ds_dynatrain.space import Layout

MEMBERS = (4, 0, 7, 2)
NODES = {4: "a", 0: "b", 7: "a", 2: "b", 9: "c"}


def kinds(groups: OwnGroups, mine: int) -> dict[str, tuple[int, ...]]:
    return groups.kinds(Layout(data=4, zero_stage=0), MEMBERS, NODES, mine)


def test_ranks_by_layout_and_by_node() -> None:
    groups = OwnGroups()
    assert groups.add(None) == "own0"
    assert groups.add(lambda layout, nodes: [range(1, layout.world_size)]) == "own1"
    groups.add(lambda layout, nodes: [[rank for rank in range(4) if nodes[rank] == node] for node in set(nodes)])
    assert kinds(groups, 4) == {"own0": (0, 1, 2, 3), "own2": (0, 2)}, "rank 0, on node a"
    assert kinds(groups, 2) == {"own0": (0, 1, 2, 3), "own1": (1, 2, 3), "own2": (1, 3)}
    assert kinds(groups, 9) == {}, "an idle member"


def test_an_extension_has_a_group_of_all() -> None:
    """Before those of the script, which are numbered as without it."""
    groups = OwnGroups(["buddies"])
    assert groups.add(None) == "own0" and len(groups.rules) == 1
    assert [*kinds(groups, 4).items()] == [("buddies", (0, 1, 2, 3)), ("own0", (0, 1, 2, 3))]
    assert kinds(groups, 9) == {}, "an idle member"


@pytest.mark.parametrize("ranks", [[[0, 4]], [[-1]], [[0, 1], [1, 2]]])
def test_ranks_that_cannot_be(ranks: list[list[int]]) -> None:
    groups = OwnGroups()
    groups.add(lambda layout, nodes: ranks)
    with pytest.raises(ConfigError, match="is no rank, or stands in two groups"):
        kinds(groups, 4)


@pytest.fixture
def engine() -> Any:
    """What a loss asks of one; in a job of fixed size nothing is survived."""
    return SimpleNamespace(is_discarded=False)


def test_numbers_with_a_graph_are_guarded(engine: Any) -> None:
    weight = torch.ones(3, requires_grad=True)
    total = (2 * weight).sum()
    given = {"loss": total, "logits": 2 * weight, "count": torch.tensor(3), "name": "x"}
    output = guarded(given, engine, FixedLaunch())
    assert type(output["loss"]) is Loss and output["logits"] is given["logits"] and output["count"] is given["count"]
    assert type(output["loss"] * 1.0) is torch.Tensor and type(plain(output["loss"])) is torch.Tensor
    output["loss"].backward()
    assert weight.grad is not None and weight.grad.tolist() == [2, 2, 2]


def test_in_a_discarded_batch_it_trains_nothing(engine: Any) -> None:
    weight = torch.ones(3, requires_grad=True)
    loss = guarded(weight.sum(), engine, FixedLaunch())
    engine.is_discarded = True
    loss.backward()
    assert weight.grad is None


def test_the_engine_does_not_travel_with_it(engine: Any) -> None:
    loss = guarded(torch.ones(3, requires_grad=True).sum(), engine, FixedLaunch())
    engine.unpicklable = lambda: None
    torch.save({"loss": loss}, file := io.BytesIO())
    file.seek(0)
    back = torch.load(file)["loss"]
    assert type(back) is torch.Tensor and back.item() == 3
