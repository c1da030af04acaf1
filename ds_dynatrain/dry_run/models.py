"""Models derived from their configurations: the tensors of a model, and how AutoTP and AutoEP cut them.

`REGISTRY` has the values of Hugging Face configurations of well-known models. A `config.json` of the same families is
read in the same way. A function per family turns these values into tensors, in the order of `named_parameters` of the
model in `transformers`. Layers with experts have the form that AutoEP gives them: stacks `w1`, `w2` and `w3`.

AutoTP cuts attention by key-value heads, and feed-forward layers and the language-model head evenly; it cuts nothing
else. It does not cut models with experts by itself; the cuts here are those that a `tensor_parallel.partition_config`
would give.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from ds_dynatrain.errors import ConfigError, LayoutError
from ds_dynatrain.space import AxisCuts, Layout, LogicalTensor, Partition, uneven

Values = Mapping[str, Any]
"""The values of a Hugging Face configuration."""


@dataclass(frozen=True)
class ModelTensor:
    """A tensor of a model.

    blocks: the numbers of the transformer blocks whose stages hold it; -1 means the last block.
    dim: the dim that the tensor axis cuts, or None.
    units: the number of heads, which the tensor axis does not split; 0 if it may cut between any rows or columns.
    expert: whether dim 0 counts experts.
    group: its optimizer group, or `FROZEN`.
    """

    name: str
    shape: tuple[int, ...]
    blocks: tuple[int, ...] = ()
    dim: int | None = None
    units: int = 0
    expert: bool = False
    group: int = 0

    def cuts(self, layout: Layout, starts: tuple[int, ...]) -> AxisCuts:
        """Return how a layout cuts the tensor. Raises LayoutError if the expert axis does not divide the experts.

        starts: the first block of each pipeline stage, followed by the number of blocks.
        """
        count = starts[-1]
        stages = tuple(sorted({sum(start <= block % count for start in starts[1:]) for block in self.blocks}))
        if self.expert:
            each, left = divmod(self.shape[0], layout.expert)
            if left:
                raise LayoutError(
                    f"expert={layout.expert} does not divide the {self.shape[0]} experts of {self.name} (remainder "
                    f"{left}); give a divisor of {self.shape[0]}"
                )
            return AxisCuts(stages, uneven(0, [each] * layout.expert))
        if self.dim is None or layout.tensor == 1:
            return AxisCuts(stages)
        length = self.shape[self.dim]
        units = self.units if self.units and length % self.units == 0 else length
        each, more = divmod(units, layout.tensor)  # as in AutoTP, the first ranks get one unit more
        sizes = [(each + (rank < more)) * (length // units) for rank in range(layout.tensor)]
        return AxisCuts(stages, None, uneven(self.dim, sizes))


@dataclass(frozen=True)
class Model:
    """A model: its name, the number of its transformer blocks, and its tensors. Tensors of experts come last."""

    name: str
    blocks: int
    tensors: tuple[ModelTensor, ...]

    @property
    def has_experts(self) -> bool:
        """Whether any layer has experts."""
        return self.tensors[-1].expert

    @property
    def parameters(self) -> int:
        """The number of elements in all tensors."""
        return sum(tensor.numel for tensor in self.logical())

    def logical(self) -> list[LogicalTensor]:
        return [LogicalTensor(held.name, held.shape, held.group, held.expert) for held in self.tensors]

    def partition(self, layout: Layout) -> Partition:
        """Return how the layout cuts each tensor of the model. Raises LayoutError if the model cannot have
        the layout.
        """
        starts = layout.boundaries or tuple(stage * self.blocks // layout.pipe for stage in range(layout.pipe + 1))
        if layout.pipe > self.blocks:
            raise LayoutError(
                f"pipe={layout.pipe} stages share {self.blocks} blocks, and each needs one; nearest: pipe={self.blocks}"
            )
        if starts[-1] != self.blocks:
            raise LayoutError(
                f"boundaries={starts} end with block {starts[-1]}, and {self.name} has {self.blocks}; give boundaries "
                f"that end with {self.blocks}"
            )
        if layout.tensor > 1 and all(tensor.dim is None for tensor in self.tensors):
            raise LayoutError(
                f"tensor={layout.tensor}: nothing says how to cut a parameter of {self.name}; give tensor=1"
            )
        return tuple(tensor.cuts(layout, starts) for tensor in self.tensors)


def _whole(name: str, *shape: int) -> ModelTensor:
    return ModelTensor(f"{name}.weight", shape)


def _rows(name: str, rows: int, width: int, units: int = 0) -> ModelTensor:
    return ModelTensor(f"{name}.weight", (rows, width), dim=0, units=units)


def _columns(name: str, rows: int, width: int, units: int = 0) -> ModelTensor:
    return ModelTensor(f"{name}.weight", (rows, width), dim=1, units=units)


def _attention(values: Values, has_norms: bool = False) -> Iterator[ModelTensor]:
    width, heads = values["hidden_size"], values["num_attention_heads"]
    keys, head = values.get("num_key_value_heads") or heads, values.get("head_dim") or width // heads
    yield _rows("self_attn.q_proj", heads * head, width, keys)
    yield _rows("self_attn.k_proj", keys * head, width, keys)
    yield _rows("self_attn.v_proj", keys * head, width, keys)
    yield _columns("self_attn.o_proj", width, heads * head, keys)
    if has_norms:
        yield _whole("self_attn.q_norm", head)
        yield _whole("self_attn.k_norm", head)


def _feed_forward(values: Values) -> Iterator[ModelTensor]:
    width, inner = values["hidden_size"], values["intermediate_size"]
    yield _rows("mlp.gate_proj", inner, width)
    yield _rows("mlp.up_proj", inner, width)
    yield _columns("mlp.down_proj", width, inner)


def _experts(width: int, inner: int, count: int) -> Iterator[ModelTensor]:
    """Yield a layer's router and its stacks of experts, which DeepSpeed puts into a separate optimizer group."""
    yield _whole("mlp.router.gate", count, width)
    for name, shape in (("w1", (inner, width)), ("w2", (width, inner)), ("w3", (inner, width))):
        yield ModelTensor(f"mlp.experts.{name}", (count, *shape), expert=True, group=1)


