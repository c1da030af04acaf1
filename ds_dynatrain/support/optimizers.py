"""Rows of optimizers and schedulers that the configuration names."""

from __future__ import annotations

from ds_dynatrain.support.checks import needs_compiler, needs_offload
from ds_dynatrain.support.row import NOT_TRIED, Row, Verdict, refused, works

_MATRIX = "tests/engine/test_matrix.py"
_WALKS = "tests/engine/test_optimizers.py"
_OTHER = "use AdamW, or another one of this table"
_SCHEDULERS = ("LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR")

OPTIMIZERS = (
    *works("", "optimizer", proof=_MATRIX),
    Row(
        "optimizer.type",
        Verdict.NOTE,
        "without torch_adam in its params DeepSpeed takes its own FusedAdam, which it compiles when the job starts",
        values=("Adam", "AdamW"),
        proof=_WALKS,
        at_start=needs_compiler,
    ),
    Row(
        "optimizer.type",
        Verdict.NOTE,
        "with offload_optimizer",
        values=("Lion",),
        proof="tests/engine/test_offload.py",
        at_start=needs_offload,
    ),
    *works(
        "optimizer",
        "type",
        "under ZeRO DeepSpeed asks for zero_allow_untested_optimizer",
        _WALKS,
        values=("SGD", "RMSprop", "NAdam", "RAdam", "Adamax"),
    ),
    *works("optimizer", "type", "at ZeRO stage 0 only: above, DeepSpeed replaces it", _WALKS, values=("Adagrad",)),
    *works(
        "optimizer",
        "type",
        "stage 0 in fp32, stage 3 with reduce_scatter false; no offload, tensor axis or gradients of another type",
        _WALKS,
        values=("Muon",),
    ),
    *refused("optimizer", "type", NOT_TRIED, _OTHER, values=("MuAdam", "MuAdamW", "MuSGD"), off=()),
    *refused(
        "optimizer", "type", "its states are not one value per element", _OTHER, values=("Adafactor", "Shampoo"), off=()
    ),
    *refused("optimizer", "type", "it keeps a history over all parameters together", _OTHER, values=("LBFGS",), off=()),
    *refused("optimizer", "type", "it needs sparse gradients", _OTHER, values=("SparseAdam",), off=()),
    *refused(
        "optimizer",
        "type",
        "it sends messages of its own, over groups that a switch does not know",
        _OTHER,
        values=("OneBitAdam", "ZeroOneAdam", "OneBitLamb"),
        off=(),
    ),
    *refused("optimizer", "type", "it scales a step by norms of whole parameters", _OTHER, values=("Lamb",), off=()),
    *refused(
        "optimizer",
        "type",
        "its states are not known",
        "use AdamW, or register its class (docs/optimizers.md) and pass an optimizer to initialize",
        off=(),
    ),
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
