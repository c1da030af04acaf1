"""Rows of what goes with a `PipelineModule`."""

from __future__ import annotations

from ds_dynatrain.support.row import Row, Verdict

_TESTS = "tests/engine/test_pipeline.py::test_"

PIPELINES = (
    Row(
        "PipelineModule",
        Verdict.NOTE,
        "built in stages, or with num_stages=1 and dynatrain.layout.pipe: see [pipelines](pipeline.md)",
        proof="tests/engine/test_pipeline_start.py::test_only_the_call_is_another_one",
    ),
    Row(
        "training_data of a pipeline",
        Verdict.NOTE,
        "read in its own order, as in DeepSpeed's pipeline engine; an epoch is a whole number of global batches, or "
        "dataloader_drop_last leaves its rest out: see [pipelines](pipeline-batches.md#batches)",
        proof="tests/engine/test_pipeline_data.py::test_training_data_is_what_deepspeed_trains_on",
    ),
    Row(
        "train_batch, set_dataiterator, set_dataloader of a pipeline with an iterator of one's own",
        Verdict.NOTE,
        "it serves until a switch changes pipe, data, shares or the members, then train_batch asks for another one: "
        "see [pipelines](pipeline-batches.md#batches)",
        proof="tests/engine/test_pipeline_data.py::test_iterators_of_ones_own_across_changes",
    ),
    Row(
        "pipelines side by side with different numbers of micro-batches",
        Verdict.NOTE,
        "by layout.shares, or where data does not divide them; refused with BatchNorm, with experts that drop tokens "
        "and with an expert axis: see [pipelines](pipeline-batches.md#batches)",
        proof="tests/engine/test_columns.py::test_walks",
    ),
    Row(
        "layers of deepspeed.moe in a pipeline",
        Verdict.NOTE,
        "stages and the expert size change together; a stage may be without experts: see [pipelines](pipeline.md)",
        proof="tests/engine/test_pipeline_experts.py::test_walks",
    ),
    Row(
        "a pipeline in bf16 without ZeRO",
        Verdict.NOTE,
        "DeepSpeed's stage 0 is then BF16_Optimizer: cut as stage 1, gradients accumulated in bf16",
        proof="tests/engine/test_pipeline_precision.py::test_walks",
    ),
    Row(
        "options of ZeRO for a pipeline in bf16 without it",
        Verdict.AT_SWITCH,
        "BF16_Optimizer, which DeepSpeed takes there, knows no round_robin_gradients, parameter_alignment or offload",
        "leave the key out, or take zero_stage=1",
        proof="tests/engine/test_pipeline_precision.py::test_what_does_not_go_together",
    ),
    Row(
        "a pipeline in fp16, or with CPU offload",
        Verdict.WORKS,
        proof="tests/engine/test_pipeline_precision.py::test_walks",
    ),
    Row(
        "stages in fp16 without ZeRO",
        Verdict.AT_SWITCH,
        "DeepSpeed's optimizer there takes the norm of the first stage's gradients alone, and waits for ever where a "
        "stage has nothing of an optimizer group",
        "take zero_stage=1, or pipe=1",
        proof="tests/engine/test_pipeline_precision.py::test_what_does_not_go_together",
    ),
    Row(
        "torch_autocast with a pipeline",
        Verdict.NOTE,
        "plain DeepSpeed reads gradients of activations in a wrong type on stages that receive fp32 and send bf16; "
        "here it does not",
        proof="tests/engine/test_pipeline_precision.py::test_autocast_as_where_it_was_started",
    ),
    Row(
        "data_efficiency beside a pipeline",
        Verdict.AT_START,
        "data_efficiency is not followed with a PipelineModule yet",
        "leave it out",
        proof=f"{_TESTS}what_cannot_be_is_refused",
    ),
    Row(
        "AutoEP in a pipeline",
        Verdict.NOTE,
        "with a moe_layer_pattern for names as 3.mlp, of a layer's number in the whole model; a stage may be without "
        "experts: see [pipelines](pipeline.md)",
        proof="tests/engine/test_pipeline_autoep.py::test_walks",
    ),
    Row(
        "engine.compile of a pipeline",
        Verdict.NOTE,
        "its layers one by one, also those that a switch makes; after a change of stages layers that you compiled "
        "yourself run as they were written",
        proof="tests/engine/test_pipeline_precision.py::test_compiled_layers",
    ),
    Row(
        "engine.micro_batch of a pipeline",
        Verdict.AT_START,
        "train_batch draws the micro-batches of a global batch itself",
        "call engine.train_batch()",
        proof="tests/engine/test_draw_ahead.py::test_a_pipeline_draws_for_itself",
    ),
)
