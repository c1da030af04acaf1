"""A script for launchers other than torchrun: trains 8 steps, and prints its layout. `launched.py elastic|switch`."""

import sys

import torch

import ds_dynatrain

CONFIG = {
    "train_batch_size": 8,
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "zero_optimization": {"stage": 1},
}

is_elastic = sys.argv[1] == "elastic"
torch.manual_seed(0)
dataset = torch.utils.data.TensorDataset(torch.randn(64, 16), torch.randint(0, 4, (64,)))
model = torch.nn.Linear(16, 4)


def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(engine(x), y)


block = {"elastic": {}} if is_elastic else {"layout": {"data": 2}}
engine, _, loader, _ = ds_dynatrain.initialize(
    model=model, config={**CONFIG, "dynatrain": block}, training_data=dataset
)
for x, y in loader:
    engine.backward(loss_of(x, y))
    engine.step()
    if engine.global_steps == 3 and not is_elastic:
        engine.switch(data=1, at=5)
if engine.global_rank == 0:
    print(f"rank 0: {engine.global_steps} steps, {engine.layout}")
