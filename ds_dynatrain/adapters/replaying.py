"""One optimizer step of ZeRO, open where its gradients are reduced and where it is decided; and the same step again.

Stages 1 to 3 (DeepSpeed 0.19.8) reduce gradients in the backward pass, add up a norm, and only then change a master:
nothing is sent between the norm and the last master's step. The first call of `unscale_and_clip_grads` lies between
the two; where a step is skipped there is none.

The same step is made on other memory by an optimizer of the same class, with the clip factor that DeepSpeed's own
tensor arithmetic makes: equal code on tensors of equal length has equal bits.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from ds_dynatrain.adapters.device import HOST, compute_device
from ds_dynatrain.adapters.moments import read_state, write_state
from ds_dynatrain.adapters.offload import keeps_gradients
from ds_dynatrain.adapters.optimizers import full_name, rule_of
from ds_dynatrain.adapters.replaced import replaced
from ds_dynatrain.errors import TransferError

Unscale = Callable[[Sequence[torch.Tensor]], None]
"""Divide the gradients of these parameters, one for each master, as DeepSpeed does its own in this step."""
_OF_THE_INSTANCE = ("step", "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
"""What schedulers and users have put on an optimizer, which is not for another one."""


class Watcher(Protocol):
    """Who is told of a step."""

    def reduced(self) -> None:
        """Gradients are reduced; neither norm nor overflow is known, and nothing has changed."""

    def decided(self, unscale: Unscale | None) -> None:
        """What the step does is known on this rank, and no master has changed; None: it is skipped."""


def why_not(zero: Any, basic: torch.optim.Optimizer) -> str:
    """Why no other process could make the steps of a DeepSpeed optimizer again; nothing if one can."""
    if not isinstance(zero, (DeepSpeedZeroOptimizer, DeepSpeedZeroOptimizer_Stage3)):
        return f"gradients of a {type(zero).__name__} are not where ZeRO stages 1 to 3 have them"
    if compute_device() != HOST:
        return f"masters on {compute_device()} are stepped by other kernels than in host memory"
    if keeps_gradients(zero) and isinstance(zero, DeepSpeedZeroOptimizer_Stage3):
        return "with zero_optimization.offload_optimizer at stage 3 two gradients are state, which is not replayed yet"
    if getattr(zero, "torch_autocast_gradscaler", None) is not None:
        return "with torch_autocast in fp16 torch's own scaler decides about a step after DeepSpeed has"
    if not rule_of(basic).replays:
        return (
            f"optimizer {full_name(type(basic))} is not known to give equal bits for equal inputs of equal length, "
            "element by element"
        )
    return ""


@contextmanager
def watched_step(zero: Any, watcher: Watcher) -> Iterator[None]:
    """Inside the block a step of the ZeRO optimizer tells the watcher."""
    own_step, own_unscale, is_decided = zero.step, zero.unscale_and_clip_grads, False

    def decide(unscale: Unscale | None) -> None:
        nonlocal is_decided
        if not is_decided:
            is_decided = True
            watcher.decided(unscale)

    def unscale_and_clip(which: Any, norm: Any) -> None:
        def unscale(parameters: Sequence[torch.Tensor]) -> None:
            if isinstance(zero, DeepSpeedZeroOptimizer_Stage3):
                with replaced(zero, "fp32_partitioned_groups_flat", parameters):
                    for number in range(len(parameters)):
                        own_unscale(number, norm)
            else:
                own_unscale([parameter.grad for parameter in parameters], norm)

        decide(unscale)
        own_unscale(which, norm)

    def step(*arguments: Any, **named: Any) -> None:
        watcher.reduced()
        own_step(*arguments, **named)
        decide(None)

    with replaced(zero, "step", step), replaced(zero, "unscale_and_clip_grads", unscale_and_clip):
        yield


def reduced_gradients(zero: Any) -> list[Sequence[torch.Tensor]]:
    """For each master what lies end to end in its gradient, before it is divided by scale and clip factor.

    What a master has beyond that is padding, whose gradient is 0.
    """
    found: list[Sequence[torch.Tensor]] = []
    if keeps_gradients(zero):
        return [[_gradient_of(master).view(-1)] for master in masters_of(zero)]
    for number in range(len(masters_of(zero))):
        parts = zero.averaged_gradients[number]
        flat = getattr(parts, "flat_partition", None)
        found.append([part.reshape(-1) for part in (parts if flat is None else [flat])])
    return found


def _gradient_of(master: torch.Tensor) -> torch.Tensor:
    """Of a master in host memory, which keeps it from step to step."""
    if master.grad is None:
        raise TransferError("engine.offload_states() has moved the gradients of masters away: bring them back first")
    return master.grad


def masters_of(zero: Any) -> Sequence[torch.Tensor]:
    """What the basic optimizer steps, one after the other."""
    is_cut = isinstance(zero, DeepSpeedZeroOptimizer_Stage3)
    masters: Sequence[torch.Tensor] = (
        zero.fp32_partitioned_groups_flat if is_cut else zero.single_partition_of_fp32_groups
    )
    return masters


def of_one_parameter(zero: Any) -> list[bool]:
    """For each master of stage 3 whether it is of one parameter.

    Its reduced gradient is laid end to end with no other one, so DeepSpeed divides it where it lies, if it has the
    master's type.
    """
    return [len(parameters) == 1 for parameters in zero.fp16_groups]


def groups_of(zero: Any) -> list[int]:
    """The optimizer group of each master."""
    masters = masters_of(zero)
    if isinstance(zero, DeepSpeedZeroOptimizer_Stage3):
        return [int(zero.sub_group_to_group_id[number]) for number in range(len(masters))]
    return list(range(len(masters)))


class Twin:
    """An optimizer of the class of another one, over masters and moments of its own.

    basic: the other one, whose hyper-parameters are those of each step. groups: the optimizer group of each master.
    moments: of each master, by name, none before the first step; scalars: likewise.
    """

    def __init__(
        self,
        basic: torch.optim.Optimizer,
        groups: Sequence[int],
        masters: Sequence[torch.Tensor],
        moments: Sequence[Mapping[str, torch.Tensor]],
        scalars: Sequence[Mapping[str, float]],
    ) -> None:
        self._basic, self._groups = basic, groups
        self.parameters = [master.detach().requires_grad_() for master in masters]
        self._own = type(basic).__new__(type(basic))
        self._own.__dict__.update({name: held for name, held in vars(basic).items() if name not in _OF_THE_INSTANCE})
        self._own._optimizer_step_pre_hooks, self._own._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
        self._own.state = defaultdict(dict)
        self._own.param_groups = list(basic.param_groups)
        for number, parameter in enumerate(self.parameters):
            write_state(self._own, parameter, groups[number], dict(moments[number]), dict(scalars[number]))

    @torch.no_grad()
    def step(self, gradients: Sequence[torch.Tensor], unscale: Unscale) -> None:
        """One step with these gradients, which are written over, by the hyper-parameters of now."""
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient
        unscale(self.parameters)
        for parameter, number in zip(self.parameters, self._groups, strict=True):
            if not len(parameter):  # of other stages
                continue
            self._own.param_groups = [{**self._basic.param_groups[number], "params": [parameter]}]
            self._own.step()
            parameter.grad = None

    def moments(self) -> list[dict[str, torch.Tensor]]:
        """Of each master."""
        self._own.param_groups = list(self._basic.param_groups)
        pairs = zip(self.parameters, self._groups, strict=True)
        return [read_state(self._own, parameter, group)[0] for parameter, group in pairs]
