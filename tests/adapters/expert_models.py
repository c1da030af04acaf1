"""Small models with experts, and the values of their logical tensors, worked out without ds_dynatrain."""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from deepspeed.moe.layer import MoE
from torch import nn

WIDTH, WORDS, LENGTH = 16, 31, 5
LOCAL_EXPERT = re.compile(r"deepspeed_experts\.(\d+)\.")
COUNTS = (4, 8)
"""Experts of the two layers of `Routed`."""


def autoep_model(kind: str, inner: int = 24, experts: int = 4, heads: int = 2) -> nn.Module:
    """A model of transformers', the same on every rank: "mixtral", "qwen3" (its first layer dense) or "qwen2".

    inner: of an expert; torch's grouped product wants a multiple of 16 bytes. experts: of a layer.
    heads: key-value heads, shared by four.
    """
    import transformers

    sizes: dict[str, Any] = {"vocab_size": WORDS, "hidden_size": WIDTH, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": heads, "num_experts_per_tok": 2, "use_cache": False}
    sizes |= {"max_position_embeddings": 32, "tie_word_embeddings": kind != "mixtral"}
    if kind == "mixtral":
        config = transformers.MixtralConfig(intermediate_size=inner, num_local_experts=experts, **sizes)
    else:
        sizes |= {
            "intermediate_size": 21,
            "moe_intermediate_size": inner,
            "num_experts": experts,
            "norm_topk_prob": True,
        }
        more = {"mlp_only_layers": [0], "head_dim": 4} if kind == "qwen3" else {"shared_expert_intermediate_size": 7}
        config = getattr(transformers, f"{kind.title()}MoeConfig")(**sizes, **more)
    with torch.random.fork_rng():
        torch.manual_seed(5)
        made: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
        for held in made.parameters():
            nn.init.normal_(held, std=0.1)
    return made


def autoep_values(model: nn.Module) -> dict[str, torch.Tensor]:
    """The logical tensors of a model of `autoep_model`: stacks of gate, down and up rows, and the router renamed."""
    found = {}
    for name, held in model.named_parameters():
        path, _, last = name.rpartition(".")
        if last == "gate_up_proj":
            found[f"{path}.w1"], found[f"{path}.w3"] = held.detach().chunk(2, 1)
        elif last == "down_proj":
            found[f"{path}.w2"] = held.detach()
        elif name.endswith("mlp.gate.weight"):
            found[name.replace("mlp.gate", "mlp.router.gate")] = held.detach()
        else:
            found[name.replace("shared_expert.", "shared_experts.").replace("expert_gate.", "experts_gate.")] = (
                held.detach()
            )
    return {name: held.clone() for name, held in found.items()}


class Expert(nn.Module):
    """An MLP of odd sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 21)
        self.down = nn.Linear(21, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        lifted: torch.Tensor = self.down(F.gelu(self.up(hidden)))
        return lifted


class Routed(nn.Module):
    """Two native layers with experts, 4 and 8 of them; the second one is residual."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        options: dict[str, Any] = {"ep_size": size, "use_rts": False, "capacity_factor": 8.0}
        self.first = MoE(WIDTH, Expert(), COUNTS[0], k=1, **options)
        self.norm = nn.LayerNorm(WIDTH)
        options |= {"use_residual": True, "top2_2nd_expert_sampling": False}
        self.second = MoE(WIDTH, Expert(), COUNTS[1], k=2, **options)
        self.out = nn.Linear(WIDTH, WORDS)

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The mean loss of a batch of token ids, both of shape (batch, LENGTH), without an auxiliary loss."""
        hidden = self.words(inputs)
        hidden = hidden + self.first(hidden)[0]
        hidden = hidden + self.second(self.norm(hidden))[0]
        return F.cross_entropy(self.out(hidden).flatten(0, 1).float(), targets.flatten())


def native_model(size: int, index: int) -> Routed:
    """The model of a rank; each logical tensor has values of its own (DeepSpeed would make a layer's experts equal)."""
    with torch.random.fork_rng():
        made = Routed(size)
    for name, held in made.named_parameters():
        held.data.copy_(native_value(native_name(name, size, index), held))
    return made


def native_name(name: str, size: int, index: int) -> str:
    """The name with the number of the expert in its whole layer."""
    count = COUNTS[0] if name.startswith("first") else COUNTS[1]
    return LOCAL_EXPERT.sub(lambda found: f"deepspeed_experts.{int(found[1]) + index * count // size}.", name)


def native_value(name: str, like: torch.Tensor) -> torch.Tensor:
    """What the logical tensor of a name holds."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(like.shape, generator=generator) * 0.1


def native_values() -> dict[str, torch.Tensor]:
    """All logical tensors."""
    return {name: held.detach().clone() for name, held in native_model(1, 0).named_parameters()}


def config(stage: int, size: int = 1, dtype: str = "fp32", autoep: bool = True, **more: Any) -> dict[str, Any]:
    """A configuration of DeepSpeed's; clipping that bites."""
    made: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "steps_per_print": 10**9,
        "gradient_clipping": 0.01,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        **more,
    }
    if dtype == "bf16":
        made["bf16"] = {"enabled": True}
    if autoep:
        made["expert_parallel"] = {"enabled": True, "autoep_size": size}
    return made


def batch(step: int, rank: int, ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A rank's share of 8 samples, the same in all for any number of ranks."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, WORDS, (8, LENGTH), generator=generator)
    share = 8 // ranks
    mine = tokens[rank * share : (rank + 1) * share]
    return mine, mine.roll(1, 1)


def experts_of(values: Mapping[str, torch.Tensor]) -> list[str]:
    """Names of the logical tensors that belong to routed experts, in order."""
    return [name for name in values if re.search(r"experts\.(w[123]$|\d)", name) and "mlp.shared" not in name]
