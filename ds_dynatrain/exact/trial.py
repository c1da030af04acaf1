"""What this machine makes of a few kernels: whether their bits follow where operands lie, and what the bits are.

Operands are made by whole numbers, so they are the same everywhere, and lie at several places behind an aligned
address, as parts of flat buffers do, whose places follow from the ZeRO stage and the world.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch.nn import functional

PLACES = (0, 1, 3, 8)
"""Numbers behind an address that torch has aligned."""
SHAPES = ((3, 24, 96), (16, 64, 64), (5, 33, 7))
"""Rows, features in and out, of a linear layer. MKL rounds the first by its alignment, where it is not told to."""
LENGTH = 1003


@dataclass(frozen=True)
class Trial:
    """moving: the kernels whose bits follow the place of their operands. bits: one hash over what all gave."""

    moving: tuple[str, ...]
    bits: str


def try_kernels(
    kernels: Mapping[str, Callable[[int], Iterator[torch.Tensor]]] | None = None, device: str = "cpu"
) -> Trial:
    """Run each at all places. kernels: by default those of a transformer and of its optimizer. device: where."""
    hashed, moving = hashlib.blake2b(digest_size=8), []
    for name, kernel in (KERNELS if kernels is None else kernels).items():
        with torch.device(device):
            found = [_bytes(kernel(place)) for place in PLACES]
        hashed.update(found[0])
        if any(other != found[0] for other in found):
            moving.append(name)
    return Trial(tuple(moving), hashed.hexdigest())


def _products(place: int, dtype: torch.dtype = torch.float32) -> Iterator[torch.Tensor]:
    """Of linear layers, forward and backward."""
    for rows, features, out in SHAPES:
        sizes = (rows, features), (out, features), (rows, out)
        inputs, weight, gradient = (_placed(place, *size, dtype=dtype) for size in sizes)
        yield functional.linear(inputs, weight)
        yield gradient @ weight
        yield gradient.t() @ inputs


def _functions(place: int) -> Iterator[torch.Tensor]:
    """Element by element, and over rows."""
    values, targets = _placed(place, 17, 59), torch.arange(17)
    yield functional.gelu(values)
    yield functional.layer_norm(values, (59,))
    yield functional.softmax(values, -1)
    yield functional.cross_entropy(values, targets)


def _updates(place: int) -> Iterator[torch.Tensor]:
    """Three steps of AdamW."""
    for foreach in (False, True):
        held = torch.nn.Parameter(_placed(place, LENGTH))
        optimizer = torch.optim.AdamW([held], lr=1e-3, weight_decay=0.1, foreach=foreach)
        for _ in range(3):
            held.grad = held.detach() * 0.5
            optimizer.step()
        yield held.detach()


KERNELS: Mapping[str, Callable[[int], Iterator[torch.Tensor]]] = {
    "products": _products,
    "products in bf16": partial(_products, dtype=torch.bfloat16),
    "products in fp16": partial(_products, dtype=torch.float16),
    "functions": _functions,
    "updates": _updates,
}


def _placed(place: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Numbers between -8 and 8, so many behind an aligned address."""
    count = torch.Size(shape).numel()
    room = torch.empty(place + count, dtype=dtype)
    whole = (torch.arange(count) * 40503 + 12289) % 65536 - 32768
    return room[place:].copy_(whole / 4096).view(shape)


def _bytes(found: Iterator[torch.Tensor]) -> bytes:
    return b"".join(each.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes() for each in found)
