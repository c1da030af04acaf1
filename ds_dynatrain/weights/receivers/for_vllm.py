"""`vllm_source`: a source of weights for vLLM's own trainer engines (vLLM 0.33: NCCL, IPC, M2N, sharded RDT)."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any

import torch


def vllm_source(source: Any) -> Any:
    """Return an instance of vLLM's `WeightSource` that reads `source`. vLLM must be installed on the trainer.

    vLLM treats placements of any class but its own as replicas, so a `WeightSource` of this package must not be passed
    to vLLM directly.

    source: from `weights.source(engine)`, with `full_on="all"` for IPC and RDT. Make new ones of both after a switch.
    """
    from vllm.distributed.weight_transfer import base  # type: ignore[import-not-found]

    def placement(ours: Any) -> Any:
        return base.Shard(ours.dim) if ours.is_shard() else base.Replicate()

    class Source(base.WeightSource):  # type: ignore[misc]
        @cached_property
        def metadata(self) -> list[Any]:
            return [
                base.ParamMeta(
                    each.name,
                    each.dtype,
                    each.shape,
                    owners=each.owners,
                    mesh_shape=each.mesh_shape,
                    placements=None if each.placements is None else tuple(map(placement, each.placements)),
                )
                for each in source.metadata
            ]

        def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
            return iter(source.iter_full())

        def iter_local(self) -> Iterator[tuple[str, torch.Tensor]]:
            return iter(source.iter_local())

    return Source()
