"""Examination of a configuration file: a verdict on each of its keys, and whether a job would start with the file."""

from __future__ import annotations

import copy
import importlib
import os
import sys
from collections.abc import Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ds_dynatrain.config import BLOCK, DynatrainConfig, split_config
from ds_dynatrain.config_file import read_config
from ds_dynatrain.errors import ConfigError, SwitchRefused
from ds_dynatrain.extension import BUILT_IN
from ds_dynatrain.space.layout import STAGES, Layout
from ds_dynatrain.support import Finding, Target, examine, refuse_layout, usage
from ds_dynatrain.support.walk import AUTO

SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu")


@dataclass
class JobReport:
    """The report on a configuration: whether a job would start with it, and a verdict on each key.

    path: the path of the file.
    layout: the initial layout of the job; None if the configuration names no valid one.
    findings: the verdict on each key.
    problems: anything else that would prevent a start.
    stages: a map from each ZeRO stage to the reason why a switch to it is refused; "" if it is not refused.
    notes: other things that the user should know.
    extensions: the keys of the extensions that the `dynatrain` block turns on.
    is_filled_in: whether Trainer or Accelerate has to fill in some keys.
    """

    path: str
    layout: Layout | None = None
    findings: list[Finding] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    stages: dict[int, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    extensions: tuple[str, ...] = ()
    is_filled_in: bool = False

    @property
    def would_start(self) -> bool:
        """Whether a job with this configuration would start."""
        return not self.problems and all(finding.refusal is None for finding in self.findings)


def examine_file(path: Path, processes: int | None, has_deepspeed: bool) -> JobReport:
    """Return the report on a configuration file. Raises ConfigError if the file cannot be read.

    processes: number of processes in the launch. By default it is taken from the environment or the `dynatrain` block.
    has_deepspeed: whether DeepSpeed is installed, so that it can check the configuration too.
    """
    if not path.is_file():
        raise ConfigError(f"configuration {str(path)!r}: no such file; give the path of DeepSpeed's JSON file")
    whole = read_config(path)
    report = JobReport(str(path))
    if BLOCK not in whole:
        report.notes.append(
            f"there is no {BLOCK} block: initialize is deepspeed.initialize then; below, what an empty block would do"
        )
        whole = {**whole, BLOCK: {}}
    try:
        own, block = split_config(whole)
    except ConfigError as error:
        report.problems.append(str(error))
        own, block = {key: value for key, value in whole.items() if key != BLOCK}, None
    report.findings = examine(own)
    own = _without_auto(own, report)
    if "optimizer" not in own:
        report.notes.append(f"no optimizer block: {usage('no optimizer').instead}")
    report.extensions = () if block is None else tuple(key for key in BUILT_IN if getattr(block, key))
    if block is not None:
        _look_at_layouts(own, block, processes, has_deepspeed, report)
    if report.layout is not None and report.would_start and has_deepspeed:
        _ask_deepspeed(own, block, report.layout, report)
    return report


def _without_auto(own: dict[str, Any], report: JobReport) -> dict[str, Any]:
    """Return the configuration without the keys that Hugging Face's Trainer and Accelerate fill in ("auto").

    A bare `initialize` refuses these keys, so they are added to the report as a note. If no batch size is left, a
    micro-batch of 1 sample is assumed.
    """
    filled = [finding.key for finding in report.findings if finding.value == AUTO and finding.refusal is not None]
    report.findings = [finding for finding in report.findings if finding.key not in filled]
    if not filled:
        return own
    report.notes.append(
        f'filled in by Hugging Face\'s Trainer and by Accelerate, and refused by a bare initialize: "auto" of '
        f"{', '.join(filled)}"
    )
    own, report.is_filled_in = copy.deepcopy(own), True
    for key in filled:
        *sections, name = key.split(".")
        held = own
        for section in sections:
            held = held[section]
        del held[name]
    if not any(key in own for key in SIZES):
        own["train_micro_batch_size_per_gpu"] = 1
    return own


def _look_at_layouts(
    own: dict[str, Any], block: DynatrainConfig, processes: int | None, has_deepspeed: bool, report: JobReport
) -> None:
    """Add to the report the initial layout of the job, and the ZeRO stages to which it could switch."""
    wanted = block.layout
    launch = processes or int(os.environ.get("WORLD_SIZE") or 0) or (wanted.data if wanted is not None else 1)
    zero = own.get("zero_optimization")
    stage = zero.get("stage", 0) if isinstance(zero, Mapping) else 0
    if wanted is not None:
        if wanted.data > launch:
            report.problems.append(
                f"{BLOCK}.layout.data is {wanted.data} and the launch has {launch} processes: start more, or lower it"
            )
        stage = wanted.zero_stage
    if isinstance(stage, bool) or stage not in STAGES:
        report.problems.append(f"zero_optimization.stage is {stage!r}: give 0, 1, 2 or 3")
        return
    report.layout = Layout(data=wanted.data if wanted is not None else launch, zero_stage=stage)
    for other in STAGES:
        present = None if other == stage else report.layout
        try:
            refuse_layout(Target(own, report.layout.replace(zero_stage=other), present))
            if has_deepspeed:
                _refuse_optimizer(own, report.layout.replace(zero_stage=other), present)
            report.stages[other] = ""
        except SwitchRefused as refusal:
            report.stages[other] = str(refusal)
    if report.stages[stage]:
        report.problems.append(f"the first layout, {report.layout}: {report.stages[stage]}")


def _refuse_optimizer(own: Mapping[str, Any], layout: Layout, present: Layout | None) -> None:
    """Raise SwitchRefused if the configured optimizer does not support a layout.

    present: the current layout; None to check `layout` as the first one.
    """
    import torch

    from ds_dynatrain.adapters.zero.optimizers import MUON, refuse_optimizer_layout

    block = own.get("optimizer")
    name = str(block.get("type", "")).lower() if isinstance(block, Mapping) else ""
    if name == "muon":
        module, _, wanted = MUON.rpartition(".")
        kind = getattr(importlib.import_module(module), wanted)
    else:
        kind = next((held for key, held in vars(torch.optim).items() if key.lower() == name), None)
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer):
        # only the class is examined, so no instance is initialized
        refuse_optimizer_layout(kind.__new__(kind), own, layout, present)


