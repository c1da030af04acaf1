"""What trainer ranks do in the tests of receivers."""

from __future__ import annotations

import os
from typing import Any
from unittest.mock import patch

import torch

from ds_dynatrain import weights
from ds_dynatrain.space import Layout
from ds_dynatrain.weights import Update, send
from ds_dynatrain.weights.receivers import Group
from ds_dynatrain.weights.receivers.board import LinkConnection
from tests.engine.axis_walks import Subject
from tests.weights import cases, fakes

Found = list[tuple[list[Update], cases.Named]]


def on_a_walk(find: cases.Find, path: list[Layout], addresses: list[str], is_merged: bool = False) -> Found:
    """Send to each address in each layout of a path; the updates, and the weights by the oracle.

    is_merged: adapters are added to the weights, which the oracle does not do; `test_lora` holds `iter_full` to peft.
    """
    groups = [Group(address, timeout_seconds=30, bucket_bytes=3000) for address in addresses]

    def look(engine: Any, subject: Subject) -> tuple[list[Update], cases.Named]:
        if is_merged:
            passing = weights.source(engine, full_on="all").iter_full()
            wanted = {name: tensor.clone().flatten() for name, tensor in passing}
        else:
            wanted = cases.expected(engine, subject)
        return [send(engine, group) for group in groups], wanted

    return cases.at_each(find, "bf16", path, look)


def with_deltas(find: cases.Find, layout: Layout, address: str, steps: int, rate: float) -> list[Update]:
    """Send after each of some steps at a learning rate, changed elements only."""
    group = Group(address, timeout_seconds=30)
    found = []

    def look(engine: Any, subject: Subject) -> None:
        for parameters in engine.optimizer.param_groups:
            parameters["lr"] = rate
        for _ in range(steps):
            subject.step(engine, look.batch)  # type: ignore[attr-defined]
            found.append(send(engine, group, delta=True))

    def step(engine: Any, batch: Any) -> float:
        look.batch = batch  # type: ignore[attr-defined]
        return first(engine, batch)

    subject = find()
    first = subject.step
    cases.at_each(lambda: Subject(**{**vars(subject), "step": step}), "bf16", [layout], look)
    return found


def killed_in_the_middle(address: str, rank: int) -> None:
    """Send a whole update, and one in which a rank dies after its first message; the others end with an error."""
    group = Group(address, timeout_seconds=20, bucket_bytes=200)
    source = fakes.fake_source(1)
    send(source, group)
    sends, calls = LinkConnection.send, 0

    def dying(connection: LinkConnection, values: torch.Tensor, to: int, what: str) -> Any:
        nonlocal calls
        calls += 1
        if source.rank == rank and calls == 2:
            os._exit(9)
        return sends(connection, values, to, what)

    with patch.object(LinkConnection, "send", dying):
        send(fakes.fake_source(2), group)
