"""Plain attributes of modules: which changes are carried, which are named, and which are passed over."""

from __future__ import annotations

import copy
import io
import logging
from typing import Any

import pytest
import torch
from torch import nn

from ds_dynatrain.adapters.model.module_state import (
    MOST_BYTES,
    changed_attributes,
    forget,
    note,
    state_of,
    take_attributes,
    take_state,
)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.count, self.table, self.cache = 1, {"a": [1, 2]}, object()
        self.register_buffer("mean", torch.zeros(3))
        self.alias = self.mean
        self.weights = [nn.Parameter(torch.ones(2), requires_grad=False)]
        self.small, self.large = torch.zeros(2), torch.zeros(MOST_BYTES // 4 + 1)


def layer() -> Any:
    made = Layer()
    note(made)
    return made


def of(module: Any, **held: Any) -> Any:
    """The only entry of what has changed, once these attributes are set."""
    module.__dict__.update(held)
    (entry,) = changed_attributes(module).values()
    return entry


def test_what_has_not_changed_is_not_carried() -> None:
    made = layer()
    made.mean += 1
    made.weights[0].data = torch.zeros(5)
    assert of(made) == {"class": f"{__name__}.Layer", "values": {}, "left": [], "shared": ["alias"]}


def test_what_has_changed_is_carried() -> None:
    made = layer()
    made.table["a"].append(3)
    made.small += 1
    entry = of(made, count=2, new=("x", None, 1.5))
    assert sorted(entry["values"]) == ["count", "new", "small", "table"] and not entry["left"]
    there = layer()
    there.table["a"].clear()
    take_state(there, copy.deepcopy(state_of(made)))
    assert (there.count, there.table, there.new, there.small.tolist()) == (
        2,
        {"a": [1, 2, 3]},
        ("x", None, 1.5),
        [1, 1],
    )
    take_state(there, state_of(layer()))
    assert (there.count, there.table, there.small.tolist()) == (1, {"a": [1, 2]}, [0, 0]), "as before training"


def test_outputs_of_a_pass_are_passed_over() -> None:
    output = torch.ones(2, requires_grad=True) * 2
    assert of(layer(), loss=output, all_losses=[output, {"x": output}], forward_fn=print) == of(layer())


@pytest.mark.parametrize("name", ["cache", "large"])
def test_what_cannot_be_carried_is_named(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """With nothing else of that module: half of a cache is worse than none."""
    made = nn.Sequential(layer(), layer())
    made[0].count = made[1].count = 5
    setattr(made[0], name, object() if name == "cache" else made[0].large + 1)
    there = nn.Sequential(layer(), layer())
    with caplog.at_level(logging.WARNING, "ds_dynatrain"):
        take_state(there, state_of(made))
    assert (there[0].count, there[1].count) == (1, 5)
    assert f"the rest: 0.{name}. If" in caplog.text


class Telling(Layer):
    def get_extra_state(self) -> int:
        return 3

    def set_extra_state(self, state: int) -> None:
        self.cache = state


def test_a_module_with_extra_state_has_its_caches_there(caplog: pytest.LogCaptureFixture) -> None:
    made, there = Telling(), Telling()
    note(made), note(there)
    made.count, made.cache, there.cache = 5, object(), object()
    with caplog.at_level(logging.WARNING, "ds_dynatrain"):
        take_state(there, state_of(made))
    assert (there.count, there.cache) == (5, 3) and not caplog.text


def test_another_class_takes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    class Other(Layer):
        pass

    made, there = layer(), Other()
    made.count = 5
    with caplog.at_level(logging.WARNING, "ds_dynatrain"):
        take_state(there, state_of(made))
    assert there.count == 1 and "the rest: count. If" in caplog.text


def test_an_attribute_that_is_a_buffer_here_alone_keeps_its_values() -> None:
    made, there, still = layer(), layer(), layer()
    made.mean = made.mean + 1
    still.mean += 2
    take_state(there, state_of(made))
    assert there.mean.tolist() == [1] * 3 and there.alias.tolist() == [0] * 3
    there = layer()
    take_state(there, state_of(still))
    assert there.alias is there.mean and there.mean.tolist() == [2] * 3


def test_two_buffers_that_are_one_here() -> None:
    made, there = layer(), layer()
    for each in (made, there):
        each.register_buffer("other", each.mean)
    made.other = made.mean + 1
    take_state(there, state_of(made))
    assert (there.mean.tolist(), there.other.tolist()) == ([0] * 3, [1] * 3)


def test_names_of_torchs_and_deepspeeds_are_not_set() -> None:
    there = layer()
    values = {"training": 5, "_buffers": 5, "forward": 5, "ds_id": 5, "count": 5}
    take_attributes(there, {"": {**of(layer()), "values": values}})
    assert there.count == 5 and there.training is True and there._buffers and "ds_id" not in there.__dict__
    assert callable(there.forward)


def test_copies_and_files_of_a_module_have_no_notes() -> None:
    made, file = layer(), io.BytesIO()
    torch.save(made, file)
    file.seek(0)
    for other in (copy.deepcopy(made), torch.load(file, weights_only=False)):
        other.count = 7
        assert "count" not in of(other)["values"], "noted as it was when it was first asked for"
        assert of(other, count=8)["values"] == {"count": 8}
    forget(made)
    assert not [name for name in made.__dict__ if name.startswith("ds_")]
