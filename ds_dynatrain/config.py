"""The `dynatrain` block of a DeepSpeed configuration: its keys, their types and units, and the errors of a block.

Nothing is converted and nothing is ignored: a misspelled key, or a "2" instead of a 2, raises an error that names the
key. A planned value that is not implemented yet is recognized and refused by name, so that nobody relies on a setting
without effect.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    PlainValidator,
    Tag,
    ValidationError,
    ValidationInfo,
)

from ds_dynatrain.config_file import Config, read_config, type_name
from ds_dynatrain.errors import ConfigError
from ds_dynatrain.extension import BACKUP_KEY, BLOCKS, named

BLOCK = "dynatrain"

MONITORS = ("tensorboard", "wandb", "csv_monitor")
"""DeepSpeed's monitors to which switches can be written."""

MINIMUM_BUDGET_BYTES = 64 * 1024
"""The least memory that the transfer needs for staging."""


@dataclass(frozen=True)
class Said:
    """Notes on a value in the table of keys (`docs/configuration.md`), besides its type, limits and meaning.

    unit: the unit of the value.
    default: the source of the value, if it has no fixed default.
    kind: the accepted types, if the value may be given in a type that is converted.
    """

    unit: str = ""
    default: str = ""
    kind: str = ""


Size = Annotated[int, Field(ge=1)]
Steps = Annotated[Size, Said("optimizer steps")]
Stage = Annotated[int, Field(ge=0, le=3)]
File = Annotated[str, Field(min_length=1), Said("path")]


class Block(BaseModel):
    """Base class of the blocks: values are frozen, types are exact, and unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class LayoutConfig(Block):
    """The layout to start with. It may use only some of the processes; the others start idle."""

    data: Annotated[Size, Said("ranks")]
    """Ranks that share the batch; further processes start idle."""
    zero_stage: Annotated[Stage | None, Said(default="`zero_optimization.stage`")] = None
    """Stage of ZeRO; takes precedence over `zero_optimization.stage`."""
    pipe: Annotated[Size, Said("stages", "`num_stages` of the module, or 1")] = 1
    """Stages of a `PipelineModule`."""
    expert: Annotated[Size, Said("ranks", "`expert_parallel.autoep_size`, or 1")] = 1
    """Ranks that share each layer's experts; it divides data x sequence x tensor."""
    tensor: Annotated[Size, Said("ranks", "`tensor_parallel.autotp_size`, or 1")] = 1
    """Ranks that share each layer; a model without such an axis is refused."""
    sequence: Annotated[Size, Said("ranks", "`sequence_parallel_size`, or that of the `mpu`, or 1")] = 1
    """Ranks that share each sequence."""
    boundaries: Annotated[list[Annotated[int, Field(ge=0)]] | None, Said("layers")] = None
    """The first layer of each stage, and the number of layers; `None`: as `pipeline.partition` says, which may be
    "profile"."""
    shares: Annotated[list[Size] | None, Said("samples")] = None
    """Samples of a global batch that each data index takes; `None`: as equal as possible."""
    experts: Annotated[list[list[list[Annotated[int, Field(ge=0)]]]] | None, Said("experts")] = None
    """For each layer with experts, the experts of each [expert index](experts.md#which-rank-has-which-expert); `None`:
    in order."""


class DataConfig(Block):
    """How samples are assigned to ranks."""

    reshuffle: bool = False
    """Whether every epoch has a new order of the samples; `False`: one order for all epochs, as in plain DeepSpeed."""


class ResumeConfig(Block):
    """The checkpoint from which a job continues when it starts."""

    path: File
    """A folder of checkpoints that all members see; the job starts from scratch if the folder has none."""
    tag: Annotated[str, Field(min_length=1)] | None = None
    """Name of the checkpoint; `None`: the one named in the folder's file `latest`."""
    trust_pickle: bool = False
    """Whether to run code in DeepSpeed's pickled files if they hold more than tensors and plain values."""


class ReportConfig(Block):
    """Reports of switches in addition to the log."""

    jsonl: Annotated[str, Said("path")] | None = None
    """A file that receives one line of JSON for each switch, and in an exact job one for each step."""
    monitor: bool = False
    """Whether switches are also written to DeepSpeed's monitors; one of `tensorboard`, `wandb`, `csv_monitor` has to be
    enabled."""


def _exact_block(value: object) -> object:
    """Return a block of defaults for `true`, None for `false`, and any other value unchanged."""
    return {True: {}, False: None}[value] if isinstance(value, bool) else value


class ElasticConfig(Block):
    """A job whose members come and go."""

    wait_for_members_seconds: Annotated[float, Field(ge=0, allow_inf_nan=False), Said("seconds")] = 600.0
    """How long training waits with fewer than torchrun's MIN nodes, after saving a fallback checkpoint. After this time
    all processes end with code 87."""
    collective_seconds: Annotated[float, Field(gt=0, allow_inf_nan=False), Said("seconds")] = 600.0
    """The longest time in one collective; then members form a new world and repeat the batch. A second time within ten
    steps ends the job."""


