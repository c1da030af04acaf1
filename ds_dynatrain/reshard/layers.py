"""Extra state that moves from member to member in a switch: module buffers and user objects for newcomers, and state
that layers keep besides parameters.

A layer's state besides parameters (`adapters.model.module_state`) is sent to each member that newly gets the layer; the
sender is the first process of the first stage that has the layer. Names, dtypes and shapes are posted in the members'
key-value store; all tensors are forwarded along a tree in which each member sends to at most two others.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ds_dynatrain.adapters.model.module_state import state_of, take_state
from ds_dynatrain.errors import CertificateError
from ds_dynatrain.membership.control import Control
from ds_dynatrain.membership.proposal import Proposal
from ds_dynatrain.reshard.carry import rest_carry
from ds_dynatrain.reshard.core import EngineCore
from ds_dynatrain.reshard.encoding import blank_tensors, decode, encode, fingerprint
from ds_dynatrain.transfer import Transport, send_down

REST = "the rest"
"""Name of the extra state of rank 0 that newcomers load; all other names are those of layers."""
Stages = Sequence[Sequence[str]]
"""The names of the layers in each pipeline stage."""


@dataclass(frozen=True)
class StateMove:
    """A transfer of one extra state, such as that of a layer, from one member to others."""

    name: str
    sender: int
    receivers: tuple[int, ...]


def layer_moves(before: Stages, after: Stages, proposal: Proposal) -> list[StateMove]:
    """Return the transfers of the state that layers keep besides parameters, in the order of the layers before the
    switch.

    before, after: the names of the layers of each pipeline stage before and after the switch.
    """
    source, target = proposal.source_layout, proposal.layout
    had = {member: before[source.coordinate(rank)["pipe"]] for rank, member in enumerate(proposal.source_members)}
    wants = {member: after[target.coordinate(rank)["pipe"]] for rank, member in enumerate(proposal.members)}
    first = {layer: stage for stage in reversed(range(len(before))) for layer in before[stage]}
    found = []
    for layer in dict.fromkeys(layer for stage in before for layer in stage):
        sender = proposal.source_members[source.rank(pipe=first[layer])]
        receivers = tuple(each for each, layers in wants.items() if layer in layers and layer not in had.get(each, ()))
        found += [StateMove(layer, sender, receivers)] if receivers else []
    return found


class MovingStates:
    """The extra states that move in one switch, as sent and received by one member."""

    def __init__(self, engine: EngineCore, control: Control, proposal: Proposal) -> None:
        self._engine, self._control, self._key = engine, control, f"states/{proposal.generation}"
        self._states: dict[str, Any] = {}
        newcomers = tuple(sorted({*proposal.members} - {*proposal.source_members}))
        self._moves = [StateMove(REST, proposal.source_members[0], newcomers)] if newcomers else []
        if engine.job.has_stages:
            shaper: Any = engine.host.shaper
            before, after = map(shaper.template.layers_by_stage, (proposal.source_layout, proposal.layout))
            self._moves += layer_moves(before, after, proposal)

    def offer(self) -> None:
        """Capture the states that this member will send, and post their dtypes and shapes. Called before the members
        meet.

        Raises ConfigError for a state that cannot be transferred.
        """
        engine, record = self._engine, {}
        for move in self._moves:
            if move.sender != self._control.member:
                continue
            if move.name == REST:
                state, what = rest_carry(engine, has_module=not engine.job.has_stages), ""
            else:
                state, what = dict(state_of(engine.host.module.get_submodule(move.name))), f"layer {move.name}"
            self._states[move.name] = state
            record[move.name] = {"state": encode(state, [], what), "print": fingerprint(state)}
        if record:
            self._control.post(f"{self._key}/{self._control.member}", record)

    def exchange(self, transport: Transport, seconds: float) -> int:
        """Send and receive the extra states. Return how many bytes of layers' states this member has sent.

        seconds: time limit for the whole exchange.

        Raises CertificateError if a received state differs from the one that was sent.
        """
        deadline, sent, records, mine = time.monotonic() + seconds, 0, dict[int, Any](), self._control.member
        for move in self._moves:
            tree, tensors = (move.sender, *move.receivers), list[torch.Tensor]()
            if mine == move.sender:
                encode(self._states.pop(move.name), tensors)
                nbytes = send_down(tree, mine, tensors, transport, deadline)
            elif mine in move.receivers:
                if move.sender not in records:
                    records[move.sender] = self._control.value(f"{self._key}/{move.sender}")
                record = records[move.sender][move.name]
                tensors = blank_tensors(record["state"])
                nbytes = send_down(tree, mine, tensors, transport, deadline)
                state = self._states[move.name] = decode(record["state"], tensors)
                if fingerprint(state) != record["print"]:
                    kept = "module buffers or carried objects" if move.name == REST else f"what layer {move.name} keeps"
                    raise CertificateError(
                        f"{kept} besides parameters is on member {mine} not what it was on member {move.sender}"
                    )
            else:
                continue
            sent += nbytes if move.name != REST else 0
        return sent

    def rest(self) -> dict[str, Any]:
        """Return the extra state that a newcomer has received from rank 0. Called after `exchange`."""
        found: dict[str, Any] = self._states.pop(REST)
        return found

    def put(self, is_resized: bool) -> None:
        """Load the received states into the layers of this member.

        is_resized: whether the layers' shapes have changed (see `ModuleState`).
        """
        for layer, state in self._states.items():
            take_state(self._engine.host.module.get_submodule(layer), {**state, "resized": is_resized})
        self._states.clear()
