"""What a state is restored from: a checkpoint of ours, or one of DeepSpeed's own in whatever layout it was written.

Both are a manifest, whose rows say where each element lies, and a carry. One of DeepSpeed's says less: random streams,
loaders' positions and the user's objects stay as they are, as with DeepSpeed's own load.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from ds_dynatrain.adapters.regroup import Regrouping
from ds_dynatrain.checkpoint import Manifest, Reader, Saved
from ds_dynatrain.checkpoint.elements import name_of
from ds_dynatrain.checkpoint.files import naming
from ds_dynatrain.checkpoint.others import (
    ZeroFolder,
    check_crcs,
    frozen_left_out,
    rows_of,
    scalars_of,
    scaler_fields,
    then,
    value_of,
    with_values,
)
from ds_dynatrain.checkpoint.others.foreign import number_of
from ds_dynatrain.engine import streams
from ds_dynatrain.engine.checkpoints.extra_state import rest_for, streams_for
from ds_dynatrain.engine.checkpoints.merging import kept_scalars, over
from ds_dynatrain.engine.checkpoints.shared import shared_of
from ds_dynatrain.engine.core import COUNTERS, EngineCore
from ds_dynatrain.errors import CheckpointError
from ds_dynatrain.report import logger
from ds_dynatrain.space import MASTER, WEIGHT, Layout, LogicalTensor, VirtualParameterSpace, row_of

Key = tuple[str, str]
"""(tensor, state kind)."""
Gather = Callable[[str, Any], Mapping[int, Any]]
"""Post a record under a name; those of all members."""

NO_CLIENT_STATE = frozenset(
    {
        "data_sampler",
        "dp_world_size",
        "frozen_param_fragments",
        "global_steps",
        "lr_scheduler",
        "module",
        "mp_world_size",
        "optimizer",
        "random_ltd",
        "skipped_steps",
        "sparse_tensor_module_names",
    }
)
"""What DeepSpeed does not give back from `load_checkpoint`, and the parts of frozen tensors."""


class Source(Protocol):
    """A checkpoint that is open. kinds: state kinds in it. client_state: what `load_checkpoint` gives back.

    kept: numbers of the frozen tensors that it was saved without. registration: see `StateSource`.
    """

    @property
    def path(self) -> Path: ...
    @property
    def manifest(self) -> Manifest: ...
    @property
    def kinds(self) -> list[str]: ...
    @property
    def tensors(self) -> tuple[LogicalTensor, ...]: ...
    @property
    def kept(self) -> tuple[int, ...]: ...
    @property
    def client_state(self) -> dict[str, Any]: ...
    @property
    def registration(self) -> Regrouping | None: ...

    def shared(self, numbers: Mapping[int, int]) -> dict[str, Any]:
        """The shared carry. numbers: of a tensor there -> here."""
        ...

    def rest(self, reader: Reader, layout: Layout, rank: int) -> dict[str, Any]:
        """The rest of a rank's carry."""
        ...

    def streams(self, layout: Layout, rank: int) -> streams.Streams:
        """A rank's random streams."""
        ...

    def digests(self, reader: Reader, place: int, places: int, gather: Gather) -> dict[Key, int]:
        """Of whole tensors, in their types there; where it takes reading, `places` members share it."""
        ...


@dataclass(frozen=True, eq=False)
class Universal:
    """One of ours."""

    saved: Saved

    @property
    def path(self) -> Path:
        return self.saved.path

    @property
    def manifest(self) -> Manifest:
        return self.saved.manifest

    @property
    def kinds(self) -> list[str]:
        return self.saved.record.kinds

    @property
    def tensors(self) -> tuple[LogicalTensor, ...]:
        return self.saved.record.logical_tensors()

    @property
    def kept(self) -> tuple[int, ...]:
        return ()

    @property
    def client_state(self) -> dict[str, Any]:
        return {}

    @cached_property
    def carry(self) -> dict[str, Any]:
        """The shared carry as it was saved."""
        return shared_of(self.saved)

    @property
    def registration(self) -> Regrouping | None:
        said = self.carry.get("registration")  # an early checkpoint has none
        return None if said is None else Regrouping.from_json(said)

    def shared(self, numbers: Mapping[int, int]) -> dict[str, Any]:
        scalars = {
            name: {str(numbers[int(number)]): value for number, value in table.items()}
            for name, table in self.carry["scalars"].items()
        }
        return {**self.carry, "scalars": scalars}

    def rest(self, reader: Reader, layout: Layout, rank: int) -> dict[str, Any]:
        return rest_for(self.saved, reader, layout, rank)

    def streams(self, layout: Layout, rank: int) -> streams.Streams:
        return streams_for(self.saved, layout, rank)

    def digests(self, reader: Reader, place: int, places: int, gather: Gather) -> dict[Key, int]:
        return {key: self.manifest.digest(*key) for key in self.manifest.rows if key[1] in self.kinds}