NAME, TABLE = "<name>", "<table>"
BEST = "best"
"""The value of `layouts` that lets `balance` choose the layout."""
WorldSize = Annotated[str, Field(pattern=r"^[1-9][0-9]*$")]


def _made(value: object, info: ValidationInfo) -> object:
    """Return the block of an extension, made by the block's class. The module of the class is imported only now."""
    return None if value is None else named(BLOCKS[str(info.field_name)]).model_validate(value)


OfExtension = Annotated[Any, PlainValidator(_made)]
"""A block declared by an extension of the package, or None."""


def _name_or_table(value: object) -> str:
    return TABLE if isinstance(value, Mapping) else NAME


class DynatrainConfig(Block):
    """The whole `dynatrain` block. An empty block is valid and selects all defaults."""

    layout: LayoutConfig | None = None
    """The layout to start with; `None`: all processes, at the stage of `zero_optimization`."""
    safety: Literal["rollback", "lean"] = "rollback"
    """How a switch protects the state. "rollback": both states are kept in memory; "lean": a checkpoint in
    `fallback.path`."""
    exact: Annotated[
        Any, PlainValidator(_made), BeforeValidator(_exact_block), Said(default="false", kind="boolean or object")
    ] = None
    """Whether losses, gradient norms, weights and moments have the same bits in every world; true: an object with all
    defaults."""
    late: bool = False
    """Whether masters and moments move after the pause of a switch; `engine.switch(late=...)` overrides it for one
    switch."""
    memory_budget_bytes: Annotated[int, Field(ge=MINIMUM_BUDGET_BYTES), Said("bytes")] = 1 << 30
    """The most bytes that a member holds during a transfer in addition to its old and new state; 1 GiB by default."""
    replica_tolerance: Annotated[float, Field(ge=0, le=0.01)] = 1e-5
    """How far copies of a tensor on several ranks may differ, as a fraction of its largest value."""
    transport: Literal["auto", "ipc", "nccl", "gloo"] = "auto"
    """How bytes are sent in a switch."""
    timeout_seconds: Annotated[float, Field(gt=0, allow_inf_nan=False), Said("seconds")] = 60.0
    """How long one member waits for another in a switch. Collectives of training keep DeepSpeed's own limit of 30
    minutes."""
    data: DataConfig = DataConfig()
    report: ReportConfig = ReportConfig()
    fallback: OfExtension = None
    """Automatic checkpoints, saved between two steps; `None`: none are saved."""
    resume: ResumeConfig | None = None
    """The checkpoint from which the job continues when it starts; `None`: it starts from scratch."""
    layouts: Annotated[
        Annotated[str, Tag(NAME)] | Annotated[dict[WorldSize, LayoutConfig], Tag(TABLE)], Discriminator(_name_or_table)
    ] = "data"
    """The layout for n members of an elastic job: "data", "best", an object that maps n to a layout, or
    "module:function"."""
    owners: Literal["deepspeed", "nearest"] = "deepspeed"
    """Order of tensors in flat buffers of ZeRO stages 1 and 2 after a switch; "nearest": one that moves fewer bytes."""
    elastic: ElasticConfig = ElasticConfig()
    buddies: OfExtension = None
    """Copies in memory of state that only one rank holds, for elastic jobs; `None`: the same as an empty object."""
    balance: OfExtension = None
    """Timing of layers and members; layers move to save time if `mode` says so. `None`: nothing is timed."""
    clocks: OfExtension = None
    """Lower clocks for members that wait, by the times that `balance` measures; `None`: clocks stay as they are."""

    def in_launch(self, is_elastic: bool) -> DynatrainConfig:
        """Return the block with the defaults of this kind of launch. Called by `initialize`.

        In an elastic launch copies are on by default. Without copies, `buddies` is None in any launch.
        """
        block = named(BLOCKS["buddies"])() if is_elastic and self.buddies is None else self.buddies
        has_copies = block is not None and block.mode != "off" and (is_elastic or block.mode is not None)
        return self.model_copy(update={"buddies": block if has_copies else None})

    @property
    def raw_layouts(self) -> str | dict[str, dict[str, Any]]:
        """The value of `layouts`, with its blocks as dictionaries."""
        given = self.layouts
        return given if isinstance(given, str) else {size: block.model_dump() for size, block in given.items()}


def split_config(config: Config) -> tuple[dict[str, Any], DynatrainConfig | None]:
    """Return DeepSpeed's own part of a configuration, as a new dictionary, and the `dynatrain` block if there is one.

    If the block's layout names no ZeRO stage, it gets that of `zero_optimization`. If it names a different stage, the
    block takes precedence, and DeepSpeed's part is unchanged. Raises `ConfigError` for an unreadable file, an unknown
    key or a wrong value.
    """
    whole = read_config(config)
    own = {key: value for key, value in whole.items() if key != BLOCK}
    if BLOCK not in whole:
        return own, None
    block = _validated(whole[BLOCK])
    _check_together(block, own)
    if block.layout is None or block.layout.zero_stage is not None:
        return own, block
    layout = block.layout.model_copy(update={"zero_stage": _deepspeed_stage(own)})
    return own, block.model_copy(update={"layout": layout})


