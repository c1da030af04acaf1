"""Rules that list the per-element states and scalars of each known optimizer class; nothing is guessed from live state.

A rule applies to one class. A subclass may keep other states and needs a rule of its own. Users add their classes with
`register_optimizer`. Optimizers are refused by name if their states cannot be split by element (factored or quantized
states), or if they would need messages of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.runtime.zero.utils import ZERO_SUPPORTED_OPTIMIZERS

from ds_dynatrain.adapters.zero.state import ElementTypes
from ds_dynatrain.errors import ConfigError, SwitchRefused, UnsupportedError
from ds_dynatrain.space import STATE, Kind, Layout
from ds_dynatrain.support.checks import gradients_apart, is_low, offloads, setting
from ds_dynatrain.support.row import Config

Group = Mapping[str, Any]
"""A parameter group of a torch optimizer: its hyper-parameters, keyed by name."""
Names = tuple[str, ...]
Number = int | float | torch.Tensor
"""A scalar's value before the first step, in the type in which it is stored: a Python number or a 0-d tensor."""
Values = Mapping[str, Number]
"""A map from the names of scalars to their values before the first step."""
Moments = Iterable[str] | Callable[[Group], Iterable[str]]
Scalars = Values | Callable[[Group], Values]


@dataclass(frozen=True)
class OptimizerRule:
    """Description of the entries of `state[parameter]` that an optimizer class keeps, for each parameter group.

    moments: names of the per-element states, which have the parameter's element type and shape.
    scalars: a map from the names of the other states, which are numbers, to their values before the first step.
    counts_by_group: whether the optimizer counts steps on one parameter for its whole group (DeepSpeed's fused
        kernels), so that the highest count in a group is valid for each parameter in it.
    whole_tensors: the moments that ZeRO stages 1 and 2 keep for a whole tensor, on every rank that has some of it.
    placeless: whether a step's effect on an element depends on that element alone, with the same bits in tensors of any
        length and at any position, and the optimizer keeps nothing but its state.
    """

    moments: Moments = ()
    scalars: Scalars = field(default_factory=dict)
    counts_by_group: bool = False
    whole_tensors: Names = ()
    placeless: bool = False

    def moments_of(self, group: Group) -> Names:
        """Return the names of the per-element states of a group's parameters."""
        return tuple(self.moments(group) if callable(self.moments) else self.moments)

    def scalars_of(self, group: Group) -> dict[str, Number]:
        """Return a map from each scalar's name to its first value, for a group's parameters."""
        return dict(self.scalars(group) if callable(self.scalars) else self.scalars)


STEP: Values = {"step": torch.tensor(0.0, dtype=torch.float32)}
"""Scalars that torch's optimizers keep: a step count, as a float tensor."""


MUON = "deepspeed.runtime.zero.muon.muon_optimizer.MuonWithAuxAdam"


def _adam(group: Group) -> Names:
    return ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if group.get("amsgrad") else ()))


def _sgd(group: Group) -> Names:
    return ("momentum_buffer",) if group["momentum"] != 0 else ()


def _rmsprop(group: Group) -> Names:
    momentum = ("momentum_buffer",) if group["momentum"] > 0 else ()
    return ("square_avg", *momentum, *(("grad_avg",) if group["centered"] else ()))


_NADAM: Values = {**STEP, "mu_product": torch.tensor(1.0, dtype=torch.float32)}

KNOWN: Mapping[str, OptimizerRule] = {
    "torch.optim.adam.Adam": OptimizerRule(_adam, STEP, placeless=True),
    "torch.optim.adamw.AdamW": OptimizerRule(_adam, STEP, placeless=True),
    "torch.optim.sgd.SGD": OptimizerRule(_sgd, placeless=True),
    "torch.optim.rmsprop.RMSprop": OptimizerRule(_rmsprop, STEP, placeless=True),
    "torch.optim.nadam.NAdam": OptimizerRule(("exp_avg", "exp_avg_sq"), _NADAM, placeless=True),
    "torch.optim.radam.RAdam": OptimizerRule(("exp_avg", "exp_avg_sq"), STEP, placeless=True),
    "torch.optim.adamax.Adamax": OptimizerRule(("exp_avg", "exp_inf"), STEP, placeless=True),
    "torch.optim.adagrad.Adagrad": OptimizerRule(("sum",), STEP, placeless=True),
    "deepspeed.ops.adam.fused_adam.FusedAdam": OptimizerRule(_adam, {"step": 0}, counts_by_group=True),
    "deepspeed.ops.lion.fused_lion.FusedLion": OptimizerRule(("exp_avg",), {"step": 0}, counts_by_group=True),
    "deepspeed.ops.adam.cpu_adam.DeepSpeedCPUAdam": OptimizerRule(("exp_avg", "exp_avg_sq"), {"step": 0}),
    "deepspeed.ops.lion.cpu_lion.DeepSpeedCPULion": OptimizerRule(("exp_avg", "exp_avg_sq"), {"step": 0}),
}
"""Rules keyed by full class name, so that no class needs to be imported (some compile when imported)."""


