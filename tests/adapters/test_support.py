"""The support table: every refused row refuses by its name, every other one is let through."""

from __future__ import annotations

import shutil
from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.runtime.sequence_parallel import parallel_state_sp
from torch import nn

from ds_dynatrain.adapters.deepspeed import support_checks as support
from ds_dynatrain.adapters.deepspeed.support_checks import (
    check_elastic_launch,
    refuse_at_boundary,
    refuse_module,
    refuse_unsupported,
)
from ds_dynatrain.adapters.groups import communicators
from ds_dynatrain.adapters.model import ulysses as sequence
from ds_dynatrain.adapters.versions.deepspeed_versions import present
from ds_dynatrain.engine import initialize
from ds_dynatrain.engine.dynatrain_engine import DynatrainEngine
from ds_dynatrain.errors import SwitchRefused, UnsupportedError
from ds_dynatrain.space import Layout
from ds_dynatrain.support import (
    CONFIG_TABLES,
    Refusal,
    Row,
    Target,
    Verdict,
    all_tables,
    examine,
    refuse_layout,
    row_of,
)
from ds_dynatrain.support import walk as walk_module
from ds_dynatrain.support.checks import needs_offload
from tests.adapters.proofs import NAMES, PROOFS

ROWS = [row for rows in all_tables().values() for row in rows]
CONFIG_ROWS = [row for rows in CONFIG_TABLES.values() for row in rows]
ROOT = Path(__file__).parents[2]
ASKED: dict[str, Any] = {
    "train_batch_size": 8,
    "optimizer": {"type": "AdamW", "params": {"torch_adam": True}},
    "optimizer.type": "AdamW",
    "optimizer.params": {"torch_adam": True},
    "scheduler.type": "CosineAnnealingLR",
    "zero_optimization.stage": 2,
    "log_level": "info",
    "data_types.grad_accum_dtype": "fp32",
    "data_types.keep_in_fp32_modules": ["norm"],
}
"""A value of a key where "some value" would not do."""


@pytest.fixture(autouse=True)
def cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The accelerator is the CPU, whatever this machine has."""
    from deepspeed.accelerator import real_accelerator
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    monkeypatch.setattr(real_accelerator, "ds_accelerator", CPU_Accelerator())


def settings(**more: Any) -> dict[str, Any]:
    optimizer = {"type": "AdamW", "params": {"torch_adam": True}}
    return {"train_batch_size": 4, "optimizer": optimizer, "zero_optimization": {"stage": 1}, **more}


def refused(config: dict[str, Any], words: str, model: Any = None, optimizer: Any = None, mpu: Any = None) -> None:
    with pytest.raises(UnsupportedError, match=words):
        refuse_unsupported(config, nn.Linear(2, 2) if model is None else model, optimizer, mpu)


def accepted(config: dict[str, Any]) -> None:
    refuse_unsupported(config, nn.Linear(2, 2), None, None)


def sections(row: Row) -> list[str]:
    """Keys of the sections around a row's key, outermost first."""
    parts = row.key.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts))]


