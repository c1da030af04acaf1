"""The census: a check that every state element lies where the layout predicts.

It compares the prediction with what DeepSpeed reports about its buffers.
"""

from __future__ import annotations

from ds_dynatrain.adapters.deepspeed.host import Host
from ds_dynatrain.adapters.zero.stages import stage_of
from ds_dynatrain.adapters.zero.state import Buffers, is_pinned
from ds_dynatrain.errors import CensusError
from ds_dynatrain.space import VirtualParameterSpace

FROZEN_PARTS = "partition"
"""Value of `BufferId.place` for the buffers of frozen tensors under stage 3."""
Row = tuple[str, int, int, int, int]
"""One piece of a state: (state kind, tensor number, first row-major index, number of elements, address)."""


def check_census(host: Host, vps: VirtualParameterSpace, rank: int, buffers: Buffers, when: str) -> None:
    """Raise CensusError unless every element is where the layout predicts, on the predicted device.

    The error names the tensor and both locations.

    when: the point in time of the check, for the error.
    """
    memory, local = host.memory(tuple(kind for kind, _ in buffers), vps.layout), vps.local(vps.layout, rank)
    for (kind, name), held in buffers.items():
        place = memory[kind].place
        if held.numel() and name.place == FROZEN_PARTS:  # the user decides whether these are pinned
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
    found: set[Row] = {row for row in stage_of(host.optimizer).census(host.engine, host.model_map) if row.numel}
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
