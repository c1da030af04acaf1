"""ZeRO-Offload: masters, moments and the masters' gradients in host memory, stepped by DeepSpeed's CPU optimizers.

The gradient of a master part (`master.grad`) is allocated once and never cleared (DeepSpeed 0.19.8): a parameter that
got no gradient in a step is stepped with the gradient left from an earlier step. These gradients are therefore state in
stages 1 to 3: `host_grad`. All other fields of offload (`param_buffer_of_bit16_for_cpu_offload_groups`,
`temp_grad_buffer_*`, `accumulated_grads_in_cpu`, `norm_for_param_grads`) are written before they are read, or cleared
by a step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ds_dynatrain.space import LocalSpace
from ds_dynatrain.space.zero import group_size
from ds_dynatrain.support import usage


def keeps_gradients(zero: Any) -> bool:
    """Return whether a ZeRO optimizer offloads to the host, so that its masters keep their gradients between steps."""
    return bool(getattr(zero, "cpu_offload", False) or getattr(zero, "offload_optimizer", False))


@contextmanager
def old_gradients_kept(zero: Any, divisor: float) -> Iterator[None]:
    """Context manager in which the optimizer's step divides new gradients by `divisor`, but not those of earlier steps.

    Gradients from earlier steps were divided when they were new. DeepSpeed records a norm (`norm_for_param_grads`) for
    each new gradient; a parameter without a recorded norm has an old gradient.
    """
    if not keeps_gradients(zero):
        yield
        return
    is_flat = hasattr(zero, "params_in_partition")
    groups = zero.params_in_partition if is_flat else zero.fp16_groups
    masters = zero.single_partition_of_fp32_groups if is_flat else zero.fp32_partitioned_groups_flat
    numbers = [zero.get_param_id(parameter) for group in groups for parameter in group]
    places = [zero.grad_position[number] for number in numbers if number not in zero.norm_for_param_grads]
    left = [masters[place[0]].grad.narrow(0, place[-2], place[-1]) for place in places]
    for gradient in left:
        gradient.mul_(divisor)
    try:
        yield
    finally:
        if getattr(zero, "overflow", False):  # the step was skipped
            for gradient in left:
                gradient.div_(divisor)


def refuse_moved_states(host: Any) -> None:
    """Raise SwitchRefused if `engine.offload_states()` has moved state to where a switch cannot read it."""
    away = getattr(host.optimizer, "offloaded_states", None)
    if away:
        names = ", ".join(sorted(str(getattr(kind, "value", kind)) for kind in away))
        raise usage("engine.offload_states").refused(f"engine.offload_states() has moved {names} away")


def working_bytes(local: LocalSpace, weight: torch.dtype, accumulates: bool) -> int:
    """Return the largest number of bytes that offload takes on a rank in addition to the state.

    weight: element type of the weights.
    accumulates: whether a step has several micro-batches.

    Stages 1 and 2 take a copy of the rank's part of the weights, two buffers as large as the largest tensor and, if
    gradients are accumulated, the whole gradient of each parameter that overlaps the part.
    """
    if local.layout.zero_stage not in (1, 2):
        return 0
    numels = local.line.numels[: local.line.trainable_count]
    part, largest = int(numels.sum()) // group_size(local.layout), int(numels.max(initial=0))
    groups = len({tensor.group for tensor in local.tensors if tensor.trainable})
    window = min(int(numels.sum()), part + 2 * groups * largest) if accumulates else 0
    return (part + 2 * largest + window) * weight.itemsize