def _muon_rule(optimizer: Any) -> OptimizerRule:
    """Return the rule of DeepSpeed's Muon: matrices have a momentum, other groups the states of Muon's inner Adam."""
    adam = OptimizerRule(_adam, {"step": 0}) if optimizer.aux_optimizer is None else rule_of(optimizer.aux_optimizer)
    return OptimizerRule(
        lambda group: ("momentum_buffer",) if group["use_muon"] else adam.moments_of(group),
        lambda group: {} if group["use_muon"] else adam.scalars_of(group),
        adam.counts_by_group,
        whole_tensors=("momentum_buffer",),
    )


_registered: dict[type[torch.optim.Optimizer], OptimizerRule] = {}
"""Rules of the users' own optimizer classes. A class is added once and never removed."""


def register_optimizer(
    cls: type[torch.optim.Optimizer],
    moments: Moments,
    scalars: Scalars | None = None,
    *,
    placeless: bool = False,
) -> type[torch.optim.Optimizer]:
    """Register the states that an optimizer class keeps in `state[parameter]`, so that a switch transfers them.

    cls: the class. Its subclasses are not included and must be registered themselves.

    moments: names of the states with one value per element, each computed only from values of the same element; or a
    function from a parameter group to these names.

    scalars: a map from the names of the other states to their values before the first step, in the type in which they
    are stored (an int, a float, or a zero-dimensional tensor); or a function from a parameter group to such a map.

    placeless: whether a step gives the same bits in any process, in tensors of any length and at any position in them,
    so that gradients may be added leaf by leaf (a leaf is a micro-batch of fixed size). Such an optimizer draws no
    random numbers, takes no norm over a tensor, and keeps nothing outside its state.

    Call this on every process before `initialize`. Returns the class.

    Raises ConfigError if the class is already known, or if names are invalid.
    """
    if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)):
        raise ConfigError(
            f"register_optimizer: {cls!r} is no subclass of torch.optim.Optimizer; give the class of an optimizer"
        )
    if full_name(cls) in KNOWN:
        raise ConfigError(f"register_optimizer: the states of {full_name(cls)} are known already; leave the call out")
    if cls in _registered:
        raise ConfigError(f"register_optimizer: {full_name(cls)} is registered already; register a class once")
    _refuse_by_name(cls)
    held = moments if callable(moments) else tuple(moments), scalars if scalars is not None else {}
    rule = OptimizerRule(*held, placeless=placeless)
    if not callable(rule.moments) and not callable(rule.scalars):
        _check_names(cls, rule.moments_of({}), rule.scalars_of({}))
    _registered[cls] = rule
    return cls


def rule_of(optimizer: torch.optim.Optimizer) -> OptimizerRule:
    """Return the rule of an optimizer. Raises UnsupportedError, naming its class and alternatives, if it has none."""
    cls = type(optimizer)
    if full_name(cls) == MUON:
        return _muon_rule(optimizer)
    rule = _registered.get(cls) or KNOWN.get(full_name(cls))
    if rule is None:
        _refuse_by_name(cls)
        names = ", ".join(sorted(name.rpartition(".")[2] for name in KNOWN))
        raise UnsupportedError(
            f"optimizer {full_name(cls)} is not among those whose states are known ({names}); if each of its states "
            "has one value per element, register it with ds_dynatrain.register_optimizer, else use one of them"
        )
    return rule


def check_optimizer(optimizer: torch.optim.Optimizer, config: Config, layout: Layout) -> None:
    """Raise UnsupportedError if a switch cannot transfer an optimizer, or if the optimizer cannot start in this layout.

    config: DeepSpeed's configuration.
    layout: the initial layout.
    """
    rule = rule_of(optimizer)
    try:
        refuse_optimizer_layout(optimizer, config, layout)
    except SwitchRefused as refusal:
        raise UnsupportedError(str(refusal)) from refusal
    for number, group in enumerate(optimizer.param_groups):
        _check_names(type(optimizer), rule.moments_of(group), rule.scalars_of(group))
        for name, value in group.items():
            if isinstance(value, torch.Tensor):
                raise UnsupportedError(
                    f"optimizer group {number}: {name} is a tensor, which a compiled step changes behind the engine's "
                    "back; give a number"
                )
        if group.get("capturable"):
            raise UnsupportedError(f"optimizer group {number}: capturable keeps counts on the device; set it to false")


