"""Where DeepSpeed says that a parameter's fp32 fragment lies: `param._hp_mapping`, set right where it is wrong.

DeepSpeed 0.19.8 links a parameter to its fragment of the flat master by the order of registration, and by true offsets
only where something is padded between tensors. Under `round_robin_gradients` alone the flat order is another one, and
`safe_get_full_fp32_param`, its setters and the universal checkpoint then read and write the elements of other
parameters. Training itself is not touched by this.
"""

from __future__ import annotations

from typing import Any

import deepspeed.comm as dist
from deepspeed.utils import link_hp_params


def link_moments(held: Any) -> None:
    """Let `safe_get_full_optimizer_state` find the moments before the first step of an optimizer that was refilled.

    DeepSpeed links them in its own first step. Nothing to do where a group has none yet.
    """
    if all(held.optimizer.state.get(group["params"][0]) for group in held.optimizer.param_groups):
        held._lazy_init_hp_params_optimizer_state()


def relink(held: Any) -> None:
    """Link the parameters of an optimizer that was refilled to their parts of it, and those to its moments."""
    held._link_all_hp_params()
    held._hp_optimizer_states_linked = False
    held._param_slice_mappings = held._create_param_mapping()
    correct_fragments(held)
    link_moments(held)


def correct_fragments(zero: Any) -> None:
    """Link the parameters of a ZeRO optimizer of stage 1 or 2 by their true offsets; nothing to do for any other."""
    if not getattr(zero, "round_robin_gradients", False):
        return
    for group, master in enumerate(zero.single_partition_of_fp32_groups):
        held = zero.round_robin_bit16_groups[group], zero.round_robin_bit16_offsets[group]
        offset = {id(parameter): at for parameter, at in zip(*held, strict=True)}
        size, peers = zero.partition_size[group], zero.real_dp_process_group[group]
        link_hp_params(
            lp_param_list=zero.bit16_groups[group],
            flat_hp_partition=master,
            gradient_dict=zero.averaged_gradients,
            offload_gradient_dict=zero.offload_gradient_dict,
            use_offload=zero.cpu_offload,
            param_group_index=group,
            partition_start=dist.get_rank(group=peers) * size,
            partition_size=size,
            dp_group=peers,
            param_offsets=[offset[id(parameter)] for parameter in zero.bit16_groups[group]],
        )
    zero._hp_optimizer_states_linked = False
    zero._param_slice_mappings = zero._create_param_mapping()
    if zero.cpu_offload:
        zero._create_optimizer_mapping()