def asking(row: Row, value: object) -> dict[str, Any]:
    """A configuration in which the row's key has this value, and the sections around it are switched on."""
    config = settings()
    if row.at_start is needs_offload:
        config["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    here: dict[str, Any] = config
    for section in sections(row):
        here[section.rpartition(".")[2]] = here = dict(here.get(section.rpartition(".")[2], {}))
        around = row_of(section)
        if around is not None and around.switch is not None:
            here[around.switch[0]] = not around.switch[1] if isinstance(around.switch[1], bool) else "cpu"
    here[row.key.rpartition(".")[2]] = value
    return config


def name_of(row: Row) -> str:
    """The key, with the values that the row is about: unique in the table."""
    shown = " or ".join(str(value).lower() if isinstance(value, bool) else str(value) for value in row.values)
    return f"{row.key}: {shown}" if shown else row.key


def value_of(row: Row) -> object:
    """A value with which the row's feature is asked for."""
    if row.values:
        return row.values[0]
    if row.key == "optimizer.type":
        return "Unheard"
    if row.key in ASKED:
        return ASKED[row.key]
    if row.switch is not None:
        off = row.switch[1]
        return {row.switch[0]: (not off) if isinstance(off, bool) else "cpu" if isinstance(off, str) else 2}
    if any(other.key.startswith(f"{row.key}.") for other in CONFIG_ROWS):
        return {"x": 1} if row.verdict is Verdict.AT_START else {}
    return next(value for value in (True, False) if not row.is_off(value) and not row.is_about(value))


# ---- the rows ----------------------------------------------------------------------------------------------------


def test_no_row_stands_twice() -> None:
    names = [name_of(row) for row in ROWS]
    assert sorted(names) == sorted(set(names))


@pytest.mark.parametrize("row", ROWS, ids=name_of)
def test_a_row_is_complete(row: Row) -> None:
    """What is refused says why and what to do; what works unconditionally needs no word."""
    if row.verdict in (Verdict.AT_START, Verdict.AT_SWITCH):
        assert row.why and row.instead
    assert row.verdict is not Verdict.NOTE or row.why
    assert row.verdict is not Verdict.WORKS or not row.why


@pytest.mark.parametrize("row", CONFIG_ROWS, ids=name_of)
def test_the_sections_around_a_key_have_rows(row: Row) -> None:
    for section in sections(row):
        around = row_of(section)
        assert around is not None and not around.below


@pytest.mark.parametrize("proof", NAMES)
def test_a_proof_is_there(proof: str) -> None:
    """`path`, or `path::test`."""
    path, _, test = proof.partition("::")
    assert (ROOT / path).is_file()
    assert not test or f"def {test}(" in (ROOT / path).read_text()


def test_usages_have_proofs() -> None:
    assert [name_of(row) for row in all_tables()["usage"] if "::" not in PROOFS.get(name_of(row), "")] == []
    assert not PROOFS.keys() - {name_of(row) for row in ROWS}


@pytest.mark.parametrize("row", [row for row in CONFIG_ROWS if row.verdict is Verdict.AT_START], ids=name_of)
def test_a_refused_key(row: Row) -> None:
    with pytest.raises(UnsupportedError) as caught:
        accepted(asking(row, value_of(row)))
    assert str(caught.value).startswith(row.key)
    assert row.why in str(caught.value) and row.instead in str(caught.value)


@pytest.mark.parametrize(
    ("row", "value"),
    [(row, value) for row in CONFIG_ROWS if row.verdict is Verdict.AT_START for value in row.off],
    ids=lambda part: name_of(part) if isinstance(part, Row) else str(part),
)
def test_a_refused_key_that_is_off(row: Row, value: object) -> None:
    accepted_by_this_series(asking(row, value))


@pytest.mark.parametrize(
    "row", [row for row in CONFIG_ROWS if row.verdict is Verdict.AT_START and row.switch], ids=name_of
)
def test_a_refused_section_that_is_off(row: Row) -> None:
    assert row.switch is not None
    accepted(asking(row, {row.switch[0]: row.switch[1], "anything": 1}))
    accepted(asking(row, {"anything": 1}))


@pytest.mark.parametrize("row", [row for row in CONFIG_ROWS if row.verdict is not Verdict.AT_START], ids=name_of)
def test_a_key_that_works(row: Row) -> None:
    accepted_by_this_series(asking(row, value_of(row)))


def accepted_by_this_series(config: dict[str, Any]) -> None:
    """Accepted, or refused by the series of DeepSpeed that is installed, and not by the table: then skipped."""
    try:
        accepted(config)
    except UnsupportedError as error:
        if str(error).partition(":")[0].partition(" ")[0] not in present().refused:
            raise
        pytest.skip(f"refused with this series of DeepSpeed (adapters/versions/deepspeed_versions.py): {error}")


# ---- how a configuration is read ---------------------------------------------------------------------------------


def test_what_is_supported_passes() -> None:
    accepted(settings(gradient_clipping=1.0, bf16={"enabled": True}))
    config = settings()
    del config["optimizer"]
    refuse_unsupported(config, nn.Linear(2, 2), torch.optim.AdamW, None)
    refuse_unsupported({"train_batch_size": 1}, nn.Linear(2, 2), lambda parameters: None, None)


def test_an_unknown_key() -> None:
    refused(settings(an_unknown_key="x"), "^an_unknown_key: an unknown key, which was not tried; remove it")
    refused(settings(gradient_cliping=1.0), "^gradient_cliping: an unknown key.*did you mean 'gradient_clipping'")
    refused(settings(an_unknown_key=None), "^an_unknown_key: an unknown key")
    zero = {"stage": 1, "reduce_bucketsize": 5}
    refused(settings(zero_optimization=zero), r"zero_optimization\.reduce_bucketsize.*'zero_optimization.reduce_bucket")


def test_auto() -> None:
    """DeepSpeed leaves such a key out in some sections; elsewhere it would meet the word in its arithmetic."""
    accepted(settings(zero_optimization={"stage": 1, "reduce_bucket_size": "auto", "round_robin_gradients": "auto"}))
    refused(settings(gradient_clipping="auto"), "gradient_clipping = 'auto': .* filled in by Hugging Face")


def test_no_section() -> None:
    refused(settings(zero_optimization=True), "^zero_optimization: True is no object of keys")
    refused(settings(optimizer="AdamW"), "^optimizer = 'AdamW': 'AdamW' is no object of keys")


def test_one_is_not_true() -> None:
    row = Row("a size", Verdict.AT_START, "why", "instead", off=(None, 1, 0.5))
    assert row.is_off(1) and row.is_off(1.0) and row.is_off(0.5) and not row.is_off(True) and not row.is_off(0)
    row = Row("a switch", Verdict.AT_START, "why", "instead")
    assert row.is_off(False) and row.is_off({}) and not row.is_off(0) and not row.is_off(1)


def test_findings() -> None:
    found = {finding.key: finding for finding in examine(settings(fp16={"enabled": False}, what=1))}
    assert found["zero_optimization.stage"].verdict is Verdict.NOTE
    assert found["fp16"].is_off and found["fp16"].verdict is Verdict.WORKS
    assert found["what"].row is None and found["what"].verdict is Verdict.AT_START


def test_a_check_of_the_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    def not_there(target: Target) -> Refusal | None:
        return Refusal("stage 0 cannot have it", "use stage 1") if target.layout.zero_stage == 0 else None

    row = Row("prescale_gradients", Verdict.NOTE, "not at stage 0", at_layout=not_there)
    monkeypatch.setitem(walk_module.CONFIG_ROWS, "prescale_gradients", (row,))  # type: ignore[arg-type]
    accepted(settings(prescale_gradients=True))
    refuse_layout(Target(settings(prescale_gradients=True), Layout(data=2, zero_stage=1)))
    refuse_layout(Target(settings(prescale_gradients=False), Layout(data=2, zero_stage=0)))
    with pytest.raises(SwitchRefused, match="prescale_gradients: stage 0 cannot have it; use stage 1"):
        refuse_layout(Target(settings(prescale_gradients=True), Layout(data=2, zero_stage=0)))


def test_no_optimizer() -> None:
    refused({"train_batch_size": 4}, "no optimizer: .*pass one to initialize")


@pytest.mark.parametrize("name", ["OneBitAdam", "Adafactor", "Shampoo", "Lamb", "LBFGS", "MuAdam", "Adadelta"])
def test_optimizers_of_the_configuration(name: str) -> None:
    refused(settings(optimizer={"type": name, "params": {"lr": 1e-3}}), f"optimizer.type = '{name}': .*; (use|pass) ")


def test_the_fused_optimizer_of_deepspeed_needs_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    fused = settings(optimizer={"type": "AdamW"})
    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}")
    refuse_unsupported(fused, nn.Linear(2, 2), None, None)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    refused(fused, r"optimizer\.params\.torch_adam: .* there is no C\+\+ compiler here; set it to true")
    refuse_unsupported(settings(), nn.Linear(2, 2), None, None)


