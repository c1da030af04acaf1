"""The `dynatrain` block of a DeepSpeed configuration: its keys, their types and units, and what is wrong with a block.

Nothing is converted and nothing is ignored: a misspelled key or a "2" for a 2 is an error that names the key. A value
that is not there yet is known here and refused by name, so that nobody relies on a setting that does nothing.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, ValidationError

from ds_dynatrain.config_file import Config, read_config, type_name
from ds_dynatrain.errors import ConfigError

BLOCK = "dynatrain"

MONITORS = ("tensorboard", "wandb", "csv_monitor")
"""DeepSpeed's, that switches can be written to."""

MINIMUM_BUDGET_BYTES = 64 * 1024
"""What the transfer needs at the least for staging."""


@dataclass(frozen=True)
class Said:
    """What the table of the keys (`docs/configuration.md`) says of a value besides its type, limits and meaning.

    default: where the value follows from elsewhere. kind: where a value may be given that becomes another one.
    """

    unit: str = ""
    default: str = ""
    kind: str = ""


Size = Annotated[int, Field(ge=1)]
Steps = Annotated[Size, Said("optimizer steps")]
Stage = Annotated[int, Field(ge=0, le=3)]
File = Annotated[str, Field(min_length=1), Said("path")]


class _Block(BaseModel):
    """Base of the blocks: values are frozen, types are exact, unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class LayoutConfig(_Block):
    """The layout to start with; it may use a part of the processes, and the others start idle."""

    data: Annotated[Size, Said("ranks")]
    """Ranks that share the batch; processes beyond them start idle."""
    zero_stage: Annotated[Stage | None, Said(default="`zero_optimization.stage`")] = None
    """Wins over `zero_optimization.stage` where both are given."""
    pipe: Annotated[Size, Said("stages", "`num_stages` of the module, or 1")] = 1
    """Stages of a `PipelineModule`."""
    expert: Annotated[Size, Said("ranks", "`expert_parallel.autoep_size`, or 1")] = 1
    """Ranks that share each layer's experts; it divides data x sequence x tensor."""
    tensor: Annotated[Size, Said("ranks", "`tensor_parallel.autotp_size`, or 1")] = 1
    """Ranks that share each layer; a model that has no such axis is refused."""
    sequence: Annotated[Size, Said("ranks", "`sequence_parallel_size`, or that of the `mpu`, or 1")] = 1
    """Ranks that share each sequence."""
    boundaries: Annotated[list[Annotated[int, Field(ge=0)]] | None, Said("layers")] = None
    """The first layer of each stage, and the number of layers; `None`: as `pipeline.partition` has it, which may be
    "profile"."""
    shares: Annotated[list[Size] | None, Said("samples")] = None
    """Samples of a global batch that each data index takes; `None`: as evenly as they go."""


class DataConfig(_Block):
    """How samples are dealt."""

    reshuffle: bool = False
    """A new order of the samples in every epoch; `False`: one order for all, as in plain DeepSpeed."""


class FallbackConfig(_Block):
    """Checkpoints that are saved by themselves, between two steps."""

    path: File
    """A folder that all members see."""
    every_steps: Steps | None = None
    """Save when so many optimizer steps divide those done."""
    every_seconds: Annotated[float, Field(gt=0, allow_inf_nan=False), Said("seconds")] | None = None
    """Save when the last one was so long ago, by the clock of rank 0."""
    background: bool = True
    """The step waits for a copy in host memory alone, which takes as much as this member writes."""
    on_sigterm: bool = False
    """After SIGTERM to any member all save at the next step, and end with code 143. Where members come and go it is
    not needed: one that gets SIGTERM hands over what it holds, and if all get it they save, and end with code 0."""
    keep: Size = 2
    """So many of the newest checkpoints in the folder stay."""


class ResumeConfig(_Block):
    """What a job goes on from when it starts."""

    path: File
    """A folder of checkpoints that all members see; the job begins if it names none."""
    tag: Annotated[str, Field(min_length=1)] | None = None
    """`None`: what `latest` in the folder names."""
    trust_pickle: bool = False
    """Run what files of DeepSpeed's say where they hold more than tensors and plain values."""


class ReportConfig(_Block):
    """Where switches are reported besides the log."""

    jsonl: Annotated[str, Said("path")] | None = None
    """A file that gets one line of JSON for each switch, and in an exact job one for each step."""
    monitor: bool = False
    """Whether switches are written to DeepSpeed's monitors, too: one of `tensorboard`, `wandb`, `csv_monitor` has to be
    enabled."""