def moment_kinds(optimizer: torch.optim.Optimizer, types: ElementTypes) -> tuple[Kind, ...]:
    """Return the state kinds of an optimizer's moments, each with the parameter groups that have the moment."""
    rule = rule_of(optimizer)
    found: dict[str, set[int]] = {}
    for number, group in enumerate(optimizer.param_groups):
        for name in rule.moments_of(group):
            found.setdefault(name, set()).add(number)
    every = set(range(len(optimizer.param_groups)))
    return tuple(
        Kind(
            name,
            types.of(name).itemsize,
            groups=None if held == every else frozenset(held),
            whole_tensors=name in rule.whole_tensors,
        )
        for name, held in found.items()
    )


def moment_types(optimizer: torch.optim.Optimizer, weight: torch.dtype) -> dict[str, torch.dtype]:
    """Return a map from moment to type, for the moments whose type is not that of the master.

    Muon's momentum has the type in which gradients are sent.

    weight: the type of the weights.
    """
    return {"momentum_buffer": weight} if full_name(type(optimizer)) == MUON else {}


def holds_flat_groups(optimizer: torch.optim.Optimizer, types: ElementTypes) -> bool:
    """Return whether DeepSpeed keeps the groups of this optimizer flat even at ZeRO stage 0 (in `FP16_Optimizer`)."""
    return isinstance(optimizer, FusedAdam) and types.weight != torch.float32


def refuse_optimizer_layout(
    optimizer: torch.optim.Optimizer, config: Config, layout: Layout, present: Layout | None = None
) -> None:
    """Raise SwitchRefused if DeepSpeed rejects this optimizer in a layout, or handles it wrongly.

    config: the user's configuration.
    present: the layout before a switch; None at the start.
    """
    cls = type(optimizer)
    if full_name(cls) == MUON:
        _refuse_muon(config, layout, present)
    if layout.zero_stage == 0:
        return
    if cls is torch.optim.Adagrad:
        raise SwitchRefused(
            f"{full_name(cls)} under ZeRO stage {layout.zero_stage}: DeepSpeed replaces it by a new one that the "
            "scheduler does not reach, and fails with more than one parameter group",
            "stay in ZeRO stage 0, or use another optimizer",
        )
    tested = {*(full_name(known) for known in ZERO_SUPPORTED_OPTIMIZERS), MUON}
    if full_name(cls) not in tested and not config.get("zero_allow_untested_optimizer"):
        raise SwitchRefused(
            f"{full_name(cls)} under ZeRO stage {layout.zero_stage}: DeepSpeed takes it only if it is told to",
            'put "zero_allow_untested_optimizer": true into the configuration',
        )


def _refuse_muon(config: Config, layout: Layout, present: Layout | None) -> None:
    """Raise SwitchRefused if Muon cannot work in a layout, or would work differently in it.

    It works differently if its algorithm, or the type or partition of its momentum, changes.
    """
    stage, apart, axes = layout.zero_stage, gradients_apart(config), layout.axes()
    wide = [f"{axis}={axes[axis]}" for axis in ("pipe", "expert") if axes[axis] > 1]
    reasons = (
        (
            stage and offloads(config),
            "Muon with zero_optimization.offload_optimizer: its momentum is fp32 there and cut in another way, which "
            "is not carried",
            "leave zero_optimization.offload_optimizer out, or use AdamW",
        ),
        (
            stage and apart,
            f"Muon with {apart} of another type than the weights: each ZeRO stage keeps its momentum in another type",
            f"leave {apart} out of the configuration",
        ),
        (
            0 < stage < 3 and wide,
            f"Muon under ZeRO stage {stage} with {', '.join(wide)}: momentum of whole tensors is carried with data and "
            "sequence alone",
            "give these axes size 1",
        ),
        (
            stage == 3 and setting(config, "zero_optimization.reduce_scatter") is not False,
            "Muon under ZeRO stage 3 needs whole gradients",
            "set zero_optimization.reduce_scatter to false",
        ),
        (
            not stage and is_low(config),
            "Muon under ZeRO stage 0 in low precision: its momentum is fp32 there, and not in stages 1 to 3",
            "stay in stages 1 to 3",
        ),
        (
            layout.tensor > 1,
            f"Muon with tensor={layout.tensor}: each rank would orthogonalize its own part of a matrix",
            "use tensor=1",
        ),
        (
            present is not None and bool(present.zero_stage) != bool(stage) and config.get("gradient_clipping"),
            "Muon with gradient_clipping: DeepSpeed clips its gradients under ZeRO stage 0 and its updates under "
            "stages 1 to 3, so the losses would change with the stage",
            f"stay in {'stage 0' if stage else 'stages 1 to 3'}, or leave gradient_clipping out",
        ),
    )
    for holds, why, instead in reasons:
        if holds:
            raise SwitchRefused(why, instead)


