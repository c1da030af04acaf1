"""One member's tensors to many: everybody gets them, and nobody sends more than two copies."""

from __future__ import annotations

import time

import pytest
import torch

from ds_dynatrain.transfer import send_down, transport
from tests.transfer.hub import Hub, all_at_once


@pytest.mark.parametrize("members", [1, 2, 3, 9, 16])
def test_each_sends_two_copies_at_most(monkeypatch: pytest.MonkeyPatch, members: int) -> None:
    monkeypatch.setattr(transport, "RELAY_BYTES", 64)
    hub, tree = Hub(), [7 * number % 31 for number in range(members)]
    sent = dict.fromkeys(tree, 0)
    data = [torch.randn(5, 11), torch.zeros(0), torch.arange(7), torch.randn(12, 3).t()]
    held = {tree[0]: data, **{member: [torch.zeros_like(each).contiguous() for each in data] for member in tree[1:]}}

    class Counted:
        def __init__(self, member: int) -> None:
            self.member, self.end = member, hub.transport(member)
            self.receive = self.end.receive

        def send(self, tensor: torch.Tensor, member: int, tag: int) -> object:
            sent[self.member] += tensor.numel() * tensor.element_size()
            return self.end.send(tensor, member, tag)

    all_at_once(tree, lambda me: send_down(tree, me, held[me], Counted(me), time.monotonic() + 20))  # type: ignore[arg-type]
    for tensors in held.values():
        assert all(torch.equal(mine, first) for mine, first in zip(tensors, data, strict=True))
    size = sum(each.numel() * each.element_size() for each in data)
    assert sum(sent.values()) == (members - 1) * size and max(sent.values()) <= 2 * size
