"""Templates: modules copied to the meta device."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from ds_dynatrain.adapters.model.shaper import copied, template_of
from ds_dynatrain.errors import UnsupportedError
from tests.engine.models import SmallGPT


class Rotary(nn.Module):
    """A buffer that is in no state_dict, and a tensor that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(4.0), persistent=False)
        self.plain = torch.ones(2)


def test_a_template_has_no_memory_for_parameters() -> None:
    """Names, shapes, flags, ties and classes are those of the model; copies have parameters of their own."""
    model = SmallGPT()
    template = template_of(model)
    made = copied(template)
    assert [*made.state_dict()] == [*model.state_dict()]
    for (name, held), (other, theirs) in zip(model.named_parameters(), made.named_parameters(), strict=True):
        assert (name, held.shape, held.dtype) == (other, theirs.shape, theirs.dtype)
        assert held.requires_grad == theirs.requires_grad
        assert theirs.is_meta
    assert made.out.weight is made.words.weight
    assert type(made.blocks[0]) is type(model.blocks[0])
    assert made.words.weight is not template.words.weight


def test_buffers_are_real_and_no_view_of_the_models() -> None:
    """A buffer outside of the state_dict keeps its values, also after the model's change."""
    model = nn.Sequential(Rotary(), nn.Linear(2, 2))
    template = template_of(model)
    model[0].table.zero_()
    made = copied(template)
    made[0].table.add_(1)
    assert copied(template)[0].table.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert made[0].table.tolist() == [1.0, 2.0, 3.0, 4.0]
    assert "table" in made[0]._non_persistent_buffers_set
    assert made[0].plain.tolist() == [1.0, 1.0]


def test_hooks_stay_with_the_model() -> None:
    """Hooks, and what they hold, are not copied; the model keeps its own."""
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].register_forward_hook(Held().hook)
    model.register_forward_pre_hook(Held().hook)
    made = copied(template_of(model))
    assert not made._forward_pre_hooks
    assert not made[0]._forward_hooks
    assert len(model._forward_pre_hooks) == len(model[0]._forward_hooks) == 1


class Held:
    """Something with a hook that cannot be copied."""

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def hook(self, *_: object) -> None:
        """Nothing."""


def test_flags_of_parameters_are_kept() -> None:
    """What DeepSpeed's optimizers read off a parameter is there; methods bound to the old one are not."""
    model = nn.Linear(2, 3)
    model.weight.use_muon = True
    model.weight.all_gather = Held().hook
    model.weight.ds_id = 7
    model.weight.ds_shape = torch.Size([3, 2])
    model.weight.data = torch.empty(0)
    made = copied(template_of(model))
    assert made.weight.use_muon
    assert not hasattr(made.weight, "all_gather")
    assert not hasattr(made.weight, "ds_id")
    assert tuple(made.weight.shape) == (3, 2)
    with pytest.raises(UnsupportedError, match=r"'bias' is \(4,\) in it and \(3,\) in the one"):
        template_of(nn.Linear(2, 3), lambda: nn.Linear(2, 4))


def test_what_cannot_be_copied_is_named() -> None:
    """The attribute, its module and the way out are in the message."""
    model = nn.Sequential(nn.Linear(2, 2), Rotary())
    model[1].lock = threading.Lock()
    with pytest.raises(UnsupportedError, match=r"'lock' of '1' \(Rotary\) .*model_factory="):
        template_of(model)


def test_parameters_of_other_classes_are_refused() -> None:
    """A quantized or lazy parameter has no shape to cut."""
    with pytest.raises(UnsupportedError, match="'weight' is a UninitializedParameter"):
        template_of(nn.LazyLinear(3))


def test_a_factory_takes_the_place_of_the_copy() -> None:
    """What the factory builds is the template."""
    made = copied(template_of(nn.Linear(2, 3), lambda: nn.Linear(2, 3)))
    assert made.weight.is_meta
    assert tuple(made.weight.shape) == (3, 2)
