"""Kinds of models for the feasibility table, at small sizes: how stock DeepSpeed builds and trains each of them.

All kinds get the same global batch and return the mean loss of its tokens, so each layout must have the losses of one
rank. Everything that depends on the division of tokens is off (auxiliary losses, dropped tokens, dropout).
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import deepspeed
import torch
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.sequence_parallel import parallel_state_sp
from deepspeed.sequence.layer import DistributedAttention
from torch import Tensor, nn
from torch.nn import functional as F

WORDS, WIDTH, HEADS, LENGTH, BATCH, EXPERTS = 24, 24, 12, 12, 12, 12
"""Sizes of the models. 2, 3 and 4 divide everything that an axis divides."""

PARTITION = {
    "use_default_specs": False,
    "layer_specs": [
        {"patterns": [r".*\.(query|key|value|up)\.weight$"], "partition_type": "column"},
        {"patterns": [r".*\.(out|down)\.weight$"], "partition_type": "row"},
    ],
}
"""How AutoTP cuts the layers of a `Block`."""

Sizes = Mapping[str, int]
"""Sizes of the axes pipe, data, expert, tensor and sequence."""
Config = dict[str, Any]


@dataclass(frozen=True)
class Kind:
    """A kind of model.

    axes: the axes that stock DeepSpeed can be asked to use with such a model.
    start: function (sizes, configuration) that returns the engine.
    step: function (engine, sizes, this rank's place, number of the step) that trains a step and returns the loss of
        this rank's part.
    folds: whether tensor ranks may share experts.
    """

    name: str
    axes: tuple[str, ...]
    start: Callable[[Sizes, Config], Any]
    step: Callable[[Any, Sizes, Mapping[str, int], int], float]
    folds: bool = False


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Return (tokens, next tokens) of one optimizer step, both (BATCH, LENGTH)."""
    generator = torch.Generator().manual_seed(100 + step)
    tokens = torch.randint(0, WORDS, (BATCH, LENGTH), generator=generator)
    return tokens, (tokens * 3 + 1) % WORDS


def part(step: int, sizes: Sizes, place: Mapping[str, int]) -> tuple[Tensor, Tensor]:
    """Return one rank's part of a step's batch: its samples, and its part of each sequence."""
    rows, columns = BATCH // sizes["data"], LENGTH // sizes["sequence"]
    row, column = rows * place["data"], columns * place["sequence"]
    tokens, targets = (each[row : row + rows, column : column + columns] for each in batch(step))
    return tokens, targets


# ---- models ---------------------------------------------------------------------------------------------------------


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean loss over all tokens."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def attend(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Tensor:
    """Compute causal attention over (batch, length, heads, size)."""
    query, key, value = (each.transpose(1, 2) for each in (query, key, value))
    return F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2)


class Feed(nn.Module):
    """A feed-forward layer."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., width) to the same shape."""
        fed: Tensor = self.down(F.gelu(self.up(x)))
        return fed


class Block(nn.Module):
    """A transformer block, optionally with attention over the sequence ranks, or with experts.

    experts: the expert size of a layer of `deepspeed.moe`.
    routed: function that makes another kind of layer with experts.
    """

    def __init__(self, group: Any = None, experts: int = 0, routed: Callable[[], nn.Module] | None = None) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.spread = None if group is None else DistributedAttention(attend, group, scatter_idx=2, gather_idx=1)
        options = {"num_experts": EXPERTS, "ep_size": experts, "drop_tokens": False, "use_rts": False}
        self.feed = MoE(WIDTH, Feed(), **options) if experts else Feed() if routed is None else routed()

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, length, width) to the same shape."""
        query, key, value = (of(x).unflatten(2, (-1, WIDTH // HEADS)) for of in (self.query, self.key, self.value))
        mixed = attend(query, key, value) if self.spread is None else self.spread(query, key, value, 0)
        x = x + self.out(mixed.flatten(2))
        found = self.feed(x)
        fed: Tensor = found[0] if isinstance(found, tuple) else found
        return x + fed


class Model(nn.Module):
    """A model of two blocks between an embedding and a head."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.blocks = nn.ModuleList(Block(**options) for _ in range(2))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss."""
        x = self.words(tokens)
        for block in self.blocks:
            x = block(x)
        return loss_of(self.head(x), targets)


# ---- how each is started --------------------------------------------------------------------------------------------


def seeded(build: Callable[[], Any]) -> Any:
    """Build a model with the same weights on every rank."""
    torch.manual_seed(7)
    return build()


def initialize(model: nn.Module, sizes: Sizes, config: Config, **more: Any) -> Any:
    """Return stock DeepSpeed's engine. Axes of size 1 are not configured."""
    if sizes["tensor"] > 1:
        known = {} if hasattr(model, "config") else {"partition_config": PARTITION}
        if "expert_parallel" in config:  # DeepSpeed does not accept the plan that transformers has for it
            known = {"preset_model": config["expert_parallel"]["preset_model"]}
        config = {**config, "tensor_parallel": {"autotp_size": sizes["tensor"], **known}}
    parameters: Any = list(model.parameters())
    if any(getattr(each, "allreduce", True) is False for each in parameters):
        parameters = split_params_into_different_moe_groups_for_optimizer({"params": parameters, "name": "all"})
    return deepspeed.initialize(model=model, model_parameters=parameters, config=config, **more)[0]


def start_plain(sizes: Sizes, config: Config) -> Any:
    """Return an engine with a plain torch module."""
    return initialize(seeded(Model), sizes, config)


