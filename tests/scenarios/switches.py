"""Scenarios of the data axis, the ZeRO stage, precision and the ways to carry out a switch."""

from __future__ import annotations

from tests.scenarios.row import BF16, FP16, Event, Row, Run, layout, switched, to

BF16_IN_FP32 = {**BF16, "data_types": {"grad_accum_dtype": "fp32"}}
STATIC_FP16 = {"fp16": {"enabled": True, "loss_scale": 64}}
LATE = {"dynatrain": {"late": True}}
LEAN = {"dynatrain": {"safety": "lean", "fallback": {"path": "{folder}/fallback"}}}
OFFLOAD = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}
OFFLOAD_ALL = {"zero_optimization": {**OFFLOAD["zero_optimization"], "offload_param": {"device": "cpu"}}}
SGD = {
    "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9, "torch_adam": None}},
    "zero_allow_untested_optimizer": True,
}
WARMUP = {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 5e-3, "warmup_num_steps": 5}}}
ROUND_ROBIN = {"zero_optimization": {"round_robin_gradients": True}}
GLOO = {"dynatrain": {"transport": "gloo"}}
SMALL_BUDGET = {"dynatrain": {"memory_budget_bytes": 65536}}

STAGES = (
    switched("fp32", layout(2, 0), layout(4, 1)),
    switched("fp32", layout(2, 1), layout(4, 3)),
    switched("fp32", layout(4, 3), layout(3, 2), full=True),
    switched("fp32", layout(3, 2), layout(2, 0), full=True),
    switched("fp32", layout(4, 2), layout(2, 3), full=True),
    switched("fp32", layout(2, 3), layout(4, 0), full=True),
    switched("fp32", layout(1, 0), layout(4, 3), full=True),
    switched("fp32", layout(4, 1), layout(1, 2), full=True),
    switched("the stage alone", layout(4, 1), layout(4, 2), full=True),
    switched("the data axis alone", layout(2, 3), layout(3, 3), full=True),
)
PRECISION = (
    switched("bf16", layout(2, 1), layout(4, 3), BF16, bound=0.02),
    switched("bf16", layout(4, 3), layout(2, 0), BF16, bound=0.02, full=True),
    switched("bf16", layout(4, 0), layout(3, 2), BF16, bound=0.02, full=True),
    switched("bf16 with sums in fp32", layout(2, 1), layout(4, 2), BF16_IN_FP32, bound=0.02, full=True),
    switched("fp16", layout(2, 1), layout(4, 3), FP16, bound=0.02, full=True),
    switched("fp16", layout(4, 3), layout(2, 2), FP16, bound=0.02, full=True),
    switched("fp16 of one scale", layout(2, 2), layout(4, 1), STATIC_FP16, bound=0.02, full=True),
)
WAYS = (
    switched("late", layout(2, 1), layout(4, 3), LATE, phases=("late",)),
    switched("late", layout(4, 3), layout(2, 2), LATE, phases=("late",), full=True),
    switched("late in bf16", layout(2, 2), layout(4, 1), {**BF16, **LATE}, bound=0.02, phases=("late",), full=True),
    switched("late by its argument", layout(2, 1), {**layout(4, 1), "late": True}, full=True),
    switched("lean", layout(2, 1), layout(4, 3), LEAN, phases=("save", "restore")),
    switched("lean", layout(4, 3), layout(2, 1), LEAN, phases=("save", "restore"), full=True),
    switched("lean in bf16", layout(3, 2), layout(4, 3), {**BF16, **LEAN}, bound=0.02, phases=("save",), full=True),
    switched("over gloo", layout(2, 1), layout(4, 3), GLOO, full=True),
    switched("in small pieces", layout(4, 3), layout(2, 1), SMALL_BUDGET, full=True),
)
KINDS = (
    switched("offload", layout(2, 1), layout(4, 2), OFFLOAD),
    switched("offload", layout(4, 2), layout(2, 3), OFFLOAD, full=True),
    switched("offload of weights", layout(2, 3), layout(4, 3), OFFLOAD_ALL, full=True),
    switched("momentum", layout(2, 1), layout(4, 3), SGD, full=True),
    switched("a schedule", layout(2, 1), layout(4, 3), WARMUP, full=True),
    switched("round robin", layout(3, 2), layout(4, 1), ROUND_ROBIN, full=True),
    switched("dropout", layout(2, 1), layout(4, 3), model="gpt with dropout", bound=None, full=True),
    switched("dropout", layout(4, 3), layout(3, 1), model="gpt with dropout", bound=None, full=True),
)
LOOPS = (
    switched("a loop of its own", layout(2, 1), layout(4, 3), undisturbed="stock in order", loop="boundary", full=True),
    switched("a loop of its own", layout(4, 2), layout(3, 0), undisturbed="stock in order", loop="boundary", full=True),
    switched("whole global batches", layout(3, 2), layout(4, 1), loop="windows"),
    switched("training_data", layout(2, 1), layout(4, 3), loop="training_data", full=True),
    switched("shares", layout(2, 1), {**layout(2, 1), "shares": (8, 4)}),
)
CHAINS = (
    Row(
        "four switches in a row",
        Run(
            layout(2, 1),
            events=(
                Event(1, "switch", layout(4, 3)),
                Event(2, "switch", layout(3, 2)),
                Event(3, "switch", layout(4, 0)),
                *to(4, **layout(2, 3)),
            ),
        ),
        ends=layout(2, 3),
        resumes=True,
        full=True,
    ),
    Row(
        "there and back, late both times",
        Run(layout(2, 1), events=(Event(2, "switch", layout(4, 3)), *to(4, **layout(2, 1))), config=LATE),
        resumes=True,
        full=True,
    ),
    Row(
        "at the first boundary that all are prepared for",
        Run(layout(2, 1), events=(Event(1, "switch", {"data": 4, "at": None}),), steps=40),
        ends=layout(4, 1),
        bound=1e-3,
        full=True,
    ),
    Row(
        "asked ahead",
        Run(layout(2, 1), events=(Event(1, "switch", {"data": 4, "zero_stage": 3, "at": 4}),)),
        ends=layout(4, 3),
    ),
    Row(
        "before the first step",
        Run(layout(2, 1), events=(Event(0, "switch", {"data": 4, "zero_stage": 3}),)),
        ends=layout(4, 3),
        full=True,
    ),
)
ROWS = (*STAGES, *PRECISION, *WAYS, *KINDS, *LOOPS, *CHAINS)
