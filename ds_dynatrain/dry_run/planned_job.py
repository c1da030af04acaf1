"""The model and the DeepSpeed configuration for which `ds-dynatrain plan` computes a change, without an engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ds_dynatrain.config import split_config
from ds_dynatrain.dry_run.models import Model, model_named
from ds_dynatrain.errors import ConfigError, LayoutError, SwitchRefused
from ds_dynatrain.space import FROZEN, STATE, Kind, Layout, VirtualParameterSpace, ZeroRules, standard_kinds
from ds_dynatrain.support import Target, refuse_config, refuse_layout
from ds_dynatrain.support.axes import EXPERTS, PIPELINE, ULYSSES, refusal

BUDGET_BYTES = 1 << 30
"""The default of `dynatrain.memory_budget_bytes`."""
ITEM_BYTES: Mapping[str, int] = {"fp32": 4, "bf16": 2, "fp16": 2}
ADAM, ONE = ("exp_avg", "exp_avg_sq"), ("exp_avg",)
MOMENTS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("adam", "adamw", "fusedadam", "deepspeedcpuadam", "cpuadam", "nadam", "radam"), ADAM),
    **dict.fromkeys(("lion", "fusedlion", "deepspeedcpulion"), ONE),
    "adagrad": ("sum",),
    "sgd": (),
}
"""A map from the type of an optimizer, in lower case, to the values that it keeps for each element."""


@dataclass(frozen=True)
class PlannedJob:
    """A model, and the settings of a DeepSpeed configuration that determine how its state is distributed.

    config: the configuration without its `dynatrain` block.
    budget_bytes: the maximum number of bytes in flight on a member.
    assumed: sentences that describe what was assumed, because it was not given.
    """

    model: Model
    config: Mapping[str, Any] = field(default_factory=dict)
    budget_bytes: int = BUDGET_BYTES
    assumed: tuple[str, ...] = ()

    @staticmethod
    def read(model: str, config: Path | None) -> PlannedJob:
        """Return the job with a model from the registry or a file, and a configuration from a file or the usual
        settings.

        Raises ConfigError if either cannot be used, and UnsupportedError for a key that is refused in all jobs that
        switch.
        """
        known = model_named(model)
        some = "some frozen" if any(held.group == FROZEN for held in known.tensors) else "all trained"
        said = [
            f"{known.name}: {known.parameters / 1e9:.2f} billion parameters in {known.blocks} blocks, {some}",
            "pipeline stages have equal numbers of blocks; the first also the embedding, the last the norm and head",
            "AutoTP cuts attention by heads of keys and values, feed-forward layers and the head evenly, nothing else",
        ]
        if known.has_experts:
            said.append("experts are AutoEP's stacks, dealt evenly; a partition_config tells AutoTP to cut attention")
        if config is None:
            said.append("no DeepSpeed configuration: bf16 weights, fp32 masters, Adam, ZeRO's defaults")
            return PlannedJob(known, {"bf16": {"enabled": True}}, assumed=tuple(said))
        if not config.is_file():
            raise ConfigError(f"configuration {str(config)!r}: no such file; give the path of DeepSpeed's JSON file")
        own, block = split_config(str(config))
        refuse_config(own)
        budget = BUDGET_BYTES if block is None else block.memory_budget_bytes
        return PlannedJob(known, own, budget, tuple(said))

    @property
    def zero(self) -> Mapping[str, Any]:
        """The section `zero_optimization` of the configuration."""
        found = self.config.get("zero_optimization")
        return found if isinstance(found, Mapping) else {}

    @property
    def weight_type(self) -> str:
        """The type of weights: fp32, bf16 or fp16."""
        on = [name for name in ("bf16", "fp16") if (self.config.get(name) or {}).get("enabled")]
        return on[0] if on else "fp32"

    def kinds(self) -> tuple[Kind, ...]:
        """The state kinds. Raises ConfigError for an optimizer whose moments are not known here."""
        block = self.config.get("optimizer") or {"type": "Adam"}
        name = str(block.get("type", "")).lower()
        if name not in MOMENTS:
            raise ConfigError(
                f"optimizer.type {block.get('type')!r}: what it keeps for each element is not known here; give one of "
                f"{', '.join(MOMENTS)}"
            )
        moments = MOMENTS[name]
        if name == "sgd" and (block.get("params") or {}).get("momentum"):
            moments = ("momentum_buffer",)
        weight = ITEM_BYTES[self.weight_type]
        sums = (self.config.get("data_types") or {}).get("grad_accum_dtype")
        offloads = (self.zero.get("offload_optimizer") or {}).get("device", "none") != "none"
        sizes = {
            key: 4 if row.element == "master" else ITEM_BYTES.get(str(sums), weight)
            for key, row in STATE.items()
            if row.is_gradient and (offloads or not row.is_offloaded)
        }
        return standard_kinds(weight, 4, moments, **sizes)

    def rules(self, has_stages: bool) -> ZeroRules:
        """Return the rules by which ZeRO cuts tensors under this configuration.

        has_stages: whether the model is a pipeline.
        """
        flat = frozenset({1, 2})
        return ZeroRules(
            parts_without_zero=has_stages and self.weight_type == "bf16",
            sub_group_size=int(self.zero.get("sub_group_size", 10**9)),
            round_robin_stages=flat if self.zero.get("round_robin_gradients") else frozenset(),
            aligned_stages=flat if self.zero.get("parameter_alignment") else frozenset(),
            weight_alignment=16 // ITEM_BYTES[self.weight_type],
        )

    def space(self, source: Layout, target: Layout, members: Sequence[int]) -> VirtualParameterSpace:
        """Return the parameter space of the job in the source layout."""
        has_stages = max(source.pipe, target.pipe) > 1
        tensors, rules = self.model.logical(), self.rules(has_stages)
        return VirtualParameterSpace.of(tensors, rules, self.kinds(), source, members, self.model.partition)

    def refusal(self, source: Layout, target: Layout) -> SwitchRefused | None:
        """Return why the job cannot train in one of two layouts, or cannot switch between them; None if it can."""
        pipe, sequence = max(source.pipe, target.pipe), max(source.sequence, target.sequence)
        has = {PIPELINE: pipe > 1, EXPERTS: self.model.has_experts, ULYSSES: sequence > 1}
        for layout, present in ((source, None), (target, source)):
            found = refusal(frozenset(filter(has.get, has)), layout, layout.world_size)
            if found is not None:
                return SwitchRefused(found.why, found.instead)
            try:
                refuse_layout(Target(self.config, layout, present))
                self.model.partition(layout)
            except SwitchRefused as refused:
                return refused
            except LayoutError as error:
                return SwitchRefused(str(error), "choose other sizes of pipe, expert and tensor")
        return None


def layout_of(text: str, stage: int | None = None, present: Layout | None = None) -> Layout:
    """Return the layout that an option such as "tensor=8,pipe=4,data=4,zero_stage=1" describes.

    stage: the ZeRO stage if the text names none.
    present: the layout whose sizes are used for axes that the text does not name; None for sizes of 1.

    Raises ConfigError if the text is not such a list, and LayoutError if the sizes are not a valid layout.
    """
    values: dict[str, Any] = {}
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        try:
            numbers = tuple(map(int, value.split(":")))
        except ValueError:
            raise ConfigError(
                f"{text!r}: {part!r} is no axis and its size; write such as tensor=8,data=4,zero_stage=1, and "
                "boundaries as 0:20:40"
            ) from None
        values[name.strip()] = numbers if len(numbers) > 1 else numbers[0]
    if present is not None:
        return present.replace(**values)
    return Layout.from_dict({"zero_stage": stage, **values} if stage is not None else values)
