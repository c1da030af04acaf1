"""Rows of optimizers and schedulers that the configuration names."""

from __future__ import annotations

from ds_dynatrain.support.checks import needs_offload, needs_torch_adam
from ds_dynatrain.support.row import Row, Verdict, refused, works

_MATRIX = "tests/engine/test_matrix.py"
_SCHEDULERS = ("LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR")

OPTIMIZERS = (
    *works("", "optimizer", proof=_MATRIX),
    Row(
        "optimizer.type",
        Verdict.NOTE,
        "with torch_adam in its params, or with offload_optimizer",
        values=("Adam", "AdamW"),
        proof=_MATRIX,
        at_start=needs_torch_adam,
    ),
    Row(
        "optimizer.type",
        Verdict.NOTE,
        "with offload_optimizer",
        values=("Lion",),
        proof="tests/engine/test_offload.py",
        at_start=needs_offload,
    ),
    *refused(
        "optimizer",
        "type",
        "its states are not known",
        "use Adam or AdamW",
        values=("Lamb", "Adagrad", "Muon", "MuAdam", "MuAdamW", "MuSGD"),
        off=(),
    ),
    *refused("optimizer", "type", "its states are not known", "use Adam or AdamW", off=()),
    *works("optimizer", "params", "what the optimizer's class takes", _MATRIX, below=True),
    *refused("optimizer", "legacy_fusion"),
    *works("", "zero_allow_untested_optimizer zero_force_ds_cpu_optimizer", proof=_MATRIX),
)

SCHEDULERS = (
    *works("", "scheduler", proof="tests/engine/test_loops.py"),
    *works("scheduler", "type", proof="tests/engine/test_loops.py", values=_SCHEDULERS),
    *works("scheduler", "type", "a class of torch.optim.lr_scheduler"),
    *works("scheduler", "params", "what the scheduler's class takes", below=True),
)
