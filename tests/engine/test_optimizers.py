"""Every known optimizer, live: a walk over stages and worlds, with bit-equal state and the losses of no walk."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from deepspeed.accelerator import get_accelerator
from torch import nn

import ds_dynatrain
from tests.engine import faults, jobs, oracle
from tests.engine.models import WORDS, Sequences, decay_groups, small_gpt
from tests.engine.pool import RankPool

PATH: list[jobs.Sizes] = [(2, 0), (4, 1), (3, 3), (2, 0), (4, 2), (1, 1), (4, 3), (2, 3), (4, 0)]
"""The first switch comes before the first step."""
MUON_PATH: tuple[jobs.Sizes, ...] = (
    (2, 0),
    (4, 1),
    (3, 3),
    (2, 2),
    (3, 0),
    (1, 1),
    (4, 2),
    (3, 1),
    (4, 3),
    (2, 1),
    (1, 0),
)
MUON_IN_BF16: tuple[jobs.Sizes, ...] = ((2, 1), (4, 3), (3, 2), (4, 1), (1, 2), (2, 3), (3, 1))
STEPS = 2
"""Per place on the path."""
IN_HALF = 2e-5
"""How far losses may be apart where Muon's steps are in fp16, which DeepSpeed takes where the device has it."""
RATE = 1e-3


