"""Patches of vLLM's backend `sparse_nccl`: which elements of a tensor changed since the last update, and their values.

Format: `SparseWeightPatch` of vLLM 0.33. vLLM marks unchanged elements by NaN, so a patch must not contain NaN.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from ds_dynatrain.errors import TransferError
from ds_dynatrain.weights.receivers.deltas import bits


class SparseWeightPatch(NamedTuple):
    """Changed elements of one tensor: their flat indices (int32) in the whole tensor, and their values."""

    name: str
    indices: torch.Tensor
    values: torch.Tensor
    full_shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes that this patch takes on the wire."""
        return self.indices.nbytes + self.values.nbytes


def patches(
    tensors: Iterator[tuple[str, torch.Tensor]], held: dict[str, torch.Tensor], device: torch.device
) -> Iterator[SparseWeightPatch]:
    """Yield a patch for each tensor that changed, on the given device.

    held: the server's current values on the host, by tensor name. A tensor that is absent is sent as a whole. Each
    tensor is put in `held` before its patch is yielded; clear `held` if a patch does not arrive.

    Raises TransferError for a tensor that a patch cannot describe.
    """
    for name, tensor in tensors:
        flat = tensor.detach().reshape(-1)
        if not flat.is_floating_point() or flat.numel() > torch.iinfo(torch.int32).max:
            raise TransferError(
                f"{name}: a sparse patch of vLLM has at most 2^31 - 1 elements of a floating-point type, and this "
                f"tensor has {flat.numel()} of {flat.dtype}: use a server with the backend nccl, and sparse=False"
            )
        own, before = flat.cpu(), held.get(name)
        if before is None:
            held[name] = own.clone()
            indices = torch.arange(len(own), dtype=torch.int32)
            values = held[name]
        else:
            at = (bits(own) != bits(before)).nonzero().view(-1)
            indices, values = at.to(torch.int32), own[at]
            before[at] = values
        if bool(values.isnan().any()):
            raise TransferError(f"{name} has NaN, which a sparse patch of vLLM cannot carry")
        if len(indices):
            yield SparseWeightPatch(name, indices.to(device), values.to(device), tuple(tensor.shape))