class BuddiesConfig(_Block):
    """Copies in members' memory of what one rank holds alone, for jobs whose members come and go."""

    mode: Annotated[Literal["off", "copy"] | None, Said(default='"copy" in an elastic launch, else "off"')] = None
    """Whether other members keep copies of what one rank holds alone. "copy": as often as `every_steps` says; `None`:
    the same in an elastic launch, while two nodes or more train and half of the memory that is free holds the copies.
    All engines of a process have the same block."""
    every_steps: Steps = 1
    """A copy after so many steps."""
    copies: Annotated[Size, Said("members")] = 1
    """How many others keep each copy; a job begins with more members than that."""

    @property
    def are_on(self) -> bool:
        """Whether there may be copies; read it once `initialize` has settled `mode` for the kind of launch."""
        return self.mode != "off"


class BalanceConfig(_Block):
    """Layers and members are timed as they train, and what would be faster is proposed, or done."""

    mode: Literal["act", "advise", "off"] = "advise"
    """"advise": layers are timed, and nothing moves by itself; "act": they move, too; "off": nothing is timed."""
    profile: File | None = None
    """A profile that `engine.balancer.profile.save` has written: what `engine.suggest` and `"layouts": "best"` go by
    until one was measured, and where stages begin if `pipeline.partition` is "profile"."""
    every_steps: Steps = 50
    """From the begin of one window to the begin of the next."""
    window_steps: Steps = 1
    """So many are timed in a window; at most `every_steps`."""
    least_gain: Annotated[float, Field(ge=0, lt=1)] = 0.03
    """Share of a step below which no move pays, and below which costs count as the same."""
    horizon_steps: Steps | None = None
    """Over so many a move must pay at most; `None`: as long as costs stayed as they were so far."""
    safety: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 2.0
    """Gain over the horizon by the cost of the move, at least."""
    cooldown_steps: Annotated[int, Field(ge=0), Said("optimizer steps")] = 20
    """After a move, before the next one; doubled each time one is taken back."""
    shape: Literal["boundaries", "any"] = "boundaries"
    """What may move: boundaries of stages; "any": also how many stages and data ranks the same members form, and how
    many samples each data rank gets."""
    slow_ratio: Annotated[float, Field(gt=1, allow_inf_nan=False)] | None = 1.25
    """A member counts as slow that takes so many times as long as the middle one of its stage; `None`: none does."""
    slow_steps: Annotated[int, Field(ge=3), Said("optimizer steps")] = 20
    """A member that has become slow counts as slow within so many steps: once two windows have found it so, of which
    there is one every third of these steps."""
    memory_limit_bytes: Annotated[Size, Said("bytes")] | None = None
    """What a member may hold by prediction; `None`: anything, and in `"layouts": "best"` what its device has, or its
    part of the host."""

    @property
    def measures(self) -> bool:
        """Whether layers are timed."""
        return self.mode != "off"

    @property
    def slow_seen_steps(self) -> int:
        """From the first window that finds a member slow to the one in which it counts."""
        return self.slow_steps // 3

    @property
    def acts(self) -> bool:
        """Whether layers move by themselves."""
        return self.mode == "act"


class ExactConfig(_Block):
    """A job whose losses, gradient norms, weights and moments have the same bits in any world."""

    digest_every_steps: Steps = 1
    """A digest of weights, moments and losses after so many steps, counted from the start of the job."""


def _exact_block(value: object) -> object:
    """`true` is a block of all defaults, `false` none."""
    return {True: {}, False: None}[value] if isinstance(value, bool) else value


class ElasticConfig(_Block):
    """A job whose members come and go."""

    wait_for_members_seconds: Annotated[float, Field(ge=0, allow_inf_nan=False), Said("seconds")] = 600.0
    """How long training waits where fewer nodes than torchrun's MIN are there, after it has saved a fallback
    checkpoint; then all end with code 87."""
    collective_seconds: Annotated[float, Field(gt=0, allow_inf_nan=False), Said("seconds")] = 600.0
    """How long a member waits in one collective of the training. Past that all collectives are aborted, the members
    form their world anew, and the global batch is dealt again; the second time within ten steps ends the job."""


NAME, TABLE = "<name>", "<table>"
BEST = "best"
"""The name in `layouts` of what `balance` chooses."""
WorldSize = Annotated[str, Field(pattern=r"^[1-9][0-9]*$")]


def _name_or_table(value: object) -> str:
    return TABLE if isinstance(value, Mapping) else NAME


