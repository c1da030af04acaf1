"""One rank of `bench_experts.py`: layers of AutoEP whose routers are told their skew, before and after swaps.

torchrun ... expert_ranks.py FOLDER '{"skew": 1.0, "rounds": 3, "steps": 8}'
"""

from __future__ import annotations

import json
import sys
import time
from statistics import median
from typing import Any

import deepspeed
import torch
import torch.distributed as td
import transformers
from launch import Notes
from told_routes import told, zipf
from torch import nn
from workload import quiet

import ds_dynatrain

WIDTH, INNER, LAYERS, EXPERTS, WORDS, LENGTH, SAMPLES = 128, 512, 2, 8, 64, 128, 4
UNTIMED = 3
"""Steps after each switch that are not timed."""


class Tokens(torch.utils.data.Dataset[Any]):
    """Random ones."""

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randint(0, WORDS, (LENGTH,), generator=torch.Generator().manual_seed(index))


def mixture() -> nn.Module:
    """A Mixtral whose tokens have one expert each."""
    torch.manual_seed(5)
    sizes = {"vocab_size": WORDS, "hidden_size": WIDTH, "intermediate_size": INNER, "num_hidden_layers": LAYERS}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 4, "num_local_experts": EXPERTS}
    config = transformers.MixtralConfig(**sizes, num_experts_per_tok=1, use_cache=False)
    made: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
    return made


def main() -> None:
    """Measure with the experts in order and where they are proposed to be, in turn."""
    folder, wanted = sys.argv[1], json.loads(sys.argv[2])
    quiet()
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # nobody has to wait for a compiler
    deepspeed.init_distributed(verbose=False)
    config = {
        "train_batch_size": 2 * SAMPLES,
        "train_micro_batch_size_per_gpu": SAMPLES,
        "steps_per_print": 10**9,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": 1},
        "expert_parallel": {"enabled": True, "use_grouped_mm": False},
        "dynatrain": {
            "layout": {"data": 2, "expert": 2},
            "timeout_seconds": 120,
            "balance": {"experts": True, "every_steps": wanted["steps"], "window_steps": wanted["steps"] // 2},
        },
    }
    shares = zipf(EXPERTS, wanted["skew"])
    engine, _, loader, _ = ds_dynatrain.initialize(model=mixture(), config=config, training_data=Tokens())
    batches = iter(loader)

    def trained(steps: int) -> list[float]:
        found = []
        for _ in range(steps):
            begin, batch = time.perf_counter(), next(batches)
            engine.backward(engine(input_ids=batch, labels=batch).loss)
            engine.step()
            found.append(time.perf_counter() - begin)
        return found

    with told(lambda: engine.module, lambda _: shares):
        trained(UNTIMED + wanted["steps"])
        advice = engine.balancer.advise()
        took: list[list[float]] = [[], []]
        events = []
        for _ in range(wanted["rounds"]):
            for place, layout in enumerate((advice.present, advice.proposed)):
                if layout != engine.layout:
                    engine.switch(layout, at=engine.global_steps)
                    trained(UNTIMED)
                    events.append(engine.last_switch)
                took[place] += trained(wanted["steps"])
        trained(UNTIMED + wanted["steps"])
        after = engine.balancer.advise()
    said = {
        "shares": [shares] * LAYERS,
        "rows": advice.proposed.experts,
        "ratios": [[each.present, each.proposed, each.bound] for each in advice.experts],
        "predicted": [advice.present_time.seconds, advice.proposed_time.seconds],
        "again": after.present_time.seconds,
        "measured": [median(each) for each in took],
        "bytes": [[event.bytes_sent, event.bytes_minimum] for event in events],
        "outcomes": [event.outcome for event in events],
    }
    Notes(folder, td.get_rank()).write(said)


if __name__ == "__main__":
    main()
