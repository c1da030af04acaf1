"""Walks over expert sizes in living ranks: state by an independent gather, where tokens go, and the losses."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from deepspeed.moe.layer import MoE
from torch import nn

from ds_dynatrain.space import Layout
from tests.adapters import expert_models as models
from tests.engine import jobs, oracle
from tests.engine.models import LENGTH, WORDS, Sequences

BATCH = 12
STEPS = 2
"""Optimizer steps in each layout of a walk."""


def autoep_model(kind: str) -> nn.Module:
    """A model of transformers', called as `model(inputs, targets)` for a loss."""
    return with_loss(models.autoep_model(kind))


def with_loss(model: nn.Module) -> nn.Module:
    """The same model, of a class whose call gives the loss. (AutoEP wants transformers' own names of layers.)"""
    kind: Any = type(model)

    def forward(self: Any, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = kind.forward(self, input_ids=inputs, use_cache=False).logits
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    model.__class__ = type(kind.__name__, (kind,), {"forward": forward})
    return model


def settings(dtype: str, start: Mapping[str, int], autoep: bool = True, **more: Any) -> dict[str, Any]:
    """A configuration that starts in a layout, with samples enough for 1, 2, 3 and 4 ranks."""
    more = {"train_micro_batch_size_per_gpu": BATCH, "gradient_clipping": 0.02, **more}
    made = jobs.config(dtype, (start["data"], start["zero_stage"]), **more)
    made["train_batch_size"] = BATCH
    made["dynatrain"] = {**made["dynatrain"], "layout": dict(start)}
    if autoep:
        made["expert_parallel"] = {"enabled": True}
    return made


@dataclass
class Seen:
    """What a rank saw, by the number of the layout: fingerprints of the state and of a probe, around the switch to it.

    losses: by optimizer step, as `jobs.Record` has them.
    """

    before: dict[int, dict[str, Any]] = field(default_factory=dict)
    after: dict[int, dict[str, Any]] = field(default_factory=dict)
    record: jobs.Record = field(default_factory=jobs.Record)
    outcomes: list[str] = field(default_factory=list)


def walk(
    config: dict[str, Any],
    path: list[dict[str, int]],
    build: Callable[..., nn.Module],
    arguments: dict[str, Any],
    steps: int = STEPS,
) -> Seen:
    """Train in each layout of a path; the first is that of the configuration. steps: in each of them."""
    seen = Seen()
    data = Sequences(BATCH * (steps * len(path) + 1))
    with jobs.job(config, build(**arguments), data, groups=False) as made:
        engine, iterator = made.engine, iter(made.loader)
        engine.on_switch(lambda event: seen.outcomes.append(event.outcome))
        batch = next(iterator)
        while True:
            number = engine.generation - 1
            if number and number not in seen.after:
                seen.after[number] = fingerprint(engine)
            jobs.one_micro_batch(engine, batch, seen.record)
            if engine.global_steps == steps * (number + 1):
                if number + 1 == len(path):
                    return seen
                seen.before[number + 1] = fingerprint(engine)
                engine.switch(Layout(**path[number + 1]), at=engine.global_steps)
            batch = next(iterator)
    return seen


def check(seen: list[Seen | None], path: list[dict[str, int]], exact: bool = True) -> None:
    """Every switch is committed, and state and probe are the same on all ranks that saw both or one of its sides.

    exact: false for 16 bits, where products of other shapes are rounded in another way; stage 3 has a `linear` of its
    own, so that tokens may go elsewhere, too.
    """
    for number in range(1, len(path)):
        before = [each.before[number] for each in seen if each is not None and number in each.before]
        after = [each.after[number] for each in seen if each is not None and number in each.after]
        assert before and len(after) == path[number]["data"], number
        for found in (*before, *after):
            crossing = (path[number - 1]["zero_stage"] == 3) != (path[number]["zero_stage"] == 3)
            for part in before[0].keys() - (set() if exact else {"loss", "chosen"} if crossing else {"loss"}):
                assert found[part] == before[0][part], f"{part} of {path[number - 1]} -> {path[number]}"


def fingerprint(engine: Any) -> dict[str, Any]:
    """Everything that a switch must leave as it is: the whole state, and what the model says to a probe."""
    state = oracle.gather(engine, places)
    tensors = {" ".join(key): (str(held.dtype), digest(held)) for key, held in state.tensors.items()}
    groups = [{name: value for name, value in group.items() if name != "name"} for group in state.groups]
    loss, chosen = probe(engine)
    return {"tensors": tensors, "steps": state.steps, "groups": groups, "loss": loss, "chosen": chosen}


def digest(held: torch.Tensor) -> str:
    return hashlib.sha256(held.reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def probe(engine: Any) -> tuple[str, list[str]]:
    """The loss of a fixed batch, which every rank computes whole, and per layer which experts its tokens went to."""
    chosen: list[str] = []
    hooks = []
    for part in engine.module.modules():
        if hasattr(part, "tokens_per_expert"):
            hooks.append(part.router.register_forward_hook(lambda _, __, found: chosen.append(digest(found[1]))))
        elif isinstance(part, MoE):
            hooks.append(part.register_forward_hook(lambda _, __, found: chosen.append(digest(found[2]))))
    tokens = torch.randint(0, WORDS, (4, LENGTH), generator=torch.Generator().manual_seed(8))
    engine.module.eval()
    with torch.no_grad():
        loss = engine.module(tokens, tokens.roll(1, 1))
    engine.module.train()
    for hook in hooks:
        hook.remove()
    return digest(loss.detach()), chosen


def places(engine: Any) -> dict[str, oracle.Place]:
    """Where the parameters of this rank's experts lie in those of all."""
    size = engine.layout.expert
    index = engine.rank % size
    found = {}
    for name, held in engine.module.named_parameters():
        numel = getattr(held, "ds_numel", held.numel())
        if name.endswith(("experts.w1", "experts.w2", "experts.w3")):
            found[name] = oracle.Place(name, torch.arange(numel) + index * numel, size * numel)
        elif models.LOCAL_EXPERT.search(name):
            found[name] = oracle.Place(models.native_name(name, size, index), torch.arange(numel), numel)
    return found
