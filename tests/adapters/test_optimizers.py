"""Rules of optimizers: which states they keep, how those go out and in, what is refused, what users register."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import ds_dynatrain
from ds_dynatrain.adapters.zero import optimizers
from ds_dynatrain.adapters.zero.optimizers import (
    MUON,
    OptimizerRule,
    check_optimizer,
    moment_kinds,
    moment_types,
    refuse_optimizer_layout,
    register_optimizer,
    rule_of,
)
from ds_dynatrain.adapters.zero.state import ElementTypes, Scalars
from ds_dynatrain.adapters.zero.zero_stage import common_scalars, level_counts, read_state, write_state
from ds_dynatrain.errors import CensusError, ConfigError, SwitchRefused, UnsupportedError
from ds_dynatrain.space import Layout

OPTIM = torch.optim
TYPES = ElementTypes(weight=torch.bfloat16, gradient=torch.bfloat16)
MOMENTS: list[tuple[Any, dict[str, Any], tuple[str, ...], tuple[str, ...]]] = [
    (OPTIM.Adam, {}, ("exp_avg", "exp_avg_sq"), ("step",)),
    (OPTIM.AdamW, {"amsgrad": True}, ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"), ("step",)),
    (OPTIM.SGD, {"momentum": 0.9, "nesterov": True}, ("momentum_buffer",), ()),
    (OPTIM.SGD, {"momentum": 0.9, "dampening": 0.5}, ("momentum_buffer",), ()),
    (OPTIM.SGD, {}, (), ()),
    (OPTIM.RMSprop, {}, ("square_avg",), ("step",)),
    (OPTIM.RMSprop, {"momentum": 0.5, "centered": True}, ("square_avg", "momentum_buffer", "grad_avg"), ("step",)),
    (OPTIM.NAdam, {}, ("exp_avg", "exp_avg_sq"), ("step", "mu_product")),
    (OPTIM.RAdam, {}, ("exp_avg", "exp_avg_sq"), ("step",)),
    (OPTIM.Adamax, {}, ("exp_avg", "exp_inf"), ("step",)),
]


def stepped(kind: Any, steps: int = 3, **options: Any) -> tuple[Any, nn.Parameter]:
    torch.manual_seed(1)
    parameter = nn.Parameter(torch.randn(2, 3))
    optimizer = kind([parameter], lr=0.1, **options)
    for _ in range(steps):
        parameter.grad = torch.randn(2, 3)
        optimizer.step()
    return optimizer, parameter


@pytest.mark.parametrize(("kind", "options", "moments", "scalars"), MOMENTS)
def test_states_go_out_and_in(
    kind: Any, options: dict[str, Any], moments: tuple[str, ...], scalars: tuple[str, ...]
) -> None:
    optimizer, parameter = stepped(kind, **options)
    check_optimizer(optimizer, {}, Layout(zero_stage=0))
    flats, values = read_state(optimizer, parameter, 0)
    assert {name: flat.shape for name, flat in flats.items()} == dict.fromkeys(moments, (6,))
    assert tuple(values) == scalars
    before = {name: value.clone() for name, value in optimizer.state[parameter].items()}
    assert set(before) == {*moments, *scalars}
    optimizer.state.clear()
    write_state(optimizer, parameter, 0, flats, values)
    after = optimizer.state.get(parameter, {})
    assert list(after) == list(before)
    assert all(torch.equal(after[name], before[name]) and after[name].dtype == before[name].dtype for name in before)
    assert all(after[name].data_ptr() == flat.data_ptr() for name, flat in flats.items())
    other, twin = stepped(kind, **options)
    parameter.grad = twin.grad = torch.ones(2, 3)
    optimizer.step()
    other.step()
    assert torch.equal(parameter, twin)


def test_no_state_before_the_first_step() -> None:
    optimizer, parameter = stepped(OPTIM.Adam, steps=0)
    assert read_state(optimizer, parameter, 0) == ({}, {})
    write_state(optimizer, parameter, 0, {}, {})
    assert not optimizer.state


def test_kinds_by_group() -> None:
    parameters = [nn.Parameter(torch.ones(2)) for _ in range(3)]
    groups: list[dict[str, Any]] = [
        {"params": [parameters[0]], "momentum": 0.9},
        {"params": [parameters[1]], "momentum": 0.0},
        {"params": [parameters[2]], "momentum": 0.5},
    ]
    (kind,) = moment_kinds(OPTIM.SGD(groups, lr=0.1), TYPES)
    assert (kind.name, kind.itemsize, kind.groups) == ("momentum_buffer", 4, frozenset({0, 2}))
    assert moment_kinds(OPTIM.SGD(groups[1:2], lr=0.1), TYPES) == ()
    assert [kind.groups for kind in moment_kinds(OPTIM.Adam(groups, lr=0.1), TYPES)] == [None, None]


class Mine(OPTIM.AdamW):
    """A subclass may keep other states."""


class Adafactor(OPTIM.AdamW):
    """A name that is refused, whatever is in it."""


@pytest.mark.parametrize("kind", [OPTIM.Adadelta, OPTIM.ASGD, OPTIM.Rprop, Mine])
def test_an_unknown_optimizer_is_refused(kind: Any) -> None:
    with pytest.raises(UnsupportedError, match=rf"{kind.__name__} is not among .*AdamW.*register_optimizer"):
        check_optimizer(kind([nn.Parameter(torch.ones(1))], lr=0.1), {}, Layout(zero_stage=0))


@pytest.mark.parametrize("kind", [OPTIM.Adafactor, OPTIM.LBFGS, OPTIM.SparseAdam, Adafactor])
def test_refused_by_name(kind: Any) -> None:
    optimizer = kind([nn.Parameter(torch.ones(1))], lr=0.1)
    with pytest.raises(UnsupportedError, match=rf"optimizer [\w.]+\.{kind.__name__}: it "):
        check_optimizer(optimizer, {}, Layout(zero_stage=0))
    with pytest.raises(UnsupportedError, match=rf"optimizer [\w.]+\.{kind.__name__}: it "):
        register_optimizer(kind, moments=("exp_avg",))


def test_eight_bit_optimizers_are_refused_by_module() -> None:
    made = type("AdamW8bit", (OPTIM.Optimizer,), {"__module__": "bitsandbytes.optim.adamw"})
    under = type("Mine8bit", (made,), {"__module__": "my.own"})
    for cls in (made, under):
        with pytest.raises(UnsupportedError, match=r"8bit: .* not one value per element"):
            rule_of(cls([nn.Parameter(torch.ones(1))], {}))  # type: ignore[arg-type]


def test_hyper_parameters_that_are_tensors_are_refused() -> None:
    parameter = nn.Parameter(torch.ones(1))
    with pytest.raises(UnsupportedError, match="optimizer group 0: lr is a tensor"):
        check_optimizer(OPTIM.AdamW([parameter], lr=torch.tensor(0.1)), {}, Layout(zero_stage=0))
    with pytest.raises(UnsupportedError, match="optimizer group 0: capturable"):
        check_optimizer(OPTIM.AdamW([parameter], lr=0.1, capturable=True), {}, Layout(zero_stage=0))


def test_an_unexpected_state_is_an_error() -> None:
    optimizer, parameter = stepped(OPTIM.AdamW)
    optimizer.state[parameter]["more"] = torch.zeros(1)
    with pytest.raises(CensusError, match=r"AdamW keeps .*'more'"):
        read_state(optimizer, parameter, 0)
    optimizer.state[parameter] = {"step": torch.tensor(1.0)}
    with pytest.raises(CensusError, match="expected"):
        read_state(optimizer, parameter, 0)
    optimizer, parameter = stepped(OPTIM.AdamW)
    optimizer.state[parameter]["exp_avg"] = torch.zeros(2)
    with pytest.raises(CensusError, match="exp_avg in group 0 is not one value per element"):
        read_state(optimizer, parameter, 0)


def test_common_scalars() -> None:
    scalars = Scalars({"step": {0: 3.0, 1: 3.0, 2: 2.0}})
    assert common_scalars(scalars, [0, 1], "here") == {"step": 3.0}
    assert common_scalars(scalars, [], "here") == {}
    with pytest.raises(SwitchRefused, match=r"here: tensor 0 has .*3\.0.*tensor 2 has .*2\.0"):
        common_scalars(scalars, [0, 1, 2], "here")


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_layouts_that_deepspeed_does_not_take(stage: int) -> None:
    layout = Layout(zero_stage=stage, data=2)
    parameter = nn.Parameter(torch.ones(2))
    untested = OPTIM.SGD([parameter], lr=0.1)
    with pytest.raises(SwitchRefused, match=f"SGD under ZeRO stage {stage}: .*zero_allow_untested_optimizer"):
        refuse_optimizer_layout(untested, {}, layout)
    with pytest.raises(UnsupportedError, match=f"SGD under ZeRO stage {stage}"):
        check_optimizer(untested, {}, layout)
    refuse_optimizer_layout(untested, {"zero_allow_untested_optimizer": True}, layout)
    refuse_optimizer_layout(untested, {}, Layout(zero_stage=0))
    refuse_optimizer_layout(OPTIM.AdamW([parameter]), {}, layout)
    replaced = OPTIM.Adagrad([parameter])
    refuse_optimizer_layout(replaced, {}, Layout(zero_stage=0, data=4))
    with pytest.raises(SwitchRefused, match=f"Adagrad under ZeRO stage {stage}: DeepSpeed replaces it"):
        refuse_optimizer_layout(replaced, {"zero_allow_untested_optimizer": True}, layout)


@pytest.mark.parametrize(
    ("stage", "config", "words"),
    [
        (1, {}, None),
        (2, {"bf16": {"enabled": True}}, None),
        (3, {}, "needs whole gradients; set zero_optimization.reduce_scatter to false"),
        (0, {"bf16": {"enabled": True}}, "in low precision"),
        (3, {"zero_optimization": {"reduce_scatter": False}, "bf16": {"enabled": True}}, None),
        (0, {"bf16": {"enabled": False}}, None),
        (1, {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}, "offload_optimizer: its momentum is fp32"),
        (1, {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}, "grad_accum_dtype of another"),
        (2, {"bf16": {"enabled": True}, "communication_data_type": "fp32"}, "communication_data_type of another"),
        (2, {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "bf16"}}, None),
    ],
)
def test_layouts_of_muon(stage: int, config: dict[str, Any], words: str | None) -> None:
    made = type("MuonWithAuxAdam", (OPTIM.SGD,), {"__module__": MUON.rpartition(".")[0]})
    optimizer = made([nn.Parameter(torch.ones(2, 2))], lr=0.1)
    if words is None:
        refuse_optimizer_layout(optimizer, config, Layout(zero_stage=stage, data=2))
        return
    with pytest.raises(SwitchRefused, match=words):
        refuse_optimizer_layout(optimizer, config, Layout(zero_stage=stage, data=2))


def test_muon_is_clipped_in_two_ways() -> None:
    made = type("MuonWithAuxAdam", (OPTIM.SGD,), {"__module__": MUON.rpartition(".")[0]})
    optimizer = made([nn.Parameter(torch.ones(2, 2))], lr=0.1)
    config: dict[str, Any] = {"zero_optimization": {"reduce_scatter": False}, "gradient_clipping": 1.0}
    zero, *others = (Layout(zero_stage=stage, data=2) for stage in range(4))
    for other in others:
        for present, target, stay in ((zero, other, "stage 0"), (other, zero, "stages 1 to 3")):
            with pytest.raises(SwitchRefused, match=f"clips its gradients .*stay in {stay}, or leave"):
                refuse_optimizer_layout(optimizer, config, target, present)
            refuse_optimizer_layout(optimizer, {**config, "gradient_clipping": 0.0}, target, present)
            refuse_optimizer_layout(optimizer, config, present, present.replace(data=4))
        refuse_optimizer_layout(optimizer, config, other, others[0])


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        (Layout(zero_stage=1, data=2, pipe=2), "Muon under ZeRO stage 1 with pipe=2: "),
        (Layout(zero_stage=2, data=2, expert=2), "Muon under ZeRO stage 2 with expert=2: "),
        (Layout(zero_stage=0, tensor=2), "Muon with tensor=2: each rank would orthogonalize its own part"),
        (Layout(zero_stage=2, tensor=2), "Muon with tensor=2"),
        (Layout(zero_stage=1, data=2, sequence=2), None),
        (Layout(zero_stage=0, pipe=2), None),
    ],
)
def test_axes_of_muon(layout: Layout, words: str | None) -> None:
    made = type("MuonWithAuxAdam", (OPTIM.SGD,), {"__module__": MUON.rpartition(".")[0]})
    optimizer = made([nn.Parameter(torch.ones(2, 2))], lr=0.1)
    if words is None:
        refuse_optimizer_layout(optimizer, {}, layout)
        return
    with pytest.raises(SwitchRefused, match=words):
        refuse_optimizer_layout(optimizer, {}, layout)


def test_muon_has_two_kinds_of_groups() -> None:
    made = type("MuonWithAuxAdam", (OPTIM.SGD,), {"__module__": MUON.rpartition(".")[0]})
    groups: list[dict[str, Any]] = [
        {"params": [nn.Parameter(torch.ones(2))], "use_muon": muon} for muon in (False, True, False)
    ]
    optimizer = made(groups, lr=0.1)
    optimizer.aux_optimizer = OPTIM.AdamW([nn.Parameter(torch.ones(2))])
    types = ElementTypes(torch.bfloat16, torch.bfloat16, moments=moment_types(optimizer, torch.bfloat16))
    kinds = {kind.name: (kind.itemsize, kind.groups, kind.whole_tensors) for kind in moment_kinds(optimizer, types)}
    assert kinds == {
        "exp_avg": (4, frozenset({0, 2}), False),
        "exp_avg_sq": (4, frozenset({0, 2}), False),
        "momentum_buffer": (2, frozenset({1}), True),
    }


def test_the_momentum_of_whole_tensors_goes_out_and_in() -> None:
    made = type("MuonWithAuxAdam", (OPTIM.SGD,), {"__module__": MUON.rpartition(".")[0]})
    part = nn.Parameter(torch.ones(4))
    optimizer = made([{"params": [part], "use_muon": True}], lr=0.1)
    optimizer.aux_optimizer = None
    optimizer.state[part] = {"momentum_buffer": torch.arange(9.0)}
    flats, values = read_state(optimizer, part, 0, whole=9)
    assert flats["momentum_buffer"].tolist() == list(range(9)) and values == {}
    for whole in (None, 4, 8):
        with pytest.raises(CensusError, match="momentum_buffer in group 0 is not one value per element"):
            read_state(optimizer, part, 0, whole)
    optimizer.state.clear()
    write_state(optimizer, part, 0, flats, values)
    assert optimizer.state[part]["momentum_buffer"].shape == (9,)


# ---- registered by users ---------------------------------------------------------------------------------------------


class Signed(OPTIM.Optimizer):
    """Signs of an average; counts in a Python int and keeps a decaying Python float."""

    def __init__(self, params: Any, lr: float = 0.1, slow: bool = False) -> None:
        super().__init__(params, {"lr": lr, "slow": slow})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state.update(count=0, rate=1.0, total=torch.zeros(()), average=torch.zeros_like(parameter))
                    if group["slow"]:
                        state["second"] = torch.zeros_like(parameter)
                state["count"] += 1
                state["rate"] *= 0.9
                state["total"] += 1
                state["average"].lerp_(parameter.grad, 0.1)
                parameter.sub_(torch.sign(state["average"]), alpha=group["lr"] * state["rate"])


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A registry of its own for a test."""
    monkeypatch.setattr(optimizers, "_registered", {})
    yield


