"""Mixtures of experts to walk with: models under AutoEP and of `deepspeed.moe`, places of their experts, a probe."""

from __future__ import annotations

import hashlib
from functools import partial
from typing import Any

import torch
import torch.distributed as td
import torch.nn.functional as F
from deepspeed.moe.layer import MoE
from torch import nn

from tests.adapters import expert_models as models
from tests.engine import language_models, oracle
from tests.engine.axis_walks import Answer, Subject
from tests.engine.models import LENGTH, WORDS, Sequences

CLIPPING = 0.02
"""Bites at every step: the norm is that of all experts."""


PLANS = {"mixtral": "mixtral", "qwen2": "qwen2", "qwen3": "qwen2"}
"""By kind, which of DeepSpeed's plans AutoTP cuts the rest of a model by."""


def autoep(kind: str = "mixtral", experts: int = 4, heads: int = 2, **block: Any) -> Subject:
    """A model of `models.autoep_model`; block: what else the user says of AutoEP's layers."""
    blocks = {"expert_parallel": {"enabled": True, **block}, "tensor_parallel": {"preset_model": PLANS[kind]}}
    settings = {"gradient_clipping": CLIPPING, **blocks}
    return Subject(partial(autoep_model, kind, experts, heads), Sequences, folded_places, settings, probe=probe)


def native(size: int = 1) -> Subject:
    """Layers of `deepspeed.moe`; size: ranks that the user builds the model for, which must be that of the start."""
    return Subject(partial(native_model, size), Sequences, places, {"gradient_clipping": CLIPPING}, probe=probe)


def autoep_model(kind: str, experts: int = 4, heads: int = 2) -> nn.Module:
    """A model of transformers', called as `model(inputs, targets)` for a loss."""
    return with_loss(models.autoep_model(kind, experts=experts, heads=heads))


def native_model(size: int) -> nn.Module:
    """What a user builds on this process: the experts of its own rank, which have values of their own."""
    return models.native_model(size, td.get_rank() % size)


def with_loss(model: nn.Module) -> nn.Module:
    """The same model, of a class whose call gives the loss. (AutoEP wants transformers' own names of layers.)"""
    kind: Any = type(model)

    def forward(self: Any, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = kind.forward(self, input_ids=inputs, use_cache=False).logits
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    model.__class__ = type(kind.__name__, (kind,), {"forward": forward})
    return model


def places(engine: Any) -> dict[str, oracle.Place]:
    """Where the parameters of this rank's experts lie in those of all."""
    size, orders = engine.layout.expert, orders_of(engine)
    index = engine.rank % size
    found = {}
    for name, held in engine.module.named_parameters():
        numel = getattr(held, "ds_numel", held.numel())
        if name.endswith(("experts.w1", "experts.w2", "experts.w3")):
            mine = orders[name.rpartition(".experts.")[0]].view(size, -1)[index]
            each = numel // len(mine)
            found[name] = oracle.Place(name, (mine[:, None] * each + torch.arange(each)).flatten(), size * numel)
        elif models.LOCAL_EXPERT.search(name):
            found[name] = oracle.Place(models.native_name(name, size, index), torch.arange(numel), numel)
    return found


def orders_of(engine: Any) -> dict[str, torch.Tensor]:
    """Per layer of AutoEP's on this rank, its experts in the order in which they lie on the ranks."""
    layers = {name: part for name, part in engine.module.named_modules() if hasattr(part, "tokens_per_expert")}
    if engine.layout.experts is None:
        return {name: torch.arange(part.num_experts) for name, part in layers.items()}
    return {name: torch.tensor(given).flatten() for name, given in zip(layers, engine.layout.experts, strict=True)}


def folded_places(engine: Any) -> dict[str, oracle.Place]:
    """`places`, and where AutoTP's parts of other parameters lie."""
    return {**language_models.places(engine), **places(engine)}


def probe(engine: Any) -> Answer:
    """The loss of a fixed batch, which every rank computes whole, and per layer which experts its tokens go to."""
    chosen: list[str] = []
    hooks, orders = [], orders_of(engine)
    for name, part in engine.module.named_modules():
        if hasattr(part, "tokens_per_expert"):
            order = orders[name].to(engine.device)
            hooks.append(part.router.register_forward_hook(partial(_note, chosen, order)))
        elif isinstance(part, MoE):
            hooks.append(part.register_forward_hook(lambda _, __, found: chosen.append(digest(found[2]))))
    tokens = torch.randint(0, WORDS, (4, LENGTH), generator=torch.Generator().manual_seed(8)).to(engine.device)
    engine.module.eval()
    with torch.no_grad():
        loss = engine.module(tokens, tokens.roll(1, 1))
    engine.module.train()
    for hook in hooks:
        hook.remove()
    assert chosen, "no layer has experts"
    return Answer(digest(loss.detach()), tuple(chosen))


def _note(chosen: list[str], order: torch.Tensor, router: nn.Module, given: Any, found: Any) -> None:
    """Note the experts that a router has chosen, by their own numbers."""
    chosen.append(digest(order[found[1]]))


def digest(held: torch.Tensor) -> str:
    """The bytes of a tensor in a few words."""
    return hashlib.sha256(held.reshape(-1).contiguous().view(torch.uint8).cpu().numpy().tobytes()).hexdigest()