def _dense(values: Values, block: int, has_norms: bool = False) -> Iterator[ModelTensor]:
    yield from _attention(values, has_norms)
    yield from _feed_forward(values)


def _qwen3_moe(values: Values, block: int) -> Iterator[ModelTensor]:
    yield from _attention(values, has_norms=True)
    is_sparse = (block + 1) % values.get("decoder_sparse_step", 1) == 0
    if is_sparse and block not in (values.get("mlp_only_layers") or ()):
        yield from _experts(values["hidden_size"], values["moe_intermediate_size"], values["num_experts"])
    else:
        yield from _feed_forward(values)


def _mixtral(values: Values, block: int) -> Iterator[ModelTensor]:
    yield from _attention(values)
    yield from _experts(values["hidden_size"], values["intermediate_size"], values["num_local_experts"])


def _deepseek_v3(values: Values, block: int) -> Iterator[ModelTensor]:
    width, heads = values["hidden_size"], values["num_attention_heads"]
    turned, plain, value = (values[name] for name in ("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"))
    queries, latent = values.get("q_lora_rank"), values["kv_lora_rank"]
    if queries is None:
        yield _rows("self_attn.q_proj", heads * (turned + plain), width, heads)
    else:
        yield _whole("self_attn.q_a_proj", queries, width)
        yield _whole("self_attn.q_a_layernorm", queries)
        yield _rows("self_attn.q_b_proj", heads * (turned + plain), queries, heads)
    yield _whole("self_attn.kv_a_proj_with_mqa", latent + turned, width)
    yield _whole("self_attn.kv_a_layernorm", latent)
    yield _rows("self_attn.kv_b_proj", heads * (plain + value), latent, heads)
    yield _columns("self_attn.o_proj", width, heads * value, heads)
    if block < values["first_k_dense_replace"]:
        yield from _feed_forward(values)
        return
    inner = values["moe_intermediate_size"]
    yield from _experts(width, inner, values["n_routed_experts"])
    shared = inner * values["n_shared_experts"]
    yield _whole("mlp.shared_experts.gate_proj", shared, width)
    yield _whole("mlp.shared_experts.up_proj", shared, width)
    yield _whole("mlp.shared_experts.down_proj", width, shared)


FAMILIES: Mapping[str, Callable[[Values, int], Iterator[ModelTensor]]] = {
    "llama": _dense,
    "qwen3": partial(_dense, has_norms=True),
    "qwen3_moe": _qwen3_moe,
    "mixtral": _mixtral,
    "deepseek_v3": _deepseek_v3,
}
"""A map from `model_type` to the function that yields the tensors of one transformer block, except its two norms."""


def model_of(values: Values, name: str) -> Model:
    """Return the model that a Hugging Face configuration describes.

    name: the name of the model in messages.

    Raises ConfigError for an unknown family, a missing value, or a model with biases.
    """
    family = FAMILIES.get(str(values.get("model_type")))
    if family is None:
        raise ConfigError(
            f"{name}: model_type {values.get('model_type')!r} is no known family; give one of {', '.join(FAMILIES)}, "
            "or a JSON object of names and shapes"
        )
    biased = [key for key in ("attention_bias", "mlp_bias") if values.get(key)]
    if biased:
        raise ConfigError(f"{name}: {biased[0]} is set, and only models without biases are known; give their shapes")
    try:
        words, width, count = (values[key] for key in ("vocab_size", "hidden_size", "num_hidden_layers"))
        is_tied = bool(values.get("tie_word_embeddings", False))
        embedding = _rows if is_tied else _whole
        found = [replace(embedding("model.embed_tokens", words, width), blocks=(0, -1) if is_tied else (0,))]
        for block in range(count):
            norms = (_whole(f"{norm}_layernorm", width) for norm in ("input", "post_attention"))
            for held in (*family(values, block), *norms):
                found.append(replace(held, name=f"model.layers.{block}.{held.name}", blocks=(block,)))
    except KeyError as error:
        raise ConfigError(f"{name}: {error.args[0]} is missing; a configuration of this family has it") from None
    found.append(replace(_whole("model.norm", width), blocks=(-1,)))
    if not is_tied:
        found.append(replace(_rows("lm_head", words, width), blocks=(-1,)))
    return Model(name, count, tuple(sorted(found, key=lambda held: held.expert)))


