"""Detaching an engine's optimizer from one set of buffers and attaching it to another, in a way that can be undone.

Each step registers its undo function before it starts, so that a step that fails halfway is undone as well. The census
checks that every state element lies where the layout predicts, using the locations that DeepSpeed reports.
"""

from __future__ import annotations

import copy
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from ds_dynatrain.adapters.deepspeed.host import Host
from ds_dynatrain.adapters.groups.world import World
from ds_dynatrain.adapters.groups.worlds import install
from ds_dynatrain.adapters.model.shaper import Made
from ds_dynatrain.adapters.zero.deepspeed_config import Settings
from ds_dynatrain.adapters.zero.stages import stage_of
from ds_dynatrain.adapters.zero.state import Buffers, Scalars, is_pinned
from ds_dynatrain.errors import CensusError
from ds_dynatrain.reshard import streams
from ds_dynatrain.reshard.carry import LoadReason, rest_carry, shared_carry, take
from ds_dynatrain.reshard.core import EngineCore
from ds_dynatrain.space import Layout, VirtualParameterSpace


@dataclass(frozen=True)
class Before:
    """State of a working engine before a change, to which the engine returns if the change fails.

    shared: the extra state that is equal on all members.
    rest: the other extra state, if the change replaces it; else None.
    """

    world: World
    layout: Layout
    config: Settings
    buffers: Buffers
    scalars: Scalars
    shared: dict[str, Any]
    rest: dict[str, Any] | None = None

    @staticmethod
    def of(engine: EngineCore, has_rest: bool = False) -> Before:
        """Capture the current state of an engine, which must be between two global batches.

        has_rest: whether to include the extra state that may differ between members.
        """
        if engine.world is None:
            raise RuntimeError("an idle member holds no state that could change")
        engine.host.settle_parameters()
        buffers, scalars = engine.host.state_buffers()
        shared = shared_carry(engine, scalars)
        rest = copy.deepcopy(rest_carry(engine)) if has_rest else None
        return Before(engine.world, engine.layout, engine.host.present_config, buffers, scalars, shared, rest)


class Swap:
    """A change of an engine's memory, made by the methods `off`, `into` and `over`, in this order, and undone by
    `undo`.

    A member without state before or after the change leaves some of these calls out. `undo` also restores the random
    streams as they were when this object was made.

    on_undo: registers a function and its arguments for `undo`.
    undo: calls the registered functions, the last one first.
    keep: makes the change permanent, by dropping all registered functions.
    """

    def __init__(self, engine: EngineCore) -> None:
        self.has_begun, self._engine, steps = False, engine, ExitStack()
        self.on_undo, self.undo, self.keep = steps.callback, steps.close, steps.pop_all
        self.streams = streams.capture()
        self.on_undo(streams.restore, self.streams)

    def off(self, before: Before) -> None:
        """Detach the optimizer from its buffers, unless it is detached already."""
        if not self.has_begun:
            self.has_begun = True
            self.on_undo(self._back, before)
            self._engine.host.detach()

    def into(self, world: World) -> None:
        """Enter a world. If this member was idle, `undo` returns it to the process group that it uses while idle."""
        if not self.has_begun:
            self.has_begun = True
            self.on_undo(self._leave)
        install(world)

    def over(
        self,
        vps: VirtualParameterSpace,
        layout: Layout,
        world: World,
        rank: int,
        buffers: Buffers,
        scalars: Scalars,
        made: Made | None = None,
    ) -> None:
        """Rebuild the module for a rank of a layout, and attach the optimizer to `buffers`.

        scalars: the values that the optimizer keeps per parameter, such as step counts.
        made: children for the module that were built ahead of time; None to build them now.
        """
        engine = self._engine
        replaced = engine.host.reshape(layout, rank, vps.local(layout, rank).tensors, made)
        if replaced is not None:
            self.on_undo(engine.host.undo_reshape, replaced)
        self.on_undo(engine.host.detach)
        engine.host.attach(layout, world, engine.config_for(layout), buffers, scalars)

    def _back(self, before: Before) -> None:
        """Attach the optimizer to the buffers that it had before the change, in the old world."""
        engine = self._engine
        install(before.world)
        engine.host.attach(before.layout, before.world, before.config, before.buffers, before.scalars)
        if before.rest is None:
            take(engine, before.shared, LoadReason.FAILED_SWITCH)
        else:
            take(engine, {**before.shared, **before.rest, "casts": True}, LoadReason.START)

    def _leave(self) -> None:
        self._engine.host.leave_world()
        self._engine.launch.install()


Row = tuple[str, int, int, int, int]
"""One piece of a state: (state kind, tensor number, first row-major index, number of elements, address)."""


def check_census(host: Host, vps: VirtualParameterSpace, rank: int, buffers: Buffers, when: str) -> None:
    """Raise CensusError unless every element of the state is at the location that the layout predicts, on the predicted
    device.

    The error names the tensor and both locations.

    when: the point in time of the check, for the error.
    """
    memory, local = host.memory(tuple(kind for kind, _ in buffers), vps.layout), vps.local(vps.layout, rank)
    for (kind, name), held in buffers.items():
        place = memory[kind].place
        if held.numel() and name.place == "partition":  # the user decides whether frozen parts are pinned
            place = place._replace(pinned=False)
        if held.numel() and not place.holds(held):
            raise CensusError(
                f"{when}, rank {rank}, {vps.layout}: {kind} in {name} lies on {held.device} (pinned: "
                f"{is_pinned(held)}), and {place} is expected. This DeepSpeed keeps its state in another memory"
            )
        if held.element_size() != vps.kind(kind).itemsize:
            raise CensusError(
                f"{when}, rank {rank}: elements of {kind} in {name} are {held.dtype}, and {vps.kind(kind).itemsize} "
                "bytes are expected of each"
            )
    found: set[Row] = {row for row in stage_of(host.engine, host.model_map).census() if row.numel}
    expected = set[Row]()
    for kind in sorted({row[0] for row in found} | {"weight", "master"}):
        numbers, pieces = local.rows(kind)
        for number, piece in zip(numbers.tolist(), pieces, strict=True):
            buffer = buffers.get((kind, piece.buffer))
            if buffer is None:
                raise CensusError(
                    f"rank {rank}: the layout keeps {kind} in {piece.buffer}, and there is no such buffer"
                )
            stop = piece.offset + piece.stop - piece.start
            if stop > buffer.numel():
                raise CensusError(
                    f"rank {rank}: {kind} of {vps.tensors[number].name!r} ends at {stop} of a buffer of "
                    f"{buffer.numel()} elements"
                )
            address = buffer.data_ptr() + piece.offset * buffer.element_size()
            first = piece.start - int(local.line.bases[number])
            expected.add((kind, number, first, piece.stop - piece.start, address))
    if found == expected:
        return
    extra, missing = sorted(found - expected), sorted(expected - found)
    kind, number, *_ = (extra or missing)[0]
    raise CensusError(
        f"{when}, rank {rank}, {vps.layout}: {kind} of {vps.tensors[number].name!r} is predicted at "
        f"{[row[2:] for row in missing if row[:2] == (kind, number)]} and found at "
        f"{[row[2:] for row in extra if row[:2] == (kind, number)]} (first index, elements, address); "
        f"{len(extra)} rows differ. This DeepSpeed lays its state out in another way"
    )