class OneMatrix(nn.Module):
    """One trained matrix of 9 elements: over 4 ranks of 4 the last one has no part of it."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 3)
        self.mix = nn.Linear(3, 3, bias=False)
        self.offset = nn.LayerNorm(3)
        self.words.requires_grad_(False)

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        hidden = self.offset(self.words(inputs) + self.mix(self.words(inputs)))
        return F.cross_entropy((hidden @ self.words.weight.T).flatten(0, 1).float(), targets.flatten())


def one_matrix() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(7)
        return OneMatrix()


class Lion(torch.optim.Optimizer):
    """As in its paper: the sign of an average, decoupled decay; one state."""

    def __init__(self, params: Any, lr: float, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            first, second = group["betas"]
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state.update(step=0, exp_avg=torch.zeros_like(parameter))
                state["step"] += 1
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.sub_(torch.sign(torch.lerp(parameter.grad, state["exp_avg"], first)), alpha=group["lr"])
                state["exp_avg"].lerp_(parameter.grad, 1 - second)


def _lion(groups: Any) -> torch.optim.Optimizer:
    if Lion not in _REGISTERED:
        ds_dynatrain.register_optimizer(Lion, moments=("exp_avg",), scalars={"step": 0})
        _REGISTERED.add(Lion)
    return Lion(groups, lr=1e-5, weight_decay=0.1)


_REGISTERED: set[type] = set()
"""Rank processes run many cases; a class is registered once in each."""


def _cpu_lion(groups: Any) -> torch.optim.Optimizer:
    from deepspeed.ops.lion import DeepSpeedCPULion

    made: torch.optim.Optimizer = DeepSpeedCPULion(groups, lr=1e-5, weight_decay=0.1)
    return made


@dataclass(frozen=True)
class Case:
    """make: from parameter groups to an optimizer, or a block of the configuration.

    moments: what it keeps, by name -> groups that have it. furthest: relative distance of losses to those of a run that
    never switches. width: of the model; above 128 it has tensors that are not written while an optimizer is built.
    """

    make: Callable[[Any], torch.optim.Optimizer] | dict[str, Any]
    moments: dict[str, tuple[int, ...]]
    dtype: str = "fp32"
    furthest: float = 1e-6
    sizes: dict[str, int] = field(default_factory=dict)
    path: tuple[jobs.Sizes, ...] = tuple(PATH)
    compiled: str = ""
    """The fixture that compiles what DeepSpeed needs."""
    more: dict[str, Any] = field(default_factory=dict)
    """Keys of `zero_optimization`."""
    model: Callable[..., nn.Module] = small_gpt


def _sgd(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    groups[0].update(momentum=0.9, nesterov=True)
    return torch.optim.SGD(groups, lr=RATE)


def _cpu_adam(groups: Any) -> torch.optim.Optimizer:
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    made: torch.optim.Optimizer = DeepSpeedCPUAdam(groups, lr=RATE)
    return made


def _adagrad(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """It has state before its first step, where its parameters lie: as torch says, they are on their device by then."""
    for group in groups:
        for parameter in group["params"]:
            parameter.data = parameter.data.to(get_accelerator().current_device_name())
    return torch.optim.Adagrad(groups, lr=RATE)


OPTIM = torch.optim
BOTH = (0, 1)
ADAM = {"exp_avg": BOTH, "exp_avg_sq": BOTH}
MUON = {"momentum_buffer": (0,), "exp_avg": (1,), "exp_avg_sq": (1,)}
"""DeepSpeed tags all matrices for Muon; the rest has Adam."""
FUSED = {"type": "AdamW", "params": {"lr": RATE}}
LARGE = {"width": 131, "hidden": 140}
CASES: dict[str, Case] = {
    "amsgrad": Case(lambda groups: OPTIM.AdamW(groups, lr=RATE, amsgrad=True), {**ADAM, "max_exp_avg_sq": BOTH}),
    "sgd": Case(lambda groups: OPTIM.SGD(groups, lr=1e-2), {}),
    "momentum in one group": Case(_sgd, {"momentum_buffer": (0,)}, sizes=LARGE),
    "dampening": Case(
        lambda groups: OPTIM.SGD(groups, lr=RATE, momentum=0.9, dampening=0.3), {"momentum_buffer": BOTH}, "bf16", 1e-3
    ),
    "rmsprop": Case(lambda groups: OPTIM.RMSprop(groups, lr=RATE), {"square_avg": BOTH}),
    "centered rmsprop": Case(
        lambda groups: OPTIM.RMSprop(groups, lr=1e-4, momentum=0.5, centered=True),
        {"square_avg": BOTH, "momentum_buffer": BOTH, "grad_avg": BOTH},
    ),
    "nadam": Case(lambda groups: OPTIM.NAdam(groups, lr=RATE), ADAM),
    "radam": Case(lambda groups: OPTIM.RAdam(groups, lr=RATE), ADAM),
    "adamax": Case(lambda groups: OPTIM.Adamax(groups, lr=RATE), {"exp_avg": BOTH, "exp_inf": BOTH}),
    "fused adam": Case(FUSED, ADAM, sizes=LARGE, compiled="fused_adam"),
    "fused adam in bf16": Case(FUSED, ADAM, "bf16", 1e-3, sizes=LARGE, compiled="fused_adam"),
    "adagrad": Case(
        _adagrad,
        {"sum": BOTH},
        path=((2, 0), (4, 0), (1, 0), (3, 0)),
    ),
    "cpu lion": Case(_cpu_lion, ADAM, sizes=LARGE, compiled="cpu_lion"),
    "cpu adam": Case(_cpu_adam, ADAM, compiled="cpu_adam"),
    "muon": Case(
        {"type": "Muon", "params": {"lr": RATE, "torch_adam": True}},
        MUON,
        sizes=LARGE,
        path=MUON_PATH,
    ),
    "muon with fused adam": Case(
        {"type": "Muon", "params": {"lr": RATE, "ns_method": "standard"}},
        MUON,
        furthest=2e-5,
        path=MUON_PATH,
        compiled="fused_adam",
    ),
    "muon in bf16": Case(
        {"type": "Muon", "params": {"lr": RATE, "torch_adam": True}},
        MUON,
        "bf16",
        1e-3,
        sizes=LARGE,
        path=MUON_IN_BF16,
    ),
    "muon in turns": Case(
        {"type": "Muon", "params": {"lr": RATE, "torch_adam": True}},
        MUON,
        path=((3, 1), (2, 2), (4, 2), (4, 1), (2, 1)),
        more={"reduce_scatter": True, "round_robin_gradients": True},
    ),
    "muon aligned": Case(
        {"type": "Muon", "params": {"lr": RATE, "torch_adam": True}},
        MUON,
        "bf16",
        1e-3,
        sizes={"width": 9},
        path=((3, 1), (2, 2), (4, 2), (4, 1), (2, 1)),
        more={"reduce_scatter": True, "parameter_alignment": True},
    ),
    "muon on few ranks": Case(
        {"type": "Muon", "params": {"lr": RATE, "torch_adam": True}},
        MUON,
        path=((4, 1), (3, 3), (4, 2), (2, 2), (4, 1), (4, 3)),
        model=one_matrix,
    ),
    "lion of the user's": Case(_lion, {"exp_avg": BOTH}),
}


FULL = (
    "muon",
    "lion of the user's",
    "muon in turns",
    "muon on few ranks",
    "fused adam in bf16",
    "nadam",
    "momentum in one group",
    "amsgrad",
    "centered rmsprop",
    "fused adam",
    "radam",
    "adamax",
    "rmsprop",
    "sgd",
    "dampening",
    "cpu adam",
    "cpu lion",
    "muon with fused adam",
    "muon in bf16",
    "muon aligned",
)
"""Cases that no default run needs."""


def settings(case: Case) -> dict[str, Any]:
    more: dict[str, Any] = {"train_micro_batch_size_per_gpu": 12, "zero_allow_untested_optimizer": True}
    if isinstance(case.make, dict):
        more["optimizer"] = case.make
    made = jobs.config(case.dtype, case.path[0], **more)
    if isinstance(case.make, dict) and case.make["type"] == "Muon":
        made["zero_optimization"]["reduce_scatter"] = False
        made["gradient_clipping"] = 0.0  # DeepSpeed clips something else in stage 0
    made["zero_optimization"].update(case.more)
    return made


def arguments(case: Case, model: nn.Module) -> dict[str, Any]:
    """What `initialize` gets besides the model."""
    groups = decay_groups(model)
    return {"model_parameters": groups} if isinstance(case.make, dict) else {"optimizer": case.make(groups)}


@dataclass
class Seen:
    """What a rank saw: losses by step, what differed after a switch, which moments there were, the kinds by group."""

    record: jobs.Record = field(default_factory=jobs.Record)
    differences: list[str] = field(default_factory=list)
    present: list[list[str]] = field(default_factory=list)
    kinds: dict[str, tuple[int, ...]] = field(default_factory=dict)
    groups: list[dict[str, Any]] = field(default_factory=list)
    has_fp16: bool = False
    """Whether DeepSpeed computes in it without being asked."""


@torch.compiler.set_stance("force_eager")  # Muon compiles its Newton-Schulz steps, for a minute
def walk_case(name: str, walks: bool) -> Seen:
    """Walk the path, or stay at its first place for as many steps."""
    case, seen = CASES[name], Seen(has_fp16=get_accelerator().is_fp16_supported())
    places = len(case.path) - 1
    model = case.model(**case.sizes)
    with jobs.job(
        settings(case), model=model, data=Sequences(12 * (STEPS * places + 2)), **arguments(case, model)
    ) as made:
        engine, iterator = made.engine, iter(made.loader)
        every = range(len(engine.basic_optimizer.param_groups))
        seen.kinds = {
            kind.name: tuple(every if kind.groups is None else sorted(kind.groups))
            for kind in engine._parts.vps.kinds
            if kind.name not in ("weight", "master", "stale_grad")
        }
        place = 0
        while place < places:
            before = None
            if walks and not engine.idle:
                before = oracle.gather(engine)
                jobs.ask(engine, case.path[place + 1])
            batch, came_from = next(iterator), place  # members that are not needed stay in here
            place = engine.generation - 1 if walks else place + 1
            if walks:
                _arrive(seen, engine, case.path[place], before if place == came_from + 1 else None)
            for step in range(STEPS):
                batch = next(iterator) if step else batch
                jobs.one_micro_batch(engine, batch, seen.record)
        seen.groups = oracle.gather(engine).groups
    return seen


def _arrive(seen: Seen, engine: Any, sizes: jobs.Sizes, before: oracle.State | None) -> None:
    after = oracle.gather(engine)
    assert (engine.layout.data, engine.layout.zero_stage) == sizes
    seen.present.append(sorted({kind for _, kind in after.tensors} - {"weight", "master"}))
    if before is not None:
        event = engine.last_switch
        assert event.outcome == "committed", event.reason
        assert event.warnings == () and event.bytes_sent == event.bytes_minimum
        seen.differences += oracle.differences(before, after)


ON_HOST = pytest.mark.not_on_device("DeepSpeed's CPU optimizers cannot step weights on a device")


def marks(name: str) -> list[pytest.MarkDecorator]:
    """Of a case."""
    return [*([pytest.mark.full] if name in FULL else []), *([ON_HOST] if name.startswith("cpu ") else [])]


@pytest.mark.parametrize("name", [pytest.param(name, marks=marks(name)) for name in CASES])
def test_a_walk_over_stages_and_worlds(pool: RankPool, name: str, request: pytest.FixtureRequest) -> None:
    case = CASES[name]
    if case.compiled:
        request.getfixturevalue(case.compiled)
    static = pool.run(walk_case, name=name, walks=False)
    walked = pool.run(walk_case, name=name, walks=True)
    assert [seen.differences for seen in walked] == [[]] * 4
    for seen in walked:
        assert seen.kinds == case.moments
    longest = max((seen.present for seen in walked), key=len)
    assert longest[1:] == [sorted(case.moments)] * (len(longest) - 1)
    distance = jobs.furthest(
        jobs.global_losses([seen.record for seen in walked]), jobs.global_losses([seen.record for seen in static])
    )
    print(f"{name}: losses at most {distance:.1e} apart")
    is_in_half = case.moments == MUON and static[0].has_fp16
    assert distance <= (max(case.furthest, IN_HALF) if is_in_half else case.furthest)


@torch.compiler.set_stance("force_eager")
def register_case(name: str, block: str, start: jobs.Sizes, target: jobs.Sizes) -> list[list[str]] | None:
    """Freeze a block, switch, train it again, with Muon: what is wrong after each; None on members that started idle.

    Momentum of what is trained throughout stays bit by bit, and begins as zeros for what is trained anew.
    """
    case, found = CASES[name], list[list[str]]()
    model = case.model()
    own = settings(replace(case, path=(start,)))
    with jobs.job(own, model=model, data=Sequences(12 * 12), **arguments(case, model)) as made:
        engine, iterator, worked = made.engine, iter(made.loader), not made.engine.idle
        batch = next(iterator)
        while engine.global_steps < 8:
            jobs.one_micro_batch(engine, batch, jobs.Record())
            if engine.global_steps in (2, 6):
                before = oracle.gather(engine)
                for parameter_name, held in model.named_parameters():
                    if parameter_name.startswith(block):
                        held.requires_grad_(engine.global_steps == 6)
                assert engine.update_param_groups()
                found.append(_wrong_after_registering(before, oracle.gather(engine), model, block))
            elif engine.global_steps == 4:
                jobs.ask(engine, target)
            batch = next(iterator)
    return found if worked else None


def _wrong_after_registering(before: oracle.State, after: oracle.State, model: nn.Module, block: str) -> list[str]:
    wrong = []
    for name, held in model.named_parameters():
        if held.requires_grad:
            kind = "momentum_buffer" if held.use_muon else "exp_avg"  # type: ignore[union-attr]
            value = after.tensors[name, kind]
            expected = before.tensors.get((name, kind), torch.zeros_like(value))
            wrong += [] if torch.equal(value, expected) and (expected.any() or name.startswith(block)) else [name]
    return wrong + [name for (name, kind) in after.tensors if kind == "momentum_buffer" and name not in _trained(model)]


def _trained(model: nn.Module) -> set[str]:
    return {name for name, held in model.named_parameters() if held.requires_grad}


@pytest.mark.parametrize(
    ("name", "block", "start", "target"),
    [
        ("muon", "blocks.0", (2, 1), (4, 2)),
        pytest.param("muon", "blocks.0", (3, 2), (3, 3), marks=pytest.mark.full),
        ("muon on few ranks", "offset.bias", (4, 1), (4, 2)),
    ],
)
def test_registering_with_whole_tensors(
    pool: RankPool, name: str, block: str, start: jobs.Sizes, target: jobs.Sizes
) -> None:
    """In the last case one rank has no momentum."""
    found = pool.run(register_case, name=name, block=block, start=start, target=target)
    found = [each for each in found if each is not None]
    assert found == [[[], []]] * start[0]


# ---- what else travels, what is refused, what is taken back ----------------------------------------------------------


def hyper_parameters_case() -> list[dict[str, Any]]:
    """Groups at the end on every member, changed by hand on the one that works before the others do."""
    with jobs.job(jobs.config("fp32", (1, 1), train_micro_batch_size_per_gpu=12)) as made:
        engine, iterator = made.engine, iter(made.loader)
        if not engine.idle:
            jobs.one_micro_batch(engine, next(iterator), jobs.Record())
            first, second = engine.basic_optimizer.param_groups
            first.update(betas=(0.8, 0.95), lr=3e-4, note="word", nothing=None, flag=True, nested={"a": (1, 2)})
            second.update(eps=1e-6, maximize=False, list=[1, 2.5])
            jobs.ask(engine, (4, 3))
        jobs.one_micro_batch(engine, next(iterator), jobs.Record())
        return oracle.gather(engine).groups


def test_hyper_parameters_of_all_kinds_travel(pool: RankPool) -> None:
    found = pool.run(hyper_parameters_case)
    for first, second in found:
        assert (first["betas"], first["lr"], first["note"], first["nothing"]) == ((0.8, 0.95), 3e-4, "word", None)
        assert (first["flag"], first["nested"]) == (True, {"a": (1, 2)})
        assert (second["eps"], second["list"], second["betas"]) == (1e-6, [1, 2.5], (0.9, 0.999))
        assert [first, second] == found[0]


def roll_back_case(name: str) -> tuple[list[str], list[str], list[float]] | None:
    """A switch that fails, then one that does not: reasons, differences, losses; None on members that started idle."""
    case = CASES[name]
    model, record = case.model(**case.sizes), jobs.Record()
    reasons: list[str] = []
    differences: list[str] = []
    with (
        faults.injected(["bit flip"], {}),
        jobs.job(settings(case), model=model, data=Sequences(12 * 12), **arguments(case, model)) as made,
    ):
        engine, iterator = made.engine, iter(made.loader)
        worked = not engine.idle
        batch = next(iterator)
        if not worked:
            oracle.gather(engine)  # the others compare there
        while engine.global_steps < 6:
            before = None
            jobs.one_micro_batch(engine, batch, record)
            if engine.global_steps in (2, 4):
                before = oracle.gather(engine)
                jobs.ask(engine, (4, 1))
            batch = next(iterator)
            if before is not None:
                reasons.append(engine.last_switch.reason)
                differences += oracle.differences(before, oracle.gather(engine))
        return (
            (reasons, differences, [loss for parts in record.losses.values() for loss, _ in parts]) if worked else None
        )


@pytest.mark.parametrize("name", ["momentum in one group", pytest.param("fused adam in bf16", marks=pytest.mark.full)])
def test_a_roll_back_leaves_the_state(pool: RankPool, name: str, request: pytest.FixtureRequest) -> None:
    if CASES[name].compiled:
        request.getfixturevalue(CASES[name].compiled)
    found = [each for each in pool.run(roll_back_case, name=name) if each is not None]
    for reasons, differences, losses in found:
        assert "master" in reasons[0] and reasons[1:] == [""]
        assert differences == [] and len(losses) == 6