class DynatrainConfig(_Block):
    """The whole block. An empty block is valid and means all defaults."""

    layout: LayoutConfig | None = None
    """What to start with; `None`: all processes, at the stage of `zero_optimization`."""
    safety: Literal["rollback", "lean"] = "rollback"
    """"rollback": both sides of a switch are held until it is committed; "lean": it goes through a checkpoint of this
    very step in `fallback.path`, and never holds more than the larger side."""
    exact: Annotated[
        ExactConfig | None, BeforeValidator(_exact_block), Said(default="false", kind="boolean or object")
    ] = None
    """Whether losses, gradient norms, weights and moments have the same bits in any world; true: an object of all
    defaults. What was not tried with it is refused by name."""
    late: bool = False
    """Whether a switch moves in its pause only what a forward pass reads, and masters and moments during the first
    global batch after it; `engine.switch(late=...)` says otherwise for one switch."""
    memory_budget_bytes: Annotated[int, Field(ge=MINIMUM_BUDGET_BYTES), Said("bytes")] = 1 << 30
    """Most that a member holds in flight beyond its old and new state; 1 GiB by default."""
    replica_tolerance: Annotated[float, Field(ge=0, le=0.01)] = 1e-5
    """How far copies of a tensor that pipeline stages or tensor ranks compute each for itself (norms, tied weights) may
    have drifted apart, as a share of its largest value. Within it those of one rank are taken for all and the event has
    a warning; beyond it the switch is rolled back. A 16-bit weight may be off by one step of its type."""
    transport: Literal["auto", "ipc", "nccl", "gloo"] = "auto"
    """How bytes travel. "auto": members on one machine read each other's memory, also on their accelerators, where that
    is permitted; other accelerators' memory goes by NCCL where they have it, all else by gloo. "ipc" and "nccl": so
    for all memory on accelerators, and a switch is rolled back where it cannot be. "gloo": nobody reads any memory."""
    timeout_seconds: Annotated[float, Field(gt=0, allow_inf_nan=False), Said("seconds")] = 60.0
    """How long one member waits for another in a switch. Collectives of the training keep DeepSpeed's own limit of 30
    minutes."""
    data: DataConfig = DataConfig()
    report: ReportConfig = ReportConfig()
    fallback: FallbackConfig | None = None
    """Checkpoints that are saved by themselves, at boundaries."""
    resume: ResumeConfig | None = None
    """What a job goes on from when it starts."""
    layouts: Annotated[
        Annotated[str, Tag(NAME)] | Annotated[dict[WorldSize, LayoutConfig], Tag(TABLE)], Discriminator(_name_or_table)
    ] = "data"
    """Which layout a world of n members gets where members come and go: "data", "best", an object of layouts by n, or
    "module:function"."""
    elastic: ElasticConfig = ElasticConfig()
    buddies: BuddiesConfig = BuddiesConfig()
    balance: BalanceConfig | None = None
    """Layers and members are timed, and move to where the time is if `mode` says so; `None`: nothing is timed."""

    def in_fixed_launch(self) -> DynatrainConfig:
        """Return the block without the copies that an elastic launch has by default; `initialize` calls it."""
        if self.buddies.mode is not None:
            return self
        return self.model_copy(update={"buddies": self.buddies.model_copy(update={"mode": "off"})})

    @property
    def raw_layouts(self) -> str | dict[str, dict[str, Any]]:
        """`layouts` with its blocks as dictionaries."""
        given = self.layouts
        return given if isinstance(given, str) else {size: block.model_dump() for size, block in given.items()}


def split_config(config: Config) -> tuple[dict[str, Any], DynatrainConfig | None]:
    """Return DeepSpeed's own part of a configuration, as a new dictionary, and the `dynatrain` block if there is one.

    Where the block's layout names no ZeRO stage it is that of `zero_optimization`; where it names another one, the
    block counts and DeepSpeed's part is left as it stands. Raises `ConfigError` for a file that cannot be read, an
    unknown key or a wrong value.
    """
    whole = read_config(config)
    own = {key: value for key, value in whole.items() if key != BLOCK}
    if BLOCK not in whole:
        return own, None
    block = _validated(whole[BLOCK])
    _check_together(block)
    _check_monitors(block, own)
    _check_partition(block, own)
    if block.layout is None or block.layout.zero_stage is not None:
        return own, block
    layout = block.layout.model_copy(update={"zero_stage": _deepspeed_stage(own)})
    return own, block.model_copy(update={"layout": layout})


def _deepspeed_stage(config: Mapping[str, Any]) -> int:
    """Return the ZeRO stage of DeepSpeed's own part."""
    zero = config.get("zero_optimization", {})
    stage = zero.get("stage", 0) if isinstance(zero, Mapping) else None
    if isinstance(stage, bool) or stage not in (0, 1, 2, 3):
        raise ConfigError(
            f"{BLOCK}.layout.zero_stage: not given, and zero_optimization.stage is no stage to take instead "
            f"({zero!r}); give 0, 1, 2 or 3 in one of the two"
        )
    return int(stage)