def _row(family: str, *sizes: int, **more: Any) -> Values:
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    return {"model_type": family, **dict(zip((*names, "num_key_value_heads"), sizes, strict=True)), **more}


_QWEN3: Values = {"head_dim": 128}
_TIED: Values = {**_QWEN3, "tie_word_embeddings": True}
_QWEN3_MOE: Values = {**_QWEN3, "num_experts": 128}
_LATENT: Values = {
    **{"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128},
    **{"n_routed_experts": 256, "n_shared_experts": 1, "first_k_dense_replace": 3, "moe_intermediate_size": 2048},
}
REGISTRY: Mapping[str, Values] = {
    "llama-2-7b": _row("llama", 32000, 4096, 11008, 32, 32, 32),
    "llama-2-13b": _row("llama", 32000, 5120, 13824, 40, 40, 40),
    "llama-2-70b": _row("llama", 32000, 8192, 28672, 80, 64, 8),
    "llama-3-8b": _row("llama", 128256, 4096, 14336, 32, 32, 8),
    "llama-3-70b": _row("llama", 128256, 8192, 28672, 80, 64, 8),
    "llama-3-405b": _row("llama", 128256, 16384, 53248, 126, 128, 8),
    "qwen3-0.6b": _row("qwen3", 151936, 1024, 3072, 28, 16, 8, **_TIED),
    "qwen3-1.7b": _row("qwen3", 151936, 2048, 6144, 28, 16, 8, **_TIED),
    "qwen3-4b": _row("qwen3", 151936, 2560, 9728, 36, 32, 8, **_TIED),
    "qwen3-8b": _row("qwen3", 151936, 4096, 12288, 36, 32, 8, **_QWEN3),
    "qwen3-14b": _row("qwen3", 151936, 5120, 17408, 40, 40, 8, **_QWEN3),
    "qwen3-32b": _row("qwen3", 151936, 5120, 25600, 64, 64, 8, **_QWEN3),
    "qwen3-30b-a3b": _row("qwen3_moe", 151936, 2048, 6144, 48, 32, 4, **_QWEN3_MOE, moe_intermediate_size=768),
    "qwen3-235b-a22b": _row("qwen3_moe", 151936, 4096, 12288, 94, 64, 4, **_QWEN3_MOE, moe_intermediate_size=1536),
    "mixtral-8x7b": _row("mixtral", 32000, 4096, 14336, 32, 32, 8, num_local_experts=8),
    "mixtral-8x22b": _row("mixtral", 32000, 6144, 16384, 56, 48, 8, num_local_experts=8),
    "deepseek-v3": _row("deepseek_v3", 129280, 7168, 18432, 61, 128, 128, **_LATENT),
}
"""A map from name to the values of a well-known model's Hugging Face configuration."""


def model_named(name: str) -> Model:
    """Return the model with this name from the registry, or the model that a JSON file with this name describes.

    A file holds a Hugging Face configuration, or an object that maps the names of parameters to their shapes or to what
    `engine.shapes()` returns. In the second case only ZeRO cuts the parameters. Raises ConfigError for an unknown name
    or a file that cannot be read.
    """
    path = Path(name)
    if path.suffix != ".json":
        if name.lower() in REGISTRY:
            return model_of(REGISTRY[name.lower()], name.lower())
        near = difflib.get_close_matches(name.lower(), REGISTRY, cutoff=0.4) or list(REGISTRY)
        raise ConfigError(f"no model is named {name!r}; give {', '.join(near)}, or the path of a config.json")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"model {name!r} cannot be read ({error}); give the path of a JSON file") from None
    if not isinstance(values, dict):
        raise ConfigError(f"model {name!r} is no JSON object; give a Hugging Face configuration, or names and shapes")
    if "model_type" in values or not values:
        return model_of(values, str(values.get("_name_or_path") or name))
    try:
        tensors = []
        for key, value in values.items():
            given = value if isinstance(value, dict) else {"shape": value}
            shape, group = tuple(map(int, given["shape"])), int(given.get("group", 0))
            tensors.append(ModelTensor(key, shape, (0,), group=group))
        return Model(name, 1, tuple(tensors))
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"model {name!r}: {error}; give a list of numbers for each parameter") from None
