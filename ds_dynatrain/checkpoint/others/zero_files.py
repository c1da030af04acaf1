"""Checkpoint folders of DeepSpeed's `save_checkpoint`: which file contains which buffer of which rank.

DeepSpeed 0.14 to 0.19 write these folders in ZeRO stages 0 to 3. A folder has one file of model states per
model-parallel rank (in stage 3 one per rank) and, in stages 1 to 3, one file of optimizer states per rank:

| stage | masters | moments | frozen weights |
|---|---|---|---|
| 0 | `module` (fp32), `optimizer.fp32_groups`, `optimizer.fp32_groups_flat` | by tensor, or flat | `module` |
| 1, 2 | `single_partition_of_fp32_groups`, without padding at the end | flat, like the masters | `module` |
| 3 | `fp32_flat_groups`, one for each sub-group | flat, like the masters | `frozen_param_fragments` |
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from ds_dynatrain.checkpoint.files import WHERE_DAMAGED
from ds_dynatrain.checkpoint.others.foreign import hyper_parameters
from ds_dynatrain.checkpoint.others.torch_files import Archive, Opaque, Stored, fields_of, read_tree, with_values
from ds_dynatrain.errors import CheckpointDamaged, CheckpointError
from ds_dynatrain.space import IN_EMPTY_GROUP

_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_OPTIMIZER = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_LAYER = re.compile(r"layer_(\d+)(?:-model_00)?-model_states\.pt")
FORMS = (
    (3, "fp32_flat_groups", "optimizer_state_dict"),
    (1, "single_partition_of_fp32_groups", "base_optimizer_state"),
    (0, "fp32_groups_flat", "optimizer_state_dict"),
    (0, "fp32_groups", "optimizer_state_dict"),
)
"""The kinds of optimizer states: the stage, the key of the masters, and the key of the basic optimizer's state."""
COUNTERS = ("global_steps", "global_samples", "skipped_steps")
Shape = tuple[int, ...]
MOST_RANKS = 1 << 16
"""Maximum accepted size of an axis. A damaged folder may claim an absurd number of ranks."""
_EXPERT = re.compile(r".*expert_\d+_mp_rank_\d+_model_states\.pt|expp_rank_\d+_mp_rank_\d+_optim_states\.pt")


def is_zero_folder(path: Path) -> bool:
    """Return whether a folder looks like a checkpoint of DeepSpeed's `save_checkpoint`."""
    return path.is_dir() and any(_MODEL.fullmatch(each.name) for each in path.iterdir())