# ---- usage -------------------------------------------------------------------------------------------------------


def test_mpu() -> None:
    refuse_unsupported(settings(), nn.Linear(2, 2), None, parallel_state_sp)
    refused(settings(), "^mpu without get_sequence_parallel_group: only sequence", mpu=object())
    getters = {name: lambda: 2 for name in sequence.GETTERS}
    megatron = SimpleNamespace(**getters, get_tensor_model_parallel_world_size=lambda: 2)
    refused(settings(), r"^mpu with get_tensor_model_parallel_world_size\(\) = 2: only sequence", mpu=megatron)
    refuse_unsupported(settings(), nn.Linear(2, 2), None, SimpleNamespace(**getters))


def test_mesh_param() -> None:
    with pytest.raises(UnsupportedError, match=r"^mesh_param: with DeepSpeed's mesh, .* drift apart; pass mpu="):
        refuse_unsupported(settings(), nn.Linear(2, 2), None, None, (2, 2))
    refused(settings(data_parallel_size=2, sequence_parallel_size=2), "^data_parallel_size = 2: .* drift apart")


def test_fpdt() -> None:
    from deepspeed.sequence import fpdt_layer  # it takes two seconds: not of every worker

    layer = nn.Module.__new__(fpdt_layer.FPDT_Attention)
    nn.Module.__init__(layer)
    refused(settings(), "^'0' is a FPDT_Attention: .*; use deepspeed.sequence.layer", nn.Sequential(layer))


