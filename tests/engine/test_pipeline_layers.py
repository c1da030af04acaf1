"""What layers keep besides parameters goes with them from stage to stage."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ds_dynatrain.reshard import layers
from tests.engine.pipeline_walks import Path, job, layout, settings
from tests.engine.pipelines import Pruned
from tests.engine.pool import RankPool

EXTRA_STATE = Pruned.get_extra_state
PATH = [layout(1, 2), layout(2, 1), layout(4, 1), layout(2, 2), layout(2, 2, 1, (0, 2, 6)), layout(3, 1), layout(1, 1)]


def is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whichever device they are on."""
    return torch.equal(one.cpu(), other.cpu())


def pruned(path: Path) -> tuple[dict[int, list[float]], int]:
    """Prune at each place, and look at it again at the next: (losses by place, layers that were looked at)."""
    losses, seen = dict[int, list[float]](), 0
    with job(settings(path[0]), "pruned") as made:
        engine = made.engine
        engine.boundary()
        while True:
            number = engine.generation - 1
            layers = {name: each for name, each in engine.module.named_children() if isinstance(each, Pruned)}
            for name, layer in layers.items():
                expected = Pruned()
                if number:
                    expected.prune(number - 1)
                assert is_same(layer.mask, expected.mask) and is_same(layer.rows, expected.rows), name
                assert (layer.capacity, layer.threshold) == (expected.capacity, expected.threshold), name
                assert ("scale" in layer._buffers) == bool(number) and "scale" not in "".join(layer.state_dict()), name
                assert not number or is_same(layer.scale, expected.scale), name
                seen += 1
            losses[number] = [engine.train_batch().item() for _ in range(2)]
            if number + 1 == len(path):
                return losses, seen
            for layer in layers.values():
                layer.prune(number)
            engine.switch(path[number + 1], at=engine.global_steps)
            engine.boundary()


def pruned_in_place(places: int) -> dict[int, list[float]]:
    """The same without a switch."""
    losses = {}
    with job(settings(layout(1, 1)), "pruned") as made:
        for number in range(places):
            losses[number] = [made.engine.train_batch().item() for _ in range(2)]
            for layer in made.engine.module.children():
                if isinstance(layer, Pruned):
                    layer.prune(number)
    return losses


def test_masks_rows_and_capacities_go_with_their_layers(pool: RankPool) -> None:
    found = pool.run(pruned, path=PATH)
    expected = pool.run(pruned_in_place, places=len(PATH))[0]
    losses = {number: values for rank in found if rank for number, values in rank[0].items()}
    assert sum(rank[1] for rank in found if rank) >= 2 * len(PATH), "of the ranks that are there at the end"
    assert losses.keys() == expected.keys()
    for number, values in expected.items():
        assert losses[number] == pytest.approx(values, rel=5e-7), f"after {PATH[number]}"


def one_layer_moves(megabytes: int) -> dict[str, Any]:
    """Two stages with large buffers in two layers, of which one moves: what was sent, and the largest record of it.

    Random streams left out, which are 7 KB for each device.
    """
    with job(settings(layout(2, 1, 1, (0, 3, 6))), "pruned") as made:
        engine, records = made.engine, []
        engine.boundary()
        if engine.generation == 1:
            for number, layer in engine.module.named_children():
                if number in ("1", "2"):
                    layer.register_buffer("table", torch.full((megabytes << 18,), float(number)))
            control = engine._parts.control
            post = control.post
            control.post = lambda key, value: (records.append((key, len(str(value)))), post(key, value))[1]
            engine.train_batch()
            engine.switch(layout(2, 1, 1, (0, 2, 6)), at=1)
            engine.boundary()
            control.post = post
        tables = {name: held[0].item() for name, held in engine.module.named_buffers() if name.endswith("table")}
        event = engine.last_switch
        return {
            "tables": tables,
            "sent": event.bytes_sent,
            "least": event.bytes_minimum,
            "record": max(size for key, size in records if not key.startswith("stream/")),
        }


def test_only_what_moves_is_sent_and_nothing_by_the_store(pool: RankPool) -> None:
    found = [rank for rank in pool.run(one_layer_moves, megabytes=4) if rank]
    assert [rank["tables"] for rank in found[:2]] == [{"1.table": 1.0}, {"2.table": 2.0}]
    assert all(4 << 20 < rank["sent"] < 5 << 20 and rank["sent"] == rank["least"] for rank in found[:2])
    assert max(rank["record"] for rank in found) < 20_000


def given_up(how: str) -> str:
    """A switch that is rolled back, since what a layer keeps is altered on its way, or cannot travel; why."""
    with job(settings(layout(2, 1)), "pruned") as made:
        engine, decode = made.engine, layers.decode
        engine.boundary()
        if engine.generation > 1 or engine.idle:
            return ""
        engine.train_batch()
        try:
            if how == "altered":
                layers.decode = lambda value, tensors: decode(value, [each + 1 for each in tensors])
            else:
                Pruned.get_extra_state = lambda self: object()
            engine.switch(layout(1, 1), at=1)
            engine.boundary()
        finally:
            layers.decode, Pruned.get_extra_state = decode, EXTRA_STATE
        assert engine.layout == layout(2, 1)
        engine.train_batch()
        return engine.last_switch.reason


def test_a_switch_that_alters_what_a_layer_keeps_is_rolled_back(pool: RankPool) -> None:
    reasons = pool.run(given_up, how="altered")[:2]
    assert all("what layer 3 keeps besides parameters is on member 0 not what it was" in each for each in reasons)


def test_an_extra_state_that_cannot_travel_is_named(pool: RankPool) -> None:
    reasons = pool.run(given_up, how="untold")[:2]
    assert all("layer 3.extra. is a object, which cannot be carried" in each for each in reasons)