def _deepspeed_stage(config: Mapping[str, Any]) -> int:
    """Return the ZeRO stage given in DeepSpeed's own part of the configuration."""
    zero = config.get("zero_optimization", {})
    stage = zero.get("stage", 0) if isinstance(zero, Mapping) else None
    if isinstance(stage, bool) or stage not in (0, 1, 2, 3):
        raise ConfigError(
            f"{BLOCK}.layout.zero_stage: not given, and zero_optimization.stage is no stage to take instead "
            f"({zero!r}); give 0, 1, 2 or 3 in one of the two"
        )
    return int(stage)


def _validated(block: object) -> DynatrainConfig:
    """Return the validated block. Raises `ConfigError` about the first error in it."""
    if not isinstance(block, Mapping):
        raise ConfigError(
            f"{BLOCK}: expected an object of keys, got {block!r} ({type_name(block)}); write {{}} for the defaults"
        )
    if block.get("transport") == "ring":
        raise ConfigError(
            f'{BLOCK}.transport: "ring" is gone, because a switch was no faster by it than by gloo; use "gloo", which '
            'does not read the memory of other members either, or "auto", which does where the kernel permits it'
        )
    try:
        return DynatrainConfig.model_validate(dict(block))
    except ValidationError as error:
        errors = error.errors(include_url=False)  # a misspelt key explains a missing one
        first = next((each for each in errors if each["type"] == "extra_forbidden"), errors[0])
        path = tuple(part for part in first["loc"] if part not in (NAME, TABLE))
        where = ".".join([BLOCK, *map(str, path)])
        if first["type"] == "extra_forbidden":
            raise ConfigError(_unknown_key(where, _keys_at(path[:-1]))) from error
        if first["type"] == "missing":
            raise ConfigError(f"{where}: this key is needed and is not there; add it") from error
        expected = first["msg"].replace("Input should be ", "").removeprefix("a valid ")
        expected = "an object of keys" if first["type"].startswith("model") else expected
        value = first["input"]
        raise ConfigError(f"{where}: expected {expected}, got {value!r} ({type_name(value)})") from error


def _keys_at(path: tuple[int | str, ...]) -> list[str]:
    """Return the keys that are valid at a path inside the block."""
    model: type[BaseModel] = DynatrainConfig
    for key in path:
        if key in model.model_fields:  # otherwise it is a key in a table of blocks
            model = block_at(str(key), model.model_fields[str(key)].annotation) or model
    return list(model.model_fields)


def block_at(key: str, annotation: Any) -> type[BaseModel] | None:
    """Return the class of the blocks under a key; None if its values are not blocks.

    annotation: the type of the key's value, such as a block, a block or None, or a table of blocks.
    """
    if key in BLOCKS:
        return named(BLOCKS[key])  # type: ignore[no-any-return]
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for part in get_args(annotation) if (found := block_at(key, part))), None)


def _unknown_key(where: str, valid: list[str]) -> str:
    """Return the message for an unknown key, which suggests the key that was probably meant."""
    key = where.rpartition(".")[2]
    close = difflib.get_close_matches(key, valid, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"{where}: unknown key; {hint}valid here: {', '.join(valid)}"


def _check_together(block: DynatrainConfig, own: Mapping[str, Any]) -> None:
    """Raise `ConfigError` if two keys of `dynatrain` exclude each other, or one excludes a key of DeepSpeed."""
    monitors = [own.get(name) for name in MONITORS]
    if block.report.monitor and not any(isinstance(each, Mapping) and each.get("enabled") for each in monitors):
        raise ConfigError(
            f"{BLOCK}.report.monitor: switches go to DeepSpeed's monitors, and none of "
            f"{', '.join(f'{name}.enabled' for name in MONITORS)} is true; set one of them, or leave "
            f"{BLOCK}.report.monitor out"
        )
    pipeline, balance = own.get("pipeline"), block.balance
    method = str(pipeline.get("partition", "")).lower() if isinstance(pipeline, Mapping) else ""
    if method == "profile" and (balance is None or balance.profile is None):
        raise ConfigError(
            f'pipeline.partition "profile" cuts stages by a profile: name its file in {BLOCK}.balance.profile '
            '("mode": "off" beside it measures nothing), or give "parameters" until `engine.balancer.profile.save` has '
            "written one"
        )
    if block.safety == "lean" and block.fallback is None:
        raise ConfigError(f'{BLOCK}.safety: "lean" switches through a checkpoint: name a folder for it in {BACKUP_KEY}')
    if block.layouts == BEST and (balance is None or not (balance.profile or balance.measures)):
        raise ConfigError(
            f'{BLOCK}.layouts: "{BEST}" chooses from a profile of the model: name its file in {BLOCK}.balance.profile'
        )
