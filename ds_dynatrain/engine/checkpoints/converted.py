"""A checkpoint of ours that was converted from another tool's, and so lacks parts of a training.

Its tensors are those of this training by name and shape; how they are grouped, and which are frozen, is as it is here,
and each group here takes the hyper-parameters that its tensors had there. What is not in it stays as it is: where it
has weights only, the optimizer begins as new.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from ds_dynatrain.checkpoint import Manifest, Reader, Row, Saved
from ds_dynatrain.checkpoint.elements import named
from ds_dynatrain.checkpoint.files import WHERE_DAMAGED
from ds_dynatrain.engine import streams
from ds_dynatrain.engine.checkpoints.extra_state import rest_for
from ds_dynatrain.engine.checkpoints.merging import kept_scalars, over
from ds_dynatrain.engine.checkpoints.shared import shared_of
from ds_dynatrain.engine.checkpoints.sources import Universal
from ds_dynatrain.engine.core import EngineCore
from ds_dynatrain.errors import CheckpointDamaged, CheckpointError
from ds_dynatrain.space import MASTER, WEIGHT, Layout, LogicalTensor, row_of


@dataclass(frozen=True, eq=False)
class Converted(Universal):
    """present: the shared carry of now."""

    saved: Saved
    engine: EngineCore
    present: dict[str, Any]

    @cached_property
    def there(self) -> dict[str, tuple[int, LogicalTensor]]:
        """What it has, by name: number and tensor."""
        return {each.name: (number, each) for number, each in enumerate(self.saved.record.logical_tensors())}

    @cached_property
    def names(self) -> dict[str, str]:
        """Name here -> name there, where a tied parameter goes by another of its names."""
        aliases: dict[int, list[str]] = {}
        for name, held in self.engine.host.module.named_parameters(remove_duplicate=False):
            aliases.setdefault(id(held), []).append(name)
        known = {name: names for names in aliases.values() for name in names}
        found = {}
        for tensor in self.engine.vps.tensors:
            others = [name for name in known.get(tensor.name, ()) if name in self.there]
            found[tensor.name] = tensor.name if tensor.name in self.there or not others else others[0]
        return found

    @cached_property
    def tensors(self) -> tuple[LogicalTensor, ...]:
        """Those of this training; CheckpointError, naming all that do not match."""
        buffers = {name for name, _ in self.engine.host.module.named_buffers()}
        aliases = {name for name, _ in self.engine.host.module.named_parameters(remove_duplicate=False)}
        here, wrong = set(self.names.values()), list[str]()
        for tensor in self.engine.vps.tensors:
            number = self.there.get(self.names[tensor.name])
            if number is None:
                wrong.append(f"this model has {tensor.name!r} {tensor.shape}, which is not in it")
            elif number[1].shape != tensor.shape:
                wrong.append(f"it has {tensor.name!r} {number[1].shape}, and this model's is {tensor.shape}")
            elif tensor.trainable and tensor.numel and (number[1].name, MASTER) not in self.saved.manifest.rows:
                wrong.append(f"this model trains {tensor.name!r}, which has no master there: it was frozen")
        for name in self.there:
            if name not in here and name not in buffers and not self._is_copy(name, aliases):
                wrong.append(f"it has {name!r} {self.there[name][1].shape}, and this model has no such parameter")
        if wrong:
            more = f"; and {len(wrong) - 3} more" if len(wrong) > 3 else ""
            raise CheckpointError(f"{'; '.join(wrong[:3])}{more}; build the model of the job that saved it")
        return self.engine.vps.tensors

    def _is_copy(self, name: str, aliases: set[str]) -> bool:
        """Whether it is a tied parameter's values once more."""
        if name not in aliases:
            return False
        mine = dict(self.engine.host.module.named_parameters(remove_duplicate=False))
        kind = MASTER if (name, MASTER) in self.saved.manifest.rows else WEIGHT
        return any(
            mine.get(other) is mine[name] and self._digest(there, kind) == self._digest(name, kind)
            for other, there in self.names.items()
        )

    def _digest(self, name: str, kind: str) -> int | None:
        manifest = self.saved.manifest
        return manifest.digest(name, kind) if (name, kind) in manifest.rows else None

    @cached_property
    def manifest(self) -> Manifest:
        """Under the names here."""
        rows = dict(self.saved.manifest.rows)
        for here, there in self.names.items():
            if here != there:
                for kind in self.saved.record.kinds:
                    if (there, kind) in rows:
                        rows[here, kind] = tuple(replace(row, tensor=here) for row in rows[there, kind])
        return Manifest(rows)

    def shared(self, numbers: Mapping[int, int]) -> dict[str, Any]:
        said = shared_of(self.saved)
        if "groups" in said:
            said["groups"] = self._groups(said["groups"])
        scalars, moments = said.get("scalars", {}), {kind for kind in self.kinds if row_of(kind).is_moment}

        def find(name: str, number: int) -> float | None:
            return scalars.get(name, {}).get(str(self.there[self.names[self.tensors[number].name]][0]))  # type: ignore[no-any-return]

        def has_moments(number: int) -> bool:
            return any((self.tensors[number].name, kind) in self.manifest.rows for kind in moments)

        said["scalars"] = kept_scalars(self.engine, find, has_moments)
        return over(self.present, said)

    def _groups(self, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """For each group here the hyper-parameters that its tensors had; CheckpointError if they had different ones."""
        found: list[dict[str, Any]] = [{} for _ in self.present["groups"]]
        first: dict[int, str] = {}
        for tensor in self.tensors:
            there = self.there[self.names[tensor.name]][1]
            if not tensor.trainable or not there.trainable:
                continue
            mine = found[tensor.group]
            if tensor.group in first and mine != groups[there.group]:
                raise CheckpointError(
                    f"{first[tensor.group]!r} and {tensor.name!r} are in one optimizer group here, and had different "
                    "hyper-parameters there: build the same groups"
                )
            first.setdefault(tensor.group, tensor.name)
            found[tensor.group] = groups[there.group]
        return found

    def rest(self, reader: Reader, layout: Layout, rank: int) -> dict[str, Any]:
        found = rest_for(self.saved, reader, self.saved.record.world, 0)
        for name, held in self.engine.host.module.named_buffers():
            if name in self.there and name not in self.names.values():
                found["buffers"][name] = self._buffer(reader, name, held.shape)
        return found

    def _buffer(self, reader: Reader, name: str, shape: torch.Size) -> torch.Tensor:
        """A buffer that is among the tensors: another tool did not tell them apart."""
        tensor = self.there[name][1]
        rows: tuple[Row, ...] = ()
        for kind in (MASTER, WEIGHT):
            rows = rows or self.saved.manifest.rows.get((name, kind), ())
        if tensor.shape != shape:
            raise CheckpointError(
                f"it has {name!r} {tensor.shape}, and this model's is {tuple(shape)}; build the model of the job that "
                "saved it"
            )
        if not tensor.numel:
            return torch.empty(shape)
        if len(rows) != 1 or not reader.is_sound(rows[0]):
            raise CheckpointDamaged(f"{self.path}: {name!r} is not what was saved; {WHERE_DAMAGED}")
        return reader.values(rows[0]).to(named(rows[0].dtype)).view(shape)

    def streams(self, layout: Layout, rank: int) -> streams.Streams:
        return streams.capture()