def start_pipeline(sizes: Sizes, config: Config, **options: Any) -> Any:
    """Return an engine with the same layers as a PipelineModule."""
    whole = seeded(lambda: Model(**options))
    layers = [whole.words, *whole.blocks, whole.head]
    return initialize(PipelineModule(layers, num_stages=sizes["pipe"], loss_fn=loss_of), sizes, config)


def start_pipeline_of_experts(sizes: Sizes, config: Config) -> Any:
    """Return an engine with a PipelineModule that has layers of `deepspeed.moe`."""
    return start_pipeline(sizes, config, experts=sizes["expert"])


def start_pipeline_of_transformers_experts(sizes: Sizes, config: Config) -> Any:
    """Return an engine with a PipelineModule that has Mixtral's layers of experts, which AutoEP finds by
    their names.
    """
    block = {"preset_model": "mixtral", "moe_layer_pattern": r"\d+\.feed", "top_k": 2}
    block |= {"enabled": True, "autoep_size": sizes["expert"]}
    return start_pipeline(sizes, {**config, "expert_parallel": block}, routed=mixtral_experts)


def mixtral_experts() -> nn.Module:
    """Return Mixtral's layer of experts, with weights as large as in torch's own layers."""
    modeling = importlib.import_module("transformers.models.mixtral.modeling_mixtral")
    shape = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_local_experts": EXPERTS}
    made: nn.Module = modeling.MixtralSparseMoeBlock(modeling.MixtralConfig(**shape, num_experts_per_tok=2))
    for held in made.parameters():
        nn.init.normal_(held, std=0.2)
    return made


def start_experts(sizes: Sizes, config: Config) -> Any:
    """Return an engine with layers of `deepspeed.moe`."""
    return initialize(seeded(lambda: Model(experts=sizes["expert"])), sizes, config)


def start_ulysses(sizes: Sizes, config: Config, **options: Any) -> Any:
    """Return an engine with DistributedAttention, whose mpu says which ranks share a sequence."""
    if sizes["sequence"] == 1:
        return initialize(seeded(lambda: Model(**options)), sizes, config)
    parallel_state_sp.initialize_sequence_parallel(sizes["sequence"])
    group = parallel_state_sp.get_sequence_parallel_group()
    config = {**config, "sequence_parallel_size": sizes["sequence"]}
    return initialize(seeded(lambda: Model(group=group, **options)), sizes, config, mpu=parallel_state_sp)


def start_ulysses_of_experts(sizes: Sizes, config: Config) -> Any:
    """Return an engine with DistributedAttention and layers of `deepspeed.moe`."""
    return start_ulysses(sizes, config, experts=sizes["expert"])


def start_transformers(sizes: Sizes, config: Config, name: str) -> Any:
    """Return an engine with a language model of transformers, made from a configuration."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    transformers = importlib.import_module("transformers")

    shape = {"vocab_size": WORDS, "hidden_size": 2 * WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": 2}
    shape |= {"num_attention_heads": HEADS, "num_key_value_heads": HEADS, "max_position_embeddings": 64}
    experts: Config = {}
    if name == "Mixtral":  # with the model's own small weights, the gradients of experts would not show in a norm
        experts = {"num_local_experts": EXPERTS, "num_experts_per_tok": 2, "initializer_range": 0.2}
    made = getattr(transformers, f"{name}Config")(**shape, **experts, use_cache=False)
    model = seeded(lambda: getattr(transformers, f"{name}ForCausalLM")(made))
    if name == "Mixtral":
        block = {"enabled": True, "autoep_size": sizes["expert"], "preset_model": "mixtral"}
        config = {**config, "expert_parallel": block}
    return initialize(model, sizes, config)


# ---- how each is trained --------------------------------------------------------------------------------------------


def step_plain(engine: Any, sizes: Sizes, place: Mapping[str, int], step: int) -> float:
    """Train a step. DeepSpeed adds up gradients of sequence ranks, so each rank's loss is its share of the mean."""
    loss = engine(*part(step, sizes, place))
    engine.backward(loss / sizes["sequence"])
    engine.step()
    return float(loss)


def step_transformers(engine: Any, sizes: Sizes, place: Mapping[str, int], step: int) -> float:
    """Train a step. The loss of the model's own head would use shifted labels."""
    tokens, _ = part(step, sizes, place)
    loss = engine(input_ids=tokens, labels=tokens).loss
    engine.backward(loss)
    engine.step()
    return float(loss)


def step_pipeline(engine: Any, sizes: Sizes, place: Mapping[str, int], step: int) -> float:
    """Train a step: one batch of one micro-batch."""
    return float(engine.train_batch(iter([part(step, sizes, place)])))


KINDS = (
    Kind("module", ("data", "tensor"), start_plain, step_plain),
    Kind("pipeline", ("pipe", "data", "tensor"), start_pipeline, step_pipeline),
    Kind("transformers", ("data", "tensor"), functools.partial(start_transformers, name="Llama"), step_transformers),
    Kind(
        "transformers experts",
        ("data", "expert", "tensor"),
        functools.partial(start_transformers, name="Mixtral"),
        step_transformers,
        folds=True,
    ),
    Kind("native experts", ("data", "expert", "tensor"), start_experts, step_plain),
    Kind("pipeline of native experts", ("pipe", "data", "expert"), start_pipeline_of_experts, step_pipeline),
    Kind(
        "pipeline of transformers experts",
        ("pipe", "data", "expert"),
        start_pipeline_of_transformers_experts,
        step_pipeline,
    ),
    Kind("ulysses", ("data", "tensor", "sequence"), start_ulysses, step_plain),
    Kind("ulysses with native experts", ("data", "expert", "sequence"), start_ulysses_of_experts, step_plain),
)
