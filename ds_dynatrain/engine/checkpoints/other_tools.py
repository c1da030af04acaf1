"""Checkpoints of other tools as sources of state: those converted to our format, and DeepSpeed's own in any layout.

They hold less than our checkpoints. As with DeepSpeed's own load, random streams, the positions of loaders and the
user's objects stay unchanged.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ds_dynatrain.adapters.model.pipeline_layers import PipelineTemplate
from ds_dynatrain.adapters.zero.loss_scale import taken_from
from ds_dynatrain.adapters.zero.optimizers import rule_of
from ds_dynatrain.checkpoint.extents import WORD, name_of, named
from ds_dynatrain.checkpoint.files import WHERE_DAMAGED, naming
from ds_dynatrain.checkpoint.manifest import Manifest
from ds_dynatrain.checkpoint.others.foreign import number_of
from ds_dynatrain.checkpoint.others.torch_files import check_crcs, value_of, with_values
from ds_dynatrain.checkpoint.others.zero_files import ZeroFolder, carry_of, is_zero_folder
from ds_dynatrain.checkpoint.others.zero_folder import frozen_left_out, rows_of, scalars_of, then
from ds_dynatrain.checkpoint.record import RECORD, Saved
from ds_dynatrain.engine.checkpoints.extra_state import rest_for
from ds_dynatrain.engine.checkpoints.sources import CheckpointPart, FromCheckpoint, Gather, Key, Universal
from ds_dynatrain.errors import CheckpointDamaged, CheckpointError
from ds_dynatrain.report import logger
from ds_dynatrain.reshard import streams
from ds_dynatrain.reshard.core import EngineCore
from ds_dynatrain.reshard.restoration import Goal
from ds_dynatrain.space import MASTER, WEIGHT, row_of

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
"""Keys of the saved model states that do not belong to the client state: DeepSpeed's own keys, and parts of frozen
tensors."""


class Converted(Universal):
    """A checkpoint of another tool that was converted to our format.

    Its tensors must match those of this model by name and shape. Optimizer groups and the choice of frozen tensors stay
    as they are in this training run, and each group takes the hyper-parameters that its tensors have in the checkpoint.
    If the checkpoint has only weights, the optimizer starts from its initial state.

    there: a map from a tensor's name in the checkpoint to (number, tensor) in the checkpoint.
    parameters: a map from each name of a parameter of this model to the parameter.
    names: a map from a tensor's name in this model to its name in the checkpoint, which may be another name of a tied
        parameter.
    """

    def __init__(
        self, saved: Saved, engine: EngineCore, goal: Goal, present: dict[str, Any], part: CheckpointPart
    ) -> None:
        super().__init__(saved, engine, goal, present, part)
        self.there = {each.name: (number, each) for number, each in enumerate(self.tensors)}
        self.parameters = dict(engine.host.module.named_parameters(remove_duplicate=False))
        self.names = dict[str, str]()
        for tensor in engine.vps.tensors:
            mine = self.parameters.get(tensor.name)
            ties = (name for name, held in self.parameters.items() if held is mine and name in self.there)
            self.names[tensor.name] = tensor.name if tensor.name in self.there else next(ties, tensor.name)
        self._check_tensors()
        self.tensors = engine.vps.tensors
        there = saved.manifest.rows
        renamed = {
            (here, kind): tuple(replace(row, tensor=here) for row in there[name, kind])
            for here, name in self.names.items()
            for kind in self.kinds
            if here != name and (name, kind) in there
        }
        self.manifest = self.reader.manifest = Manifest({**there, **renamed})

    def _check_tensors(self) -> None:
        """Raise CheckpointError, naming the tensors, if the tensors of the model and of the checkpoint do not match."""
        others = {*self.names.values(), *(name for name, _ in self.engine.host.module.named_buffers())}
        wrong = list[str]()
        for tensor in self.engine.vps.tensors:
            _, held = self.there.get(self.names[tensor.name], (0, None))
            if held is None:
                wrong.append(f"this model has {tensor.name!r} {tensor.shape}, which is not in it")
            elif held.shape != tensor.shape:
                wrong.append(f"it has {tensor.name!r} {held.shape}, and this model's is {tensor.shape}")
            elif tensor.trainable and tensor.numel and (held.name, MASTER) not in self.saved.manifest.rows:
                wrong.append(f"this model trains {tensor.name!r}, which has no master there: it was frozen")
        for name, (_, held) in self.there.items():
            if name not in others and not self._is_copy(name):
                wrong.append(f"it has {name!r} {held.shape}, and this model has no such parameter")
        if wrong:
            more = f"; and {len(wrong) - 3} more" if len(wrong) > 3 else ""
            raise CheckpointError(f"{'; '.join(wrong[:3])}{more}; build the model of the job that saved it")

    def _is_copy(self, name: str) -> bool:
        """Return whether a tensor of the checkpoint is a repetition of a tied parameter, which the checkpoint also has
        under another name."""
        kind = MASTER if (name, MASTER) in self.saved.manifest.rows else WEIGHT
        return name in self.parameters and any(
            self.parameters.get(other) is self.parameters[name]
            and self._digest(there, kind) == self._digest(name, kind)
            for other, there in self.names.items()
        )

    def _digest(self, name: str, kind: str) -> int | None:
        manifest = self.saved.manifest
        return manifest.digest(name, kind) if (name, kind) in manifest.rows else None

    def _shared(self) -> dict[str, Any]:
        """Return the extra state that is equal on all ranks: the current one, updated from the checkpoint."""
        said = self.carry
        if "groups" in said:
            said = {**said, "groups": self._groups(said["groups"])}
        keys = {number: str(self.there[self.names[each.name]][0]) for number, each in enumerate(self.tensors)}
        there = {
            name: {number: table[key] for number, key in keys.items() if key in table}
            for name, table in said.get("scalars", {}).items()
        }
        return updated(self.present, {**said, "scalars": kept_scalars(self, there)})

    def _groups(self, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the hyper-parameters of each optimizer group of this training run: those that the group's tensors have
        in the checkpoint.

        groups: the hyper-parameters of the checkpoint's groups.

        Raises CheckpointError if the tensors of one group have different hyper-parameters in the checkpoint.
        """
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

    def rest(self, rank: int) -> dict[str, Any]:
        found = rest_for(self.saved, self.reader, self.saved.record.world, 0)
        for name, held in self.engine.host.module.named_buffers():
            if name in self.there and name not in self.names.values():
                found["buffers"][name] = self._buffer(name, held.shape)
        return found

    def _buffer(self, name: str, shape: torch.Size) -> torch.Tensor:
        """Return the value of a module's buffer. Other tools store buffers among the tensors."""
        tensor = self.there[name][1]
        held = self.saved.manifest.rows
        rows = held.get((name, MASTER)) or held.get((name, WEIGHT), ())
        if tensor.shape != shape:
            raise CheckpointError(
                f"it has {name!r} {tensor.shape}, and this model's is {tuple(shape)}; build the model of the job that "
                "saved it"
            )
        if not tensor.numel:
            return torch.empty(shape)
        if len(rows) != 1 or not self.reader.is_sound(rows[0]):
            raise CheckpointDamaged(f"{self.path}: {name!r} is not what was saved; {WHERE_DAMAGED}")
        return self.reader.values(rows[0]).to(named(rows[0].dtype)).view(shape)

    def streams(self, rank: int) -> streams.Streams:
        return streams.capture()