@dataclass(frozen=True, eq=False)
class OptimizerFile:
    """The optimizer state of one rank.

    stage: the kind of file: 0 without ZeRO, 1 for stages 1 and 2, 3 for stage 3.
    masters: the masters' buffers in order, flat or one per tensor.
    states: for each buffer, its moments (`Stored` with at least one dim) and scalars, keyed by name.
    groups: the hyper-parameters of each optimizer group.
    raw: the optimizer's `state_dict` as stored in the file.
    """

    stage: int
    masters: list[Stored]
    states: list[Mapping[str, Any]]
    groups: list[Mapping[str, Any]]
    raw: Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class ZeroFolder:
    """One checkpoint folder of DeepSpeed.

    path: the folder.
    trust_pickle: whether to unpickle content that is neither tensors nor plain values.
    models: names of the files with model states, keyed by (model-parallel rank, data rank).
    optimizers: names of the files with optimizer states, keyed by (model-parallel rank, data rank).
    layers: names of the files with pipeline layers, keyed by layer number.
    prefixes: the name prefix of each layer's parameters. A layer without an entry has its number as prefix.
    """

    path: Path
    trust_pickle: bool
    models: Mapping[tuple[int, int], str]
    optimizers: Mapping[tuple[int, int], str]
    layers: Mapping[int, str]
    prefixes: tuple[str, ...] = ()
    _trees: dict[str, Mapping[str, Any]] = field(default_factory=dict, repr=False)

    @staticmethod
    def open(path: Path, trust_pickle: bool = False, prefixes: tuple[str, ...] = ()) -> ZeroFolder:
        """Find the files of a checkpoint by their names.

        Raises CheckpointError if the folder is not a checkpoint or has files of experts, and CheckpointDamaged if files
        of optimizer states are missing.
        """
        experts = _matches(path, _EXPERT)
        if experts:
            raise CheckpointError(
                f"{path} has experts in files of their own ({experts[-1][0]}), which are not read here: load it with "
                "DeepSpeed in the layout that wrote it, and save it with engine.save"
            )
        models, optimizers = (
            {(int(found[2]), int(found[1] or 0)): found[0] for found in _matches(path, pattern)}
            for pattern in (_MODEL, _OPTIMIZER)
        )
        if not models:
            raise CheckpointError(
                f"{path} is no checkpoint of ds_dynatrain, nor one of DeepSpeed's: it has no *_model_states.pt; give "
                "the folder of a tag"
            )
        layers = {int(found[1]): found[0] for found in _matches(path, _LAYER)}
        numbers = [*layers, *(number for place in (*models, *optimizers) for number in place)]
        if max(numbers) >= MOST_RANKS:
            raise CheckpointDamaged(
                f"{path} has a file of rank or layer {max(numbers)}, and at most {MOST_RANKS} are read"
            )
        folder = ZeroFolder(path, trust_pickle, models, optimizers, layers, prefixes)
        for part, rank in itertools.product(range(folder.parts), range(folder.ranks if optimizers else 0)):
            if (part, rank) not in optimizers:
                raise CheckpointDamaged(
                    f"{path}: the optimizer states of data rank {rank} and model-parallel rank {part} are not there"
                )
        return folder

    def check_ranks(self) -> None:
        """Raise CheckpointDamaged if the files come from fewer or more data ranks than the checkpoint says."""
        said = int(self.model(0)["dp_world_size"])
        if self.ranks != said:
            raise CheckpointDamaged(
                f"{self.path} was saved by {said} data ranks, and has files of {self.ranks}; {WHERE_DAMAGED}"
            )

    def alone(self, part: int) -> ZeroFolder:
        """Return the files of one model-parallel rank as a separate checkpoint.

        part: the model-parallel rank.

        Raises CheckpointDamaged if that rank has no model states.
        """
        self.model(part)
        models, optimizers = (
            {(0, rank): name for (of, rank), name in files.items() if of == part}
            for files in (self.models, self.optimizers)
        )
        return replace(self, models=models, optimizers=optimizers)

    @property
    def parts(self) -> int:
        """Number of model-parallel ranks: tensor ranks, or pipeline stages."""
        return 1 + max(part for part, _ in self.models)

    @cached_property
    def ranks(self) -> int:
        """Number of ranks over which ZeRO partitions the state: data ranks x sequence ranks."""
        if self.optimizers:
            return 1 + max(rank for _, rank in self.optimizers)
        said = int(self.model(0)["dp_world_size"])
        if not 0 < said <= MOST_RANKS:
            raise CheckpointDamaged(f"{self.path} says that {said} data ranks saved it")
        return said

    @cached_property
    def stage(self) -> int:
        """The ZeRO stage of the job; 0 without optimizer files, and 1 if these name no stage (BF16_Optimizer)."""
        if not self.optimizers:
            return 0
        said = self.optimizer(0, 0).raw.get("zero_stage")
        if said is None:
            return 1
        return int(said.args[0]) if isinstance(said, Opaque) else int(getattr(said, "value", said))

    @property
    def config(self) -> Mapping[str, Any]:
        """The DeepSpeed configuration of the job that saved the checkpoint; {} if it is not stored."""
        name = self.optimizers.get((0, 0))
        held = (self.tree(name) if name else self.model(0)).get("ds_config")
        return held if isinstance(held, Mapping) else {}

    @property
    def buffer_names(self) -> Sequence[str]:
        """Names of the module's buffers."""
        return self.model(0).get("buffer_names") or ()

    def model(self, part: int, rank: int = 0) -> Mapping[str, Any]:
        """Return the model states of a model-parallel rank (`part`) and, in stage 3, of a data rank.

        Raises CheckpointDamaged if there is no such file.
        """
        name = self.models.get((part, rank), self.models.get((part, 0)))
        if name is None:
            raise CheckpointDamaged(
                f"{self.path}: the model states of model-parallel rank {part} are not there; {WHERE_DAMAGED}"
            )
        return self.tree(name)

    def optimizer(self, part: int, rank: int) -> OptimizerFile:
        """Return the optimizer states of a model-parallel rank (`part`) and a data rank.

        Raises CheckpointError if the checkpoint has no optimizer states, and CheckpointDamaged if their structure is
        unknown.
        """
        if self.optimizers:
            name = self.optimizers[part, rank]
            raw = self.tree(name).get("optimizer_state_dict")
        else:
            name, raw = self.models[part, 0], self.model(part).get("optimizer")
        if not isinstance(raw, Mapping):
            raise CheckpointError(
                f"{self.path / name} has no optimizer states; load its weights alone: "
                "engine.load_checkpoint(..., load_module_only=True)"
            )
        try:
            return self._without_empty(_optimizer_file(raw, bool(self.optimizers)), part)
        except (KeyError, TypeError, IndexError, AttributeError, ValueError) as error:
            raise CheckpointDamaged(f"{name}: unknown optimizer states ({type(error).__name__}: {error})") from None

    def shapes(self, part: int) -> list[dict[str, Shape]] | None:
        """Return, for each group, a map from the name to the shape of each tensor that a model-parallel rank trained.

        In stage 3, tensors are listed by sub-group. Returns None if the checkpoint does not list them.
        """
        said = self.model(part).get("param_shapes")
        if said is None:
            return None
        return [
            {name: tuple(shape) for name, shape in table.items() if not name.startswith(IN_EMPTY_GROUP)}
            for table in said
        ]

    def _without_empty(self, file: OptimizerFile, part: int) -> OptimizerFile:
        """Drop the buffers of groups without a tensor on this rank. In stages 1 and 2 each group has a buffer."""
        shapes = self.shapes(part)
        if not file.stage or file.stage == 3 or shapes is None or len(shapes) != len(file.masters):
            return file
        kept = [bool(table) for table in shapes]
        states = list(itertools.compress(file.states, kept)) if len(file.states) == len(kept) else file.states
        return replace(file, masters=list(itertools.compress(file.masters, kept)), states=states)

    def weights(self, part: int) -> dict[str, Stored]:
        """Return a model-parallel rank's weights and module buffers that are stored whole, keyed by name."""
        module = self.model(part).get("module")
        found = _stored_in(module if isinstance(module, Mapping) else {})
        for number, name in self.layers.items():
            prefix = self.prefixes[number] if number < len(self.prefixes) else str(number)
            found.update({f"{prefix}.{each}": held for each, held in _stored_in(self.tree(name)).items()})
        return found

    @property
    def archives(self) -> tuple[Archive, ...]:
        """Every file of the checkpoint, as zip files whose CRC32s cover all values."""
        names = {*self.models.values(), *self.optimizers.values(), *self.layers.values()}
        return tuple((name, None) for name in sorted(names))

    def global_batches(self) -> range:
        """Return the possible sizes of the global batch, in samples. The range is empty if they are unknown.

        If the number of samples is a multiple of the number of steps, the quotient is the size. Otherwise the range
        ends with the configured size, which may have been rounded up for ranks with unequal shares.
        """
        said = self.model(0)
        steps, samples = int(said.get("global_steps", 0)), int(said.get("global_samples", 0))
        if steps and samples and samples % steps == 0:
            return range(samples // steps, samples // steps + 1)
        size = self.config.get("train_batch_size")
        if not isinstance(size, int):
            return range(0)
        return range(min(size, samples // steps) if steps else size, size + 1)

    def tree(self, name: str) -> Mapping[str, Any]:
        """Return the content of a file, with a `Stored` instead of each tensor. Each file is read only once."""
        if name not in self._trees:
            tree = read_tree(self.path, name, self.trust_pickle)
            if not isinstance(tree, Mapping):
                raise CheckpointDamaged(
                    f"{self.path / name} is no file of a checkpoint of DeepSpeed's; {WHERE_DAMAGED}"
                )
            self._trees[name] = tree
        return self._trees[name]


def _stored_in(tree: Mapping[str, Any]) -> dict[str, Stored]:
    return {name: held for name, held in tree.items() if isinstance(held, Stored)}


def _matches(path: Path, pattern: re.Pattern[str]) -> list[re.Match[str]]:
    """Return the matches of a pattern among the file names in a folder, in descending order of the names.

    Names without a data rank thus come after names with one.
    """
    names = sorted((each.name for each in path.iterdir()), reverse=True) if path.is_dir() else ()
    return [found for found in map(pattern.fullmatch, names) if found is not None]


def _optimizer_file(raw: Mapping[str, Any], has_files: bool) -> OptimizerFile:
    """Interpret the `state_dict` of any of DeepSpeed's optimizers or, in stage 0 with fp32, of the basic optimizer.

    has_files: whether the checkpoint has optimizer files.

    Raises KeyError if the structure is unknown.
    """
    stage, key, below = next((form for form in FORMS if form[1] in raw), (0, "masters", None))
    if has_files and not stage:
        raise KeyError(FORMS[1][1])
    base, masters = raw[below] if below else raw, list(raw.get(key, ()))
    if isinstance(base, list):  # elastic_checkpoint: no hyper-parameters
        step = {"step": raw["base_optimizer_state_step"]} if "base_optimizer_state_step" in raw else {}
        return OptimizerFile(stage, masters, [{**step, **each} for each in base], [], raw)
    if key == "fp32_groups":
        masters = [held for group in masters for held in group]
    groups, table = list(base["param_groups"]), base["state"]
    states = [table.get(number, {}) for group in groups for number in group["params"]]
    if not masters and not stage:  # the basic optimizer steps the parameters themselves, except frozen ones
        states = [each for each in states if each]
    return OptimizerFile(stage, masters, states, groups, raw)


def carry_of(path: Path, said: Mapping[str, Any], file: OptimizerFile) -> dict[str, Any]:
    """Return the extra state outside tensors (the carry, see `foreign`) that DeepSpeed's files contain.

    path: the folder from which small tensors are read.
    said: the model states.
    file: the optimizer states.
    """
    scaler = {**file.raw, **fields_of(file.raw.get("loss_scaler"))}
    found: dict[str, Any] = {
        "counters": {name: int(said.get(name, 0)) for name in COUNTERS},
        "windows": int(said.get("global_steps", 0)),
        "scaler": {name: each for name, each in scaler.items() if isinstance(each, bool | int | float)},
    }
    if file.groups:
        found["groups"] = [hyper_parameters(group) for group in with_values(path, file.groups)]
    for key, name in (("lr_scheduler", "scheduler"), ("random_ltd", "random-LTD")):
        if said.get(key) is not None:
            found[name] = with_values(path, said[key])
    return found


def frozen_shapes(said: Mapping[str, Any], weights: Mapping[str, Stored], trained: Iterable[str]) -> dict[str, Shape]:
    """Return a map from the name of each frozen tensor to its shape.

    said: the model states.
    weights: the weights and module buffers in the files.
    trained: the names of the trained tensors.

    If the model states do not list frozen tensors, these are the weights that are neither trained nor buffers nor
    shared.
    """
    if said.get("frozen_param_shapes") is not None:
        return {name: tuple(shape) for name, shape in said["frozen_param_shapes"].items()}
    others = {*trained, *(said.get("buffer_names") or ()), *(said.get("shared_params") or ())}
    return {name: held.shape for name, held in weights.items() if name not in others}


def configured_type(config: object) -> torch.dtype:
    """Return the element type of the weights in DeepSpeed's configuration: bfloat16, float16 or float32."""
    for name, dtype in (("bf16", torch.bfloat16), ("bfloat16", torch.bfloat16), ("fp16", torch.float16)):
        if isinstance(config, Mapping) and (config.get(name) or {}).get("enabled"):
            return dtype
    return torch.float32


def groups_of(path: Path, groups: Sequence[Mapping[str, Any]], count: int) -> list[int]:
    """Return, for each of `count` tables of parameter names, the number of the optimizer group to which it belongs.

    path: the checkpoint's folder, for messages.
    groups: the hyper-parameters of each group.

    Raises CheckpointError if the numbers of tables and groups do not match.
    """
    found = [number for number, group in enumerate(groups) for _ in group["params"]]
    if len(found) != count:  # one per group, or no hyper-parameters (elastic_checkpoint)
        found = list(range(len(groups) or count))
    if len(found) != count:
        raise CheckpointError(
            f"{path}: {len(found)} groups of the optimizer, and names of {count}; load it into an engine with "
            "load_checkpoint, and save it with engine.save"
        )
    return found