def full_name(cls: type) -> str:
    """Return the module and name of a class, joined by a dot."""
    return f"{cls.__module__}.{cls.__qualname__}"


_NOT_PER_ELEMENT = "its states are not one value per element, so no other layout can hold them"
_OWN_MESSAGES = "it sends messages of its own, over groups that a switch does not know"
REFUSED: Mapping[str, str] = {
    "adafactor": "it keeps factored second moments at ZeRO stage 0 and whole ones above: two algorithms",
    "shampoo": _NOT_PER_ELEMENT,
    "distributedshampoo": _NOT_PER_ELEMENT,
    "soap": _NOT_PER_ELEMENT,
    "lbfgs": "it keeps a history over all parameters together",
    "sparseadam": "it needs sparse gradients, which ZeRO does not reduce",
    "onebitadam": _OWN_MESSAGES,
    "zerooneadam": _OWN_MESSAGES,
    "onebitlamb": _OWN_MESSAGES,
    "fusedlamb": "it scales a step by norms of whole parameters, which ZeRO's parts do not have",
    "lamb": "it scales a step by norms of whole parameters, which ZeRO's parts do not have",
}
"""A map from the lower-case class names of optimizers that cannot be switched to the reasons."""


def _refuse_by_name(cls: type) -> None:
    """Raise UnsupportedError if the name or package of an optimizer class shows that no rule can describe it."""
    if any(base.__module__.partition(".")[0] in ("bitsandbytes", "torchao") for base in cls.__mro__):
        raise UnsupportedError(f"optimizer {full_name(cls)}: {_NOT_PER_ELEMENT} (quantized in blocks); use AdamW")
    reason = REFUSED.get(cls.__name__.lower())
    if reason is not None:
        raise UnsupportedError(f"optimizer {full_name(cls)}: {reason}; use AdamW, or one that ds_dynatrain knows")


def _check_names(cls: type, moments: Names, scalars: Values) -> None:
    names = [*moments, *scalars]
    if len(set(names)) != len(names):
        raise ConfigError(
            f"optimizer {full_name(cls)}: a state is named twice in {names}; name each once, in moments or in scalars"
        )
    taken = sorted(set(STATE) & set(moments))
    if taken:
        raise ConfigError(
            f"optimizer {full_name(cls)}: a state cannot be named {taken[0]!r}, which has a meaning here; give it "
            "another name"
        )
    for name, value in scalars.items():
        if isinstance(value, bool) or not isinstance(value, (int, float, torch.Tensor)):
            raise ConfigError(f"optimizer {full_name(cls)}: scalar {name!r} starts as {value!r}; give a number")
        if isinstance(value, torch.Tensor) and value.dim():
            raise ConfigError(
                f"optimizer {full_name(cls)}: scalar {name!r} is a tensor of shape {tuple(value.shape)}; give a "
                "number, or name it in moments"
            )


_NO_BETA = -1.0
"""A beta that no optimizer has, since torch and DeepSpeed require 0 <= beta < 1."""


def forget_running_products(optimizer: Any) -> None:
    """Make a compiled optimizer recompute its powers of the betas at the next step. Call this on every member.

    `Adam_Optimizer` (csrc/includes/cpu_adam.h) updates these powers by a float multiplication in each step. A member
    that has trained all along and one that has just become active would correct their averages by numbers that differ
    in the last bit, and replicas would drift apart. A call with other betas makes the optimizer compute the powers from
    scratch. FusedAdam has one such object per process and mode, each DeepSpeedCPUAdam has its own, and Lion has none.
    """
    if full_name(type(optimizer)) == MUON and optimizer.aux_optimizer is not None:
        optimizer = optimizer.aux_optimizer
    if isinstance(optimizer, DeepSpeedCPUAdam):
        rest = 0.0, _NO_BETA, _NO_BETA, 1.0, 0.0, False, *(torch.zeros(1) for _ in range(4))
        optimizer.ds_opt_adam.adam_update(optimizer.opt_id, 1, *rest)
    elif isinstance(optimizer, FusedAdam) and get_accelerator().device_name() == "cpu":
        lists = [[torch.zeros(1)] for _ in range(4)]
        settings = 0.0, _NO_BETA, _NO_BETA, 1.0, 1, optimizer.adam_w_mode, 0, 0.0
        optimizer.multi_tensor_adam(1, optimizer._dummy_overflow_buf, lists, *settings)