class Stock(FromCheckpoint):
    """A checkpoint that DeepSpeed itself has saved.

    space: the parameter space in the layout in which the checkpoint was saved.
    """

    def __init__(
        self, folder: ZeroFolder, engine: EngineCore, goal: Goal, present: dict[str, Any], part: CheckpointPart
    ) -> None:
        self.folder, self.space = folder, then(folder, engine.vps)
        manifest = Manifest.of(rows_of(folder, self.space, engine.host.element_types.weight))
        super().__init__(folder.path, manifest, engine, goal, present, part)
        self.tensors = engine.vps.tensors
        held = {kind for _, kind in self.manifest.rows}
        self.kinds = list(self.space.present_kinds(among=held))
        self.kept = frozen_left_out(self.space, self.manifest)

    @property
    def client_state(self) -> dict[str, Any]:
        """The dictionary that the user has passed to `save_checkpoint`, as far as it can be read. Small tensors are
        converted to plain values."""
        said = {key: value for key, value in self.folder.model(0).items() if key not in NO_CLIENT_STATE}
        found: dict[str, Any] = with_values(self.path, said)
        return found

    def _shared(self) -> dict[str, Any]:
        said, here = self.folder.model(0), len(self.present["groups"])
        carry = carry_of(self.path, said, self.folder.optimizer(0, 0))
        there = len(carry.get("groups", self.present["groups"]))
        if there != here:
            raise CheckpointError(
                f"{self.path} has {there} optimizer groups, and this job has {here}; "
                "build the optimizer with the groups of the job that saved it"
            )
        if said.get("data_sampler") is not None:
            logger.warning("%s: the position in the data is not taken over; loaders go on where they are", self.path)
        with naming(self.path):
            scalars = scalars_of(self.folder, self.space)
        return updated(self.present, {**carry, "scalars": kept_scalars(self, scalars)})

    def rest(self, rank: int) -> dict[str, Any]:
        wanted = {name for name, _ in self.engine.host.module.named_buffers()}
        held = {name: each for part in range(self.folder.parts) for name, each in self.folder.weights(part).items()}
        buffers = {name: value_of(self.path, each) for name, each in held.items() if name in wanted}
        return {"grad_norm": None, "buffers": buffers, "objects": {}}

    def _digests(self, rank: int, gather: Gather) -> dict[Key, int]:
        weight, places = self.engine.host.element_types.weight, len(self.goal.members)
        check_crcs(self.path, self.folder.archives, rank, places)
        rows = sorted((row for row in self.manifest if row.file), key=lambda row: (row.file, row.offset))
        mine, found = Counter[Key](), Counter[Key]()
        for row in rows[rank::places]:
            share = {row.kind: self.reader.digest(row)}
            if row.kind == MASTER:
                share[WEIGHT] = share[MASTER] if row.dtype == name_of(weight) else self.reader.digest(row, weight)
            for kind, total in share.items():
                mine[row.tensor, kind] += total
        for record in gather("there", [[*key, f"{total:x}"] for key, total in mine.items()]).values():
            for tensor, kind, total in record:
                found[tensor, kind] = (found[tensor, kind] + int(total, 16)) & WORD
        return found


