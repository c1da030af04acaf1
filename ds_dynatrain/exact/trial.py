"""A trial of a few kernels on this machine: do their results depend on where the operands lie in memory?

The trial also returns a hash of the results. Operands are made from whole numbers, so they are the same everywhere.
They begin at several offsets from an aligned address, like the parts of flat buffers, whose offsets depend on the ZeRO
stage and the layout.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch.nn import functional

PLACES = (0, 1, 3, 8)
"""Offsets, in elements, of the operands from an address that torch has aligned."""
SHAPES = ((3, 24, 96), (16, 64, 64), (5, 33, 7))
"""Rows, input features and output features of linear layers.

With the first shape, MKL's rounding depends on alignment unless MKL_CBWR forbids that.
"""
LENGTH = 1003


@dataclass(frozen=True)
class Trial:
    """The result of a trial of kernels.

    moving: the kernels whose results depend on the memory position of their operands.
    bits: one hash of the results of all kernels.
    """

    moving: tuple[str, ...]
    bits: str


def try_kernels(
    kernels: Mapping[str, Callable[[int], Iterator[torch.Tensor]]] | None = None, device: str = "cpu"
) -> Trial:
    """Run each kernel with its operands at all offsets of `PLACES`.

    kernels: the kernels, keyed by name; None for those of a transformer and its optimizer.
    device: the device on which they run.
    """
    hashed, moving = hashlib.blake2b(digest_size=8), []
    for name, kernel in (KERNELS if kernels is None else kernels).items():
        with torch.device(device):
            found = [_bytes(kernel(place)) for place in PLACES]
        hashed.update(found[0])
        if any(other != found[0] for other in found):
            moving.append(name)
    return Trial(tuple(moving), hashed.hexdigest())


def _products(place: int, dtype: torch.dtype = torch.float32) -> Iterator[torch.Tensor]:
    """Yield the matrix products of linear layers, forward and backward."""
    for rows, features, out in SHAPES:
        sizes = (rows, features), (out, features), (rows, out)
        inputs, weight, gradient = (_placed(place, *size, dtype=dtype) for size in sizes)
        yield functional.linear(inputs, weight)
        yield gradient @ weight
        yield gradient.t() @ inputs


def _functions(place: int) -> Iterator[torch.Tensor]:
    """Yield the results of functions that work element by element, or over rows."""
    values, targets = _placed(place, 17, 59), torch.arange(17)
    yield functional.gelu(values)
    yield functional.layer_norm(values, (59,))
    yield functional.softmax(values, -1)
    yield functional.cross_entropy(values, targets)


def _updates(place: int) -> Iterator[torch.Tensor]:
    """Yield a parameter after three steps of AdamW, without and with `foreach`."""
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
    """Return a tensor of numbers between -8 and 8 whose memory begins `place` elements after an aligned address."""
    count = torch.Size(shape).numel()
    room = torch.empty(place + count, dtype=dtype)
    whole = (torch.arange(count) * 40503 + 12289) % 65536 - 32768
    return room[place:].copy_(whole / 4096).view(shape)


def _bytes(found: Iterator[torch.Tensor]) -> bytes:
    return b"".join(each.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes() for each in found)
