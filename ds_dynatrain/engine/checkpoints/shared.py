"""The shared carry of a checkpoint: decoded, and of the types that whoever takes it over relies on."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ds_dynatrain.checkpoint import Saved
from ds_dynatrain.checkpoint.record import RECORD
from ds_dynatrain.engine.encoding import decode
from ds_dynatrain.errors import CheckpointDamaged, TransferError

Number = Annotated[str, Field(pattern=r"^(0|[1-9][0-9]{0,18})$")]
Count = Annotated[int, Field(ge=0, lt=1 << 63)]


class _Group(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")
    origin: Count
    fresh: bool
    names: list[str]
    values: dict[str, Any]


class _Registration(BaseModel):
    """A `Regrouping` in JSON."""

    model_config = ConfigDict(strict=True, extra="forbid")
    groups: list[_Group]
    requires_grad: list[str]


class _Types(BaseModel):
    """What is in it, as far as it is there; anything else is the training's matter that saved it."""

    model_config = ConfigDict(strict=True, extra="allow")
    groups: list[dict[str, Any]] = []
    scalars: dict[str, dict[Number, float]] = {}
    counters: dict[str, Count] = {}
    windows: Count = 0
    registration: _Registration | None = None


def shared_of(saved: Saved) -> dict[str, Any]:
    """The shared carry; CheckpointDamaged for one that no training can have had."""
    tensors = saved.record.logical_tensors()
    try:
        found: dict[str, Any] = decode(saved.record.carry, [])
        said = _Types.model_validate(found)
    except TransferError as error:
        raise CheckpointDamaged(f"{RECORD}: carry: {error}") from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise CheckpointDamaged(f"{RECORD}: carry.{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    numbers = [int(number) for table in said.scalars.values() for number in table]
    if max(numbers, default=-1) >= len(tensors):
        raise CheckpointDamaged(f"{RECORD}: carry.scalars: of tensor {max(numbers)}, and there are {len(tensors)}")
    listed = [name for group in said.registration.groups for name in group.names] if said.registration else []
    if len(set(listed)) != len(listed) or not {each.name for each in tensors}.issuperset(listed):
        raise CheckpointDamaged(f"{RECORD}: carry.registration: a tensor is in two groups, or in none of the model's")
    groups = 1 + max((each.group for each in tensors), default=-1)
    if "groups" in found and len(said.groups) < groups:
        raise CheckpointDamaged(f"{RECORD}: carry.groups: {len(said.groups)} groups, and tensors are of {groups}")
    return found