@dataclass(frozen=True, eq=False)
class Stock:
    """One of DeepSpeed's."""

    folder: ZeroFolder
    engine: EngineCore
    present: dict[str, Any]

    @property
    def path(self) -> Path:
        return self.folder.path

    @property
    def tensors(self) -> tuple[LogicalTensor, ...]:
        return self.engine.vps.tensors

    @cached_property
    def space(self) -> VirtualParameterSpace:
        """Under the layout that it was saved in."""
        with naming(self.path):
            return then(self.folder, self.engine.vps)

    @cached_property
    def manifest(self) -> Manifest:
        with naming(self.path):
            return Manifest.of(rows_of(self.folder, self.space, self.engine.host.element_types.weight))

    @cached_property
    def kinds(self) -> list[str]:
        held = {kind for _, kind in self.manifest.rows}
        return [kind for kind in self.space.present_kinds() if kind in held]

    @property
    def kept(self) -> tuple[int, ...]:
        return frozen_left_out(self.space, self.manifest)

    @property
    def registration(self) -> Regrouping | None:
        return None

    @property
    def client_state(self) -> dict[str, Any]:
        found: dict[str, Any] = with_values(self.path, self.folder.client_state(NO_CLIENT_STATE))
        return found

    def shared(self, numbers: Mapping[int, int]) -> dict[str, Any]:
        said, file = self.folder.model(0), self.folder.optimizer(0, 0)
        groups = with_values(self.path, file.groups) or self.present["groups"]
        if len(groups) != len(self.present["groups"]):
            raise CheckpointError(
                f"{self.path} has {len(groups)} optimizer groups, and this job has {len(self.present['groups'])}; "
                "build the optimizer with the groups of the job that saved it"
            )
        if said.get("data_sampler") is not None:
            logger.warning("%s: the position in the data is not taken over; loaders go on where they are", self.path)
        return over(
            self.present,
            {
                "counters": {name: int(said.get(name, 0)) for name in COUNTERS},
                "windows": int(said.get("global_steps", 0)),
                "groups": groups,
                "scalars": self._scalars(),
                "scaler": scaler_fields(file),
                "scheduler": with_values(self.path, said.get("lr_scheduler")),
                "random-LTD": with_values(self.path, said.get("random_ltd")),
            },
        )

    def _scalars(self) -> dict[str, dict[str, float]]:
        with naming(self.path):
            there, tensors = scalars_of(self.folder, self.space), self.space.tensors
        moments = [kind for kind in self.kinds if row_of(kind).is_moment]

        def find(name: str, number: int) -> float | None:
            value = there.get(name, {}).get(number)
            return None if value is None else number_of(self.path, value)

        def has_moments(number: int) -> bool:
            return any((tensors[number].name, kind) in self.manifest.rows for kind in moments)

        return kept_scalars(self.engine, find, has_moments)

    def rest(self, reader: Reader, layout: Layout, rank: int) -> dict[str, Any]:
        wanted = {name for name, _ in self.engine.host.module.named_buffers()}
        held = {name: each for part in range(self.folder.parts) for name, each in self.folder.weights(part).items()}
        buffers = {name: value_of(self.path, each) for name, each in held.items() if name in wanted}
        return {"grad_norm": None, "buffers": buffers, "objects": {}}

    def streams(self, layout: Layout, rank: int) -> streams.Streams:
        return streams.capture()

    def digests(self, reader: Reader, place: int, places: int, gather: Gather) -> dict[Key, int]:
        weight = self.engine.host.element_types.weight
        check_crcs(self.path, self.folder.archives, place, places)
        rows = sorted((row for row in self.manifest if row.file), key=lambda row: (row.file, row.offset))[place::places]
        mine: dict[Key, int] = {}
        for row in rows:
            share = {row.kind: reader.digest(row)}
            if row.kind == MASTER:
                share[WEIGHT] = share[MASTER] if row.dtype == name_of(weight) else reader.digest(row, weight)
            for kind, total in share.items():
                mine[row.tensor, kind] = mine.get((row.tensor, kind), 0) + total
        found: dict[Key, int] = {}
        for record in gather("there", [[*key, f"{total:x}"] for key, total in mine.items()]).values():
            for tensor, kind, total in record:
                found[tensor, kind] = (found.get((tensor, kind), 0) + int(total, 16)) & ((1 << 64) - 1)
        return found


def damaged_rows(source: Source, reader: Reader, keys: list[Key], place: int, places: int) -> list[str]:
    """Which stored extents of these tensors are not what was saved; this member's share of the reading."""
    if not isinstance(source, Universal):
        return []
    stored = [row for key in keys for row in source.manifest.rows[key] if row.file]
    return [str(row) for row in stored[place::places] if not reader.is_sound(row)]