def _ask_deepspeed(own: dict[str, Any], block: DynatrainConfig | None, layout: Layout, report: JobReport) -> None:
    """Check a configuration with the installed DeepSpeed, and add problems and notes to the report.

    The checks cover the limits of the installed release series, the extensions, the batch sizes, and whether DeepSpeed
    itself accepts the values.
    """
    from torch import nn

    from ds_dynatrain.adapters.versions.deepspeed_versions import refuse_for_series
    from ds_dynatrain.adapters.zero.deepspeed_config import BatchSizes, layout_config
    from ds_dynatrain.data import BatchArithmetic
    from ds_dynatrain.extension import made
    from ds_dynatrain.reshard.feasible import check_batch

    try:
        refuse_for_series(own)
        added = [] if block is None else made(block)
        for extension in added:
            extension.check_job(own, nn.Module(), None)
        sizes = BatchSizes.of(own, layout.data, any(extension.has_leaves for extension in added))
        check_batch(layout, sizes, nn.Module(), layout.pipe > 1)
        for extension in added:
            extension.check_layout(layout, sizes, layout.pipe > 1)
        if "train_batch_size" in own:
            report.notes.append(f"global batch: {sizes.train_batch_size} samples a step, with any number of ranks")
        elif not report.is_filled_in:
            report.notes.append(
                f"global batch: {sizes.train_batch_size} samples a step with {layout.data} ranks; train_batch_size is "
                "not given, so the number of ranks at the start decides, and an elastic launch refuses this file"
            )
        micro = sizes.micro_batch_size
        alone = BatchArithmetic(micro, micro, 1)  # outside of a launch there is one rank
        with redirect_stdout(sys.stderr):
            layout_config(own, layout.replace(data=1), alone)
    except Exception as error:  # any error here would also prevent the start
        report.problems.append(f"{type(error).__name__}: {error}")
