"""Slots of host memory for messages."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch

from ds_dynatrain.transfer.stream import Staging


def test_slots_are_used_again() -> None:
    staging = Staging(4096)
    staging.reserve(2)
    one, other = staging.take(10), staging.take(4096)
    assert (one.numel(), other.numel(), staging.peak) == (10, 4096, 4106)
    places = {one.data_ptr(), other.data_ptr()}
    staging.give(one)
    staging.give(other)
    again = [staging.take(7), staging.take(8)]
    assert {each.data_ptr() for each in again} == places and staging.peak == 4106


def test_memory_that_cannot_be_pinned_does() -> None:
    """An accelerator copies it, only more slowly."""
    asked, empty = list[bool](), torch.empty

    def none_is_left(*shape: Any, **how: Any) -> torch.Tensor:
        if how.get("pin_memory"):
            asked.append(True)
            raise RuntimeError("CUDA error: out of memory")
        return empty(*shape, **how)

    staging = Staging(4096, is_pinned=True)
    with patch.object(torch, "empty", none_is_left):
        staging.reserve(3)
        assert staging.take(4096).numel() == 4096
    assert asked == [True] and not staging.is_pinned