SCALARS: dict[str, Any] = {"count": 0, "rate": 1.0, "total": torch.zeros(())}


@pytest.mark.parametrize("slow", [False, True])
@pytest.mark.usefixtures("own")
def test_a_registered_class_keeps_its_types(slow: bool) -> None:
    assert ds_dynatrain.register_optimizer is register_optimizer
    moments = lambda group: ("average", "second") if group["slow"] else ("average",)  # noqa: E731
    assert register_optimizer(Signed, moments=moments, scalars=SCALARS) is Signed
    optimizer, parameter = stepped(Signed, slow=slow)
    check_optimizer(optimizer, {}, Layout(zero_stage=0))
    flats, values = read_state(optimizer, parameter, 0)
    assert values == {"count": 3.0, "rate": pytest.approx(0.729), "total": 3.0}
    before = dict(optimizer.state[parameter])
    optimizer.state.clear()
    write_state(optimizer, parameter, 0, flats, values)
    after = optimizer.state[parameter]
    assert {name: type(value) for name, value in after.items()} == {name: type(v) for name, v in before.items()}
    assert (after["count"], after["rate"], after["total"].item()) == (3, before["rate"], 3.0)


@pytest.mark.usefixtures("own")
def test_registration_that_contradicts() -> None:
    register_optimizer(Signed, moments=["average"], scalars=SCALARS)
    with pytest.raises(ConfigError, match="Signed is registered already"):
        register_optimizer(Signed, moments=["average"])
    with pytest.raises(ConfigError, match="AdamW are known already"):
        register_optimizer(OPTIM.AdamW, moments=["exp_avg"])
    with pytest.raises(ConfigError, match=r"no subclass of torch\.optim\.Optimizer"):
        register_optimizer(nn.Linear, moments=["a"])  # type: ignore[arg-type]
    for moments, scalars, words in [
        (["master"], {}, "cannot be named 'master'"),
        (["a", "a"], {}, "named twice"),
        (["a"], {"a": 0}, "named twice"),
        (["a"], {"b": True}, "starts as True"),
        (["a"], {"b": torch.zeros(2)}, r"tensor of shape \(2,\)"),
    ]:
        with pytest.raises(ConfigError, match=words):
            register_optimizer(Mine, moments=moments, scalars=scalars)  # type: ignore[arg-type]


def test_counts_by_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizers, "_registered", {Mine: OptimizerRule(("exp_avg",), {"step": 0}, True)})
    scalars = Scalars({"step": {0: 0.0, 1: 3.0, 2: 2.0}})
    level_counts(Mine([nn.Parameter(torch.ones(1))]), scalars, [0, 0, 1])
    assert scalars.values == {"step": {0: 3.0, 1: 3.0, 2: 2.0}}