def test_ulysses_of_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    utilities = pytest.importorskip("transformers.modeling_utils")

    def wrapped() -> None:
        pass

    wrapped.__module__ = "deepspeed.runtime.sequence_parallel.ulysses_sp"
    refuse_unsupported(settings(), nn.Linear(2, 2), None, parallel_state_sp)
    monkeypatch.setitem(utilities.ALL_ATTENTION_FUNCTIONS, "sdpa", wrapped)
    refused(settings(), "^UlyssesSPAttentionHF: it keeps the sizes", mpu=parallel_state_sp)


def test_parameters() -> None:
    refused(settings(), "'0.weight' is torch.float64", nn.Sequential(nn.Linear(2, 2).double()))
    expert = nn.Linear(2, 2)
    expert.weight.allreduce = False  # type: ignore[attr-defined]
    refused(settings(), "'0.weight' is an expert parameter", nn.Sequential(expert))


def test_modules() -> None:
    refused(settings(), "'0' has sparse gradients", nn.Sequential(nn.Embedding(3, 2, sparse=True)))


def test_a_wrapped_module_at_stage_3() -> None:
    parts = OrderedDict[str, Any](a=nn.Linear(2, 2), b=torch.compile(nn.Linear(2, 2)))
    refuse_module(nn.Sequential(parts), Layout(data=2, zero_stage=2), {})
    with pytest.raises(SwitchRefused, match=r"torch\.compile: 'b' is wrapped, and this is ZeRO stage 3"):
        refuse_module(nn.Sequential(parts), Layout(data=2, zero_stage=3), {})
    with pytest.raises(SwitchRefused, match=r"torch\.compile: 'the model' is wrapped"):
        refuse_module(torch.compile(nn.Linear(2, 2)), Layout(data=2, zero_stage=3), {})


def test_a_module_compiled_in_place() -> None:
    model = nn.Linear(2, 2)
    model.compile()
    refuse_unsupported(settings(), model, None, None)
    refuse_module(model, Layout(data=2, zero_stage=3), {})


