"""State that layers keep besides parameters (`adapters.model.module_state`), moved between pipeline stages in a switch.

A layer's state is sent to each member that newly gets the layer; the sender is the first process of the first stage
that has the layer. Names, types and shapes are posted on the board; all tensors are sent from member to member.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ds_dynatrain.adapters.model.module_state import ModuleState, state_of, take_state
from ds_dynatrain.errors import CertificateError
from ds_dynatrain.membership.control import Control
from ds_dynatrain.membership.proposal import Proposal
from ds_dynatrain.reshard.core import EngineCore
from ds_dynatrain.reshard.encoding import blank_tensors, decode, encode, fingerprint
from ds_dynatrain.transfer import Transport

LAYER_TAG = 3
Stages = Sequence[Sequence[str]]
"""The names of the layers of each stage."""


@dataclass(frozen=True)
class LayerMove:
    """A transfer of one layer's state from one member to others."""

    layer: str
    sender: int
    receivers: tuple[int, ...]


def layer_moves(before: Stages, after: Stages, proposal: Proposal) -> tuple[LayerMove, ...]:
    """Return the transfers of a switch, in the order of the model's layers before it."""
    source, target = proposal.source_layout, proposal.layout
    had = {member: before[source.coordinate(rank)["pipe"]] for rank, member in enumerate(proposal.source_members)}
    wants = {member: after[target.coordinate(rank)["pipe"]] for rank, member in enumerate(proposal.members)}
    first = {layer: stage for stage in reversed(range(len(before))) for layer in before[stage]}
    found = []
    for layer in dict.fromkeys(layer for stage in before for layer in stage):
        sender = proposal.source_members[source.rank(pipe=first[layer])]
        receivers = tuple(each for each, layers in wants.items() if layer in layers and layer not in had.get(each, ()))
        found += [LayerMove(layer, sender, receivers)] if receivers else []
    return tuple(found)


class LayerStates:
    """The layers' states in one switch, on one member of a model whose layers are divided into stages."""

    def __init__(self, engine: EngineCore, control: Control, proposal: Proposal) -> None:
        before, after = map(engine.host.stage_layers, (proposal.source_layout, proposal.layout))
        self._module, self._control = engine.host.module, control
        self._key, moves = f"layers/{proposal.generation}", layer_moves(before, after, proposal)
        self._given = [move for move in moves if move.sender == control.member]
        self._taken = [move for move in moves if control.member in move.receivers]
        self._states: dict[str, ModuleState] = {}

    def offer(self) -> None:
        """Record the states that this member sends, and post their types and shapes. Called before the members meet.

        Raises ConfigError for an extra state that cannot be transferred.
        """
        record = {}
        for move in self._given:
            state = self._states[move.layer] = state_of(self._module.get_submodule(move.layer))
            record[move.layer] = {"state": encode(state, [], f"layer {move.layer}"), "print": fingerprint(state)}
        if record:
            self._control.post(f"{self._key}/{self._control.member}", record)

    def exchange(self, transport: Transport, seconds: float) -> int:
        """Send and receive the states; return the number of bytes that this member has sent.

        Raises CertificateError if a received state differs from the one that was sent.
        """
        deadline, sent, records = time.monotonic() + seconds, 0, dict[int, Any]()
        handles, arriving = [], dict[str, tuple[Any, list[torch.Tensor]]]()
        for move in self._taken:
            if move.sender not in records:
                records[move.sender] = self._control.value(f"{self._key}/{move.sender}")
            record = records[move.sender][move.layer]
            arriving[move.layer] = record, blank_tensors(record["state"])
            handles += [transport.receive(each, move.sender, LAYER_TAG) for each in _flat(arriving[move.layer][1])]
        for move in self._given:
            tensors: list[torch.Tensor] = []
            encode(self._states.pop(move.layer), tensors)
            for member in move.receivers:
                handles += [transport.send(each, member, LAYER_TAG) for each in _flat(tensors)]
                sent += sum(each.nbytes for each in tensors)
        for handle in handles:
            handle.wait(deadline)
        for layer, (record, tensors) in arriving.items():
            state = decode(record["state"], tensors)
            if fingerprint(state) != record["print"]:
                raise CertificateError(
                    f"what layer {layer} keeps besides parameters is on member {self._control.member} not what it was"
                )
            self._states[layer] = state
        return sent

    def put(self, is_resized: bool) -> None:
        """Load the received states into the layers of this member.

        is_resized: see `ModuleState`.
        """
        for layer, state in self._states.items():
            take_state(self._module.get_submodule(layer), {**state, "resized": is_resized})
        self._states.clear()


def _flat(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [each.contiguous().view(-1) for each in tensors if each.numel()]
