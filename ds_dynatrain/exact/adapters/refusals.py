"""Checks that refuse models, optimizers and settings with which a job cannot be exact (bitwise reproducible).

`machine` returns the settings that must be the same on all of the job's machines.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import PipelineModule
from torch import nn

from ds_dynatrain.adapters.groups.device import compute_device, is_accelerated
from ds_dynatrain.adapters.model import auto_ep as experts
from ds_dynatrain.adapters.model.moe import layers
from ds_dynatrain.adapters.model.pipeline_layers import is_pipeline
from ds_dynatrain.adapters.model.ulysses import spread_layers
from ds_dynatrain.adapters.versions.compiled import compiled_by_wrapping, compiled_in_place
from ds_dynatrain.adapters.versions.deepspeed_versions import UNTRIED, present
from ds_dynatrain.adapters.zero.optimizers import full_name, rule_of
from ds_dynatrain.errors import UnsupportedError
from ds_dynatrain.exact.bits.rows import refuse_inexact, usage
from ds_dynatrain.support import examine
from ds_dynatrain.support.checks import is_low

MODE = "MKL_CBWR"
LOOSE_MODES = ("", "OFF", "AUTO")
"""Values of MKL_CBWR under which MKL chooses kernels by the processor or by the alignment of memory."""


def refuse_series() -> None:
    """Raise UnsupportedError if exact jobs were not tested with the installed series of DeepSpeed."""
    if not present().is_newest:
        raise UnsupportedError(f"dynatrain.exact: {UNTRIED}")


def refuse_inexact_job(config: Mapping[str, Any], model: nn.Module, mpu: Any) -> None:
    """Raise UnsupportedError, naming the feature, if a job uses anything that was not tested in exact (bitwise
    reproducible) jobs.

    config: DeepSpeed's configuration.
    """
    refuse_series()
    if is_accelerated():
        raise usage("exact: an accelerator").error(f"exact on {compute_device().type!r}")
    if torch.backends.mkl.is_available() and os.environ.get(MODE, "").upper() in LOOSE_MODES:
        raise usage("exact: MKL_CBWR").error(f"exact: {MODE}={os.environ.get(MODE, '')}")
    for finding in examine(config):
        refuse_inexact(finding.key, finding.value, finding.is_off)
    if is_pipeline(model) and is_low(config):
        raise usage("exact: a pipeline of 16 bits").error()
    if (config.get("fp16") or {}).get("enabled") and not get_accelerator().is_fp16_supported():
        raise usage("exact: fp16").error()
    if not (isinstance(model, PipelineModule) and model.num_stages > 1):
        refuse_inexact_model(config, model, mpu)


def refuse_inexact_model(config: Mapping[str, Any], model: nn.Module, mpu: Any) -> None:
    """Raise UnsupportedError if the model has parts that were not tested in exact (bitwise reproducible) jobs.

    model: the model, with all its layers.
    """
    own_losses = PipelineModule.get_additional_losses
    has_further_losses = isinstance(model, PipelineModule) and type(model).get_additional_losses is not own_losses
    sends_messages = experts.is_on(config) or any(layers(model)) or mpu is not None or any(spread_layers(model))
    if has_further_losses or sends_messages:
        raise usage("exact: a model").error(f"exact: {type(model).__name__}")
    if compiled_by_wrapping(model) or compiled_in_place(model):
        raise usage("exact: torch.compile").error("exact: a compiled model")
    for name, part in model.named_modules():
        if isinstance(part, nn.modules.batchnorm._BatchNorm):
            raise usage("exact: BatchNorm").error(f"exact: {name!r} is a {type(part).__name__}")


def exact_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return DeepSpeed's configuration with the settings of an exact job, which make all ZeRO stages bitwise identical.

    ZeRO-3's own linear layer is off, because it rounds weight gradients differently. Gradients are summed in fp32,
    whatever the dtype of the weights, and DeepSpeed receives the sums in fp32.
    """
    zero = {**(config.get("zero_optimization") or {}), "memory_efficient_linear": False}
    types = {**(config.get("data_types") or {}), "grad_accum_dtype": "fp32"}
    return {**config, "zero_optimization": zero, "data_types": types}


def refuse_inexact_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Raise UnsupportedError if the optimizer's update of an element may depend on the element's position."""
    fused = any(group.get("fused") for group in optimizer.param_groups)
    if fused or not rule_of(optimizer).placeless:
        name = f"fused {full_name(type(optimizer))}" if fused else full_name(type(optimizer))
        raise usage("exact: an optimizer").error(f"exact: {name}")


@contextmanager
def unchanged_buffers(module: nn.Module) -> Iterator[None]:
    """Context manager that raises UnsupportedError if a forward pass changes a floating-point buffer.

    Each rank would change the buffer by its own micro-batches, so buffers would depend on the layout.
    """
    before = [(name, held, held._version) for name, held in module.named_buffers() if held.is_floating_point()]
    yield
    now = dict(module.named_buffers())
    for name, held, version in before:
        if now.get(name) is not held or held._version != version:
            raise usage("exact: a buffer that changes").error(f"exact: buffer {name!r}")


def machine(low: bool = True) -> dict[str, str]:
    """Return the settings that determine how this process rounds. They must be equal in all processes of an exact job.

    low: whether the weights have 16 bits.
    """
    found = {
        "torch": torch.__version__,
        "threads (torch.get_num_threads, OMP_NUM_THREADS)": str(torch.get_num_threads()),
        "kernels (torch.backends.cpu.get_cpu_capability)": torch.backends.cpu.get_cpu_capability(),
        MODE: os.environ.get(MODE, ""),
        "deterministic algorithms": str(torch.are_deterministic_algorithms_enabled()),
    }
    if low:  # oneDNN multiplies 16-bit matrices with the best of these
        names = ("avx512_bf16", "amx_tile", "amx_fp16")
        held = [name for name in names if getattr(torch.cpu, f"_is_{name}_supported")()]
        found["instructions for 16 bits (torch.cpu)"] = " ".join(held) or "none"
    return found