@pytest.fixture
def accelerated(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed says that it computes on a GPU."""
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    monkeypatch.setattr(CPU_Accelerator, "device_name", lambda self, index=None: "cuda")


def test_an_elastic_launch_without_nccl(accelerated: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """What becomes of a collective whose member dies is known of NCCL alone."""
    monkeypatch.setattr(communicators, "device_backend", lambda: "hccl")
    monkeypatch.setattr(support, "device_backend", lambda: "hccl")
    with pytest.raises(UnsupportedError, match=r"an elastic launch on 'cuda' with hccl: .*no MIN:MAX"):
        check_elastic_launch()


def test_an_elastic_launch_with_an_old_nccl(accelerated: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(communicators, "device_backend", lambda: "nccl")
    monkeypatch.setattr(support, "nccl_version", lambda: (2, 25, 1))
    with pytest.raises(UnsupportedError, match=r"an elastic launch with NCCL 2.25.1: .*newer"):
        check_elastic_launch()


def test_an_elastic_launch_with_nccl(accelerated: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's watchdog is told to do nothing, before anything is made."""
    settled = list[str]()
    monkeypatch.setattr(communicators, "device_backend", lambda: "nccl")
    monkeypatch.setattr(support, "nccl_version", lambda: (2, 28, 9))
    monkeypatch.setattr(initialize, "settle_watchdog", lambda: settled.append("once"))
    initialize._settle_elastic_launch()
    assert settled == ["once"]


def test_an_elastic_launch_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(initialize, "settle_watchdog", lambda: pytest.fail("there is none"))
    initialize._settle_elastic_launch()


def test_several_devices() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    for number, part in enumerate(model):
        place = torch.device("cuda", number)
        kind = type("Elsewhere", (nn.Parameter,), {"device": property(lambda self, place=place: place)})
        part.weight = kind(part.weight.detach())
    refused(settings(), "the model lies on cuda:0, cuda:1: .*nproc-per-node", model)


def test_a_cpu_optimizer_at_stage_0(accelerated: None) -> None:
    config = settings(zero_optimization={"stage": 1, "offload_optimizer": {"device": "cpu"}})
    refuse_module(nn.Linear(1, 1), Layout(zero_stage=1), config)
    with pytest.raises(SwitchRefused, match=r"offload_optimizer in .* cannot step weights on the device"):
        refuse_module(nn.Linear(1, 1), Layout(zero_stage=0), config)


class Standing:
    """As much of a host, and of its engine, as a boundary looks at."""

    def __init__(self, micro_steps: int = 4, **more: Any) -> None:
        self.engine, self.micro_steps = self, micro_steps
        self.inside_no_sync_ctxt = False
        self.gathers, self.gradients = SimpleNamespace(open=set()), SimpleNamespace(seen=set())
        self.optimizer = SimpleNamespace(_coalesce_grad_reduction=False)
        self.__dict__.update(more)

    def gradient_accumulation_steps(self) -> int:
        return 2


def test_what_must_not_be_open_at_a_boundary() -> None:
    refuse_at_boundary(Standing())
    for engine, words in (
        (Standing(5), "an accumulation window is open: 1 of 2 micro-batches"),
        (Standing(inside_no_sync_ctxt=True), "a no_sync window is open"),
        (
            Standing(optimizer=SimpleNamespace(_coalesce_grad_reduction=True)),
            "a coalesce_grad_reduction window is open",
        ),
        (Standing(gathers=SimpleNamespace(open={1, 2})), r"GatheredParameters block is open \(2\)"),
        (Standing(gradients=SimpleNamespace(seen={1, 2, 3})), "gradients of 3 parameters wait for an optimizer step"),
        (Standing(optimizer=SimpleNamespace(offloaded_states={"lp_params"})), "has moved lp_params away"),
    ):
        with pytest.raises(SwitchRefused, match=words):
            refuse_at_boundary(engine)


def test_no_switch_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support, "is_capturing", lambda: True)
    with pytest.raises(SwitchRefused, match=r"a graph is being captured.*end the capture before the boundary"):
        refuse_at_boundary(Standing())


def test_calls_of_an_engine() -> None:
    engine = object.__new__(DynatrainEngine)
    engine.__dict__["_parts"] = None
    for call, words in (
        (lambda: engine.compile(schedule=[]), r"engine.compile\(schedule=...\): its passes build"),
        (lambda: engine.compile(compiled_autograd_enabled=True), "compiled_autograd_enabled=True.: it also traces"),
        (lambda: engine.set_train_batch_size(8), r"set_train_batch_size\(8\): batch sizes are fixed"),
        (lambda: engine.set_train_micro_batch_size(2), r"set_train_micro_batch_size\(2\): batch sizes are fixed"),
    ):
        with pytest.raises(UnsupportedError, match=words):
            call()
