"""A model of each class in the table of transitions, as a subject of `axis_walks`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from tests.engine import pipelined_experts
from tests.engine.axis_walks import Subject
from tests.engine.language_models import MODELS, places, tokens
from tests.engine.mixtures import autoep, native
from tests.engine.models import Sequences, decay_groups, small_gpt
from tests.engine.pipelines import pipeline
from tests.engine.ulysses import adam, sgd


class Texts(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Token sequences as keyword arguments of a language model."""

    def __init__(self, length: int) -> None:
        self.texts = tokens(3, length)

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.texts[index], "labels": self.texts[index]}


def named_step(engine: Any, batch: Mapping[str, torch.Tensor]) -> float:
    """One optimizer step on keyword arguments; the loss on this rank."""
    loss = engine(**batch).loss
    engine.backward(loss)
    engine.step()
    return float(loss.item())


def language_model(name: str, sub_group_size: int = 1 << 20, **settings: Any) -> Subject:
    """A language model by name; ranks count the tensor axis fastest."""
    zero = {"stage3_param_persistence_threshold": 40, "sub_group_size": sub_group_size}
    return Subject(MODELS[name], Texts, places, {"zero_optimization": zero, **settings}, named_step)


def module() -> Subject:
    """A model that only its data axis deals out."""
    return Subject(small_gpt, Sequences, groups=decay_groups)


def pipelined(name: str = "tied", **settings: Any) -> Subject:
    """One of the models in `pipelines`."""
    return Subject(partial(pipeline, name), Sequences, settings=settings, step=batch_step, groups=decay_groups)


def batch_step(engine: Any, batch: Any) -> float:
    """One optimizer step of a pipeline, in one micro-batch; the loss is that of all data ranks."""
    return float(engine.train_batch(iter([batch])).item())


SUBJECTS: Mapping[str, Callable[[], Subject]] = {
    "module": module,
    "AutoTP": partial(language_model, "llama of 4 kv"),
    "AutoEP": partial(autoep, experts=12, heads=4),
    "deepspeed.moe": native,
    "PipelineModule": pipelined,
    "PipelineModule of deepspeed.moe": pipelined_experts.subject,
    "PipelineModule under AutoEP": pipelined_experts.autoep,
    "Ulysses": sgd,
}
"""By the names of `transitions.TABLE`."""


@dataclass(frozen=True)
class Change:
    """A change of sizes in the short form of `transitions`, of all four ranks at the source.

    Members 0 and 1 have the same layers there. without: faults that it has no place for.
    """

    find: Callable[[], Subject]
    source: str
    target: str
    without: tuple[str, ...] = ()


CHANGES: Mapping[str, Change] = {
    "tensor": Change(partial(language_model, "llama tied"), "d2t2z1", "t4z2"),
    "tensor to 1": Change(partial(language_model, "llama tied"), "t4z2", "d2z3"),
    "tensor from stage 3": Change(partial(language_model, "llama tied"), "d2t2z3", "t4z0", ("diverged replica",)),
    "pipe": Change(pipelined, "p2d2z1", "p4z1"),
    "pipe to 1": Change(pipelined, "p2d2z1", "d4z1"),
    "AutoEP": Change(autoep, "d4e2z1", "d4e4z3"),
    "AutoEP to 1": Change(autoep, "d4e4z2", "d2z0"),
    "deepspeed.moe": Change(native, "d4e2z1", "d4e4z2"),
    "sequence": Change(adam, "d2s2z1", "s4z3"),
}
"""A change of every axis, with the moments of Adam. (Stage 3 has no replicas of weights.)"""
