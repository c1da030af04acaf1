"""Random streams while something of ours draws under a seed of its own."""

from __future__ import annotations

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from deepspeed.accelerator import get_accelerator

from ds_dynatrain.adapters.zero.incoming import seeded

Drawn = tuple[float, float, float, float]


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> torch.Generator:
    """The generator of a device that DeepSpeed trains on; `torch.manual_seed` seeds it too, as it does every device."""
    own = torch.Generator().manual_seed(7)
    monkeypatch.setattr(get_accelerator(), "device_name", lambda index=None: "privateuseone")
    monkeypatch.setattr(get_accelerator(), "get_rng_state", lambda index=None: own.get_state())
    monkeypatch.setattr(get_accelerator(), "set_rng_state", lambda state, index=None: own.set_state(state))
    monkeypatch.setattr(get_accelerator(), "manual_seed", own.manual_seed)
    device = SimpleNamespace(_is_in_bad_fork=lambda: False, manual_seed_all=own.manual_seed)
    monkeypatch.setattr(torch, "privateuseone", device, raising=False)
    return own


def draw(device: torch.Generator) -> Drawn:
    """A number of each generator."""
    return torch.rand(()).item(), float(np.random.rand()), random.random(), torch.rand((), generator=device).item()


def test_every_generator_goes_on_where_it_was(accelerator: torch.Generator) -> None:
    """That of DeepSpeed's accelerator, too: dropout on it draws from there."""
    torch.manual_seed(1), np.random.seed(1), random.seed(1)
    wanted = draw(accelerator)
    torch.manual_seed(1), np.random.seed(1), random.seed(1)
    with seeded("a"):
        draw(accelerator)
    assert draw(accelerator) == wanted


def test_what_is_drawn_follows_from_the_seed_alone(accelerator: torch.Generator) -> None:
    """On the accelerator, too."""
    with seeded("a"):
        first = draw(accelerator)
    draw(accelerator)
    with seeded("a"):
        assert draw(accelerator) == first
    with seeded("b"):
        other = draw(accelerator)
    assert not set(first) & set(other)


def test_an_error_inside_leaves_them_as_they_were(accelerator: torch.Generator) -> None:
    """A module whose parameters cannot be drawn."""
    before = accelerator.get_state()
    with pytest.raises(ZeroDivisionError), seeded("a"):
        raise ZeroDivisionError
    assert torch.equal(accelerator.get_state(), before)