def _validated(block: object) -> DynatrainConfig:
    """Return the checked block; the first thing that is wrong with it is the error."""
    if not isinstance(block, Mapping):
        raise ConfigError(
            f"{BLOCK}: expected an object of keys, got {block!r} ({type_name(block)}); write {{}} for the defaults"
        )
    _refuse_removed(block)
    try:
        return DynatrainConfig.model_validate(dict(block))
    except ValidationError as error:
        errors = error.errors(include_url=False)  # a misspelt key explains one that is missing
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


def _refuse_removed(block: Mapping[str, Any]) -> None:
    """Raise ConfigError for what earlier versions took: why it is gone, and what to use."""
    if block.get("transport") == "ring":
        raise ConfigError(
            f'{BLOCK}.transport: "ring" is gone, because a switch was no faster by it than by gloo; use "gloo", which '
            'does not read the memory of other members either, or "auto", which does where the kernel permits it'
        )
    buddies = block.get("buddies")
    if not isinstance(buddies, Mapping):
        return
    if (mode := buddies.get("mode")) in ("replay", "auto"):
        raise ConfigError(
            f'{BLOCK}.buddies.mode: "{mode}" is gone, because a step waited less for a copy (0.4 to 3.1 % of it) than '
            'where buddies replayed it (0.9 to 14.9 %); use "copy", which works with every optimizer and on '
            "accelerators, too"
        )
    if "verify_every_steps" in buddies:
        raise ConfigError(
            f"{BLOCK}.buddies.verify_every_steps: this key is gone, because buddies replay no steps that would have to "
            "be compared; leave it out, each copy has digests"
        )


def _keys_at(path: tuple[int | str, ...]) -> list[str]:
    """Return the keys that are valid at a path inside the block."""
    model: type[BaseModel] = DynatrainConfig
    for key in path:
        if key in model.model_fields:  # else it is one of a table of blocks
            model = _block_in(model.model_fields[str(key)].annotation) or model
    return list(model.model_fields)


def _block_in(annotation: Any) -> type[BaseModel] | None:
    """Return the block that a field of this type holds: itself, or `None`, or a table of such."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for part in get_args(annotation) if (found := _block_in(part))), None)


def _unknown_key(where: str, valid: list[str]) -> str:
    """Return the message for a key that does not exist, with the one that was probably meant."""
    key = where.rpartition(".")[2]
    close = difflib.get_close_matches(key, valid, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"{where}: unknown key; {hint}valid here: {', '.join(valid)}"


def _check_monitors(block: DynatrainConfig, own: Mapping[str, Any]) -> None:
    """Raise `ConfigError` where switches are to go to monitors and DeepSpeed's part has none."""
    blocks = [own.get(name) for name in MONITORS]
    if block.report.monitor and not any(isinstance(each, Mapping) and each.get("enabled") for each in blocks):
        raise ConfigError(
            f"{BLOCK}.report.monitor: switches go to DeepSpeed's monitors, and none of "
            f"{', '.join(f'{name}.enabled' for name in MONITORS)} is true; set one of them, or leave "
            f"{BLOCK}.report.monitor out"
        )


def _check_partition(block: DynatrainConfig, own: Mapping[str, Any]) -> None:
    """Raise `ConfigError` where stages are to be cut by a profile, and none is named."""
    pipeline = own.get("pipeline")
    method = str(pipeline.get("partition", "")).lower() if isinstance(pipeline, Mapping) else ""
    if method == "profile" and (block.balance is None or block.balance.profile is None):
        raise ConfigError(
            f'pipeline.partition "profile" cuts stages by a profile: name its file in {BLOCK}.balance.profile '
            '("mode": "off" beside it measures nothing), or give "parameters" until `engine.balancer.profile.save` has '
            "written one"
        )


def _check_together(block: DynatrainConfig) -> None:
    """Raise `ConfigError` for keys that do not go together."""
    if block.safety == "lean" and block.fallback is None:
        raise ConfigError(
            f'{BLOCK}.safety: "lean" switches through a checkpoint: name a folder for it in {BLOCK}.fallback.path'
        )
    balance = block.balance
    if block.layouts == BEST and (balance is None or not (balance.profile or balance.measures)):
        raise ConfigError(
            f'{BLOCK}.layouts: "{BEST}" chooses from a profile of the model: name its file in {BLOCK}.balance.profile'
        )
    if balance is not None and balance.window_steps > balance.every_steps:
        raise ConfigError(
            f"{BLOCK}.balance.window_steps: {balance.window_steps} steps are to be timed of every "
            f"{balance.every_steps}; give at most every_steps"
        )