@contextmanager
def opened(
    engine: EngineCore, goal: Goal, path: Path, present: dict[str, Any] | None, part: CheckpointPart
) -> Iterator[FromCheckpoint]:
    """Context manager that opens the checkpoint in a folder. Errors name the folder; see `FromCheckpoint`.

    present: the current extra state that is equal on all ranks, which another tool's checkpoint updates; None if there
        is none.

    Raises CheckpointError for a folder without a checkpoint, and for another tool's checkpoint if `present` is None.
    """
    with naming(path), _source(engine, goal, path, present, part) as source:
        yield source


def _source(
    engine: EngineCore, goal: Goal, path: Path, present: dict[str, Any] | None, part: CheckpointPart
) -> FromCheckpoint:
    if (path / RECORD).is_file() or present is None or not is_zero_folder(path):
        saved = Saved.open(path)
        if not saved.record.converted_from:
            return Universal(saved, engine, goal, present, part)
        if present is None:
            raise CheckpointError(
                f"{path} was converted from {saved.record.converted_from}, which is not all of a training; load it "
                "with engine.load in a training that has begun"
            )
        return Converted(saved, engine, goal, present, part)
    template = getattr(engine.host.shaper, "template", None)
    prefixes = template.prefixes() if isinstance(template, PipelineTemplate) else ()
    held = ZeroFolder.open(path, part.trust_pickle, prefixes)
    check_batch(engine, held)
    return Stock(held, engine, goal, present, part)


def check_batch(engine: EngineCore, held: ZeroFolder) -> None:
    """Raise CheckpointError if a checkpoint of DeepSpeed's was saved with another global batch size than this job has.

    DeepSpeed's own load does not notice the difference if the batch size is derived from the micro-batch and the number
    of ranks.
    """
    there, here = held.global_batches(), int(engine.job.batch_sizes.train_batch_size)
    if there and here not in there:
        raise CheckpointError(
            f"{held.path}: the global batch is {there[-1]} samples there and {here} here, so steps, rates and the "
            f'order of samples would be others; give "train_batch_size": {there[-1]}'
        )


def updated(present: Mapping[str, Any], said: Mapping[str, Any]) -> dict[str, Any]:
    """Return the extra state that is equal on all ranks: `present`, updated with the values in another tool's
    checkpoint.

    said: the extra state of the checkpoint, with the keys of `checkpoint.others.foreign`. Groups and scalars are
        numbered as in this job.
    """
    taken = {key: said[key] for key in ("windows", "scalars") if key in said}
    taken["counters"] = {**present["counters"], **said.get("counters", {})}
    if "groups" in said:
        taken["groups"] = [
            {name: there.get(name, value) for name, value in here.items()}
            for here, there in zip(present["groups"], said["groups"], strict=True)
        ]
    if "scaler" in said:
        taken["scaling"] = taken_from(present["scaling"], said["scaler"])
    for key in ("scheduler", "random-LTD"):
        if present[key] is not None and said.get(key) is not None:
            taken[key] = said[key]
    return {**present, **taken}


def kept_scalars(source: FromCheckpoint, there: Mapping[str, Mapping[int, Any]]) -> dict[str, dict[str, float]]:
    """Return those scalars of a checkpoint (such as step counts) that the current optimizer keeps: for each name of a
    scalar, a map from tensor number to value.

    there: the scalars in the checkpoint, in the same form.

    Raises CheckpointError if a tensor with moments lacks a scalar.
    """
    engine, found = source.engine, dict[str, dict[str, float]]()
    basic, moments = engine.host.basic_optimizer, {kind for kind in source.kinds if row_of(kind).is_moment}
    for number, tensor in enumerate(engine.vps.tensors):
        if not tensor.trainable or not tensor.numel:
            continue
        for name in rule_of(basic).scalars_of(basic.param_groups[tensor.group]):
            value = there.get(name, {}).get(number)
            if value is not None:
                found.setdefault(name, {})[str(number)] = number_of(source.path, value)
            elif any((tensor.name, kind) in source.manifest.rows for kind in moments):
                raise CheckpointError(
                    f"its optimizer has no {name!r} of {tensor.name!r}; use the optimizer of the job that saved it"
                )
    return found
