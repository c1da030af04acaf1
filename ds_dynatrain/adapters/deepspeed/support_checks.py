"""Checks of live objects against the support table, made when an engine is built and between two steps.

The table itself is in `ds_dynatrain/support/`. Its rows say which configurations work, which are refused, and why.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ds_dynatrain.adapters.groups.communicators import OLDEST_NCCL, ends_with_its_members, is_watched, nccl_version
from ds_dynatrain.adapters.groups.device import HOST, compute_device, device_backend, is_accelerated, is_capturing
from ds_dynatrain.adapters.model.auto_ep import is_on
from ds_dynatrain.adapters.model.moe import layers
from ds_dynatrain.adapters.model.pipeline_layers import is_pipeline, refuse_uncuttable
from ds_dynatrain.adapters.model.ulysses import refuse_sequence
from ds_dynatrain.adapters.versions.compiled import compiled_by_wrapping
from ds_dynatrain.adapters.versions.deepspeed_versions import refuse_axes, refuse_for_series
from ds_dynatrain.errors import SwitchRefused
from ds_dynatrain.space import Layout
from ds_dynatrain.support import refuse_config, usage
from ds_dynatrain.support.checks import offloads, setting
from ds_dynatrain.support.row import Config


def refuse_unsupported(config: Config, model: nn.Module, optimizer: Any, mpu: Any, mesh_param: Any = None) -> None:
    """Raise UnsupportedError, with the reason and an alternative, for a feature that a switch would get wrong."""
    refuse_config(config)
    refuse_for_series(config)
    if is_pipeline(model):
        refuse_uncuttable(model)
        if setting(config, "data_efficiency.enabled"):
            raise usage("data_efficiency beside a pipeline").error("data_efficiency")
    refuse_sequence(model, mpu)
    if mesh_param is not None:
        raise usage("mesh_param").error()
    if optimizer is None and not setting(config, "optimizer.type"):
        raise usage("no optimizer").error()
    _refuse_model(model)


def check_elastic_launch() -> None:
    """Raise UnsupportedError if the accelerator's collectives are not known to end when a member dies.

    Called in launches whose members may join and leave.
    """
    if not is_accelerated():
        return
    if not ends_with_its_members():
        row = usage("an elastic launch on an accelerator without NCCL")
        raise row.error(f"an elastic launch on {compute_device().type!r} with {device_backend()}")
    if is_watched() and (version := nccl_version()) < OLDEST_NCCL:
        have = ".".join(map(str, version))
        raise usage("an elastic launch with an old NCCL").error(f"an elastic launch with NCCL {have}")


def refuse_module(model: nn.Module, layout: Layout, config: Config) -> None:
    """Raise SwitchRefused if the module cannot run in a layout."""
    refuse_axes(layout)
    if layout.zero_stage == 0 and offloads(config) and is_accelerated():
        raise usage("CPU optimizers at stage 0 on an accelerator").refused(f"offload_optimizer in {layout}")
    if is_pipeline(model):
        if setting(config, "fp16.enabled") and layout.zero_stage == 0 and layout.pipe > 1:
            raise usage("stages in fp16 without ZeRO").refused(f"a PipelineModule in fp16 in {layout}")
        low = setting(config, "bf16.enabled") or setting(config, "bfloat16.enabled")
        keys = ("round_robin_gradients", "parameter_alignment", "offload_optimizer")
        named = [key for key in keys if setting(config, f"zero_optimization.{key}")]
        if low and layout.zero_stage == 0 and named:
            raise usage("options of ZeRO for a pipeline in bf16 without it").refused(f"{named[0]} in {layout}")
    if is_on(config) or any(layers(model)):
        _refuse_beside_experts(layout, config)
    wrapped = compiled_by_wrapping(model)
    if wrapped and layout.zero_stage == 3:
        raise usage("torch.compile").refused(f"torch.compile: {wrapped[0]!r} is wrapped, and this is ZeRO stage 3")


def refuse_at_boundary(host: Any) -> None:
    """Raise SwitchRefused if unfinished work, such as accumulated gradients, would be lost in a switch.

    Called between two steps on each member with state.
    """
    steps = int(host.engine.gradient_accumulation_steps())
    if host.engine.micro_steps % steps:
        have = f"an accumulation window is open: {host.engine.micro_steps % steps} of {steps} micro-batches"
        raise usage("open accumulation window").refused(have)
    if getattr(host.optimizer, "_coalesce_grad_reduction", False):
        raise usage("coalesce_grad_reduction").refused("a coalesce_grad_reduction window is open")
    if is_capturing():
        raise usage("a CUDA graph under capture").refused("a graph is being captured on the present stream")
    if host.engine.inside_no_sync_ctxt:
        raise usage("no_sync").refused("a no_sync window is open")
    refuse_moved_states(host)
    if host.gathers.open:
        have = f"a deepspeed.zero.GatheredParameters block is open ({len(host.gathers.open)})"
        raise usage("GatheredParameters").refused(have)
    if host.gradients.seen:
        have = f"gradients of {len(host.gradients.seen)} parameters wait for an optimizer step"
        raise usage("gradients without a step").refused(have)


def refuse_moved_states(host: Any) -> None:
    """Raise SwitchRefused if `engine.offload_states()` has moved state to where a switch cannot read it."""
    away = getattr(host.optimizer, "offloaded_states", None)
    if away:
        names = ", ".join(sorted(str(getattr(kind, "value", kind)) for kind in away))
        raise usage("engine.offload_states").refused(f"engine.offload_states() has moved {names} away")


def _refuse_beside_experts(layout: Layout, config: Config) -> None:
    """Raise SwitchRefused for settings that DeepSpeed's stages 1 and 2 do not accept in a model with experts.

    config: DeepSpeed's configuration.
    """
    apart = setting(config, "zero_optimization.contiguous_gradients") is False and not offloads(config)
    if layout.zero_stage in (1, 2) and setting(config, "zero_optimization.reduce_scatter") is False:
        key, nearest = "reduce_scatter", layout.replace(zero_stage=0)
    elif layout.zero_stage == 2 and apart:
        key, nearest = "contiguous_gradients", layout.replace(zero_stage=1)
    else:
        return
    row = usage("options of ZeRO beside experts")
    raise SwitchRefused(
        f"zero_optimization.{key} = false in {layout}: {row.why}", f"{row.instead}, or nearest: {nearest}"
    )


def _refuse_model(model: nn.Module) -> None:
    devices = {held.device for held in model.parameters() if held.device.type not in (HOST.type, "meta")}
    if len(devices) > 1:
        named = ", ".join(sorted(map(str, devices)))
        raise usage("several devices in one process").error(f"the model lies on {named}")
    native = dict(layers(model))
    for name, parameter in model.named_parameters():
        if getattr(parameter, "allreduce", True) is False and not any(name.startswith(path) for path in native):
            raise usage("experts of your own").error(f"{name!r} is an expert parameter")
        if parameter.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise usage("element types").error(f"{name!r} is {parameter.dtype}")
    for name, part in model.named_modules():
        if isinstance(part, nn.Embedding) and part.sparse:
            raise usage("sparse gradients").error(f"{name!r} has sparse gradients")
