"""Weights out of a training, in any layout: to rollout engines, to Hugging Face folders, and back in.

    from ds_dynatrain import weights

    for name, tensor in weights.source(engine).iter_full():
        ...

| file | role |
|---|---|
| `weight_source` | the weights of one world: full tensors bucket by bucket, or this rank's parts |
| `outputs` `naming` | what leaves the trainer: names, shapes, order, and what each tensor is made of |
| `buckets` | which tensors travel together, and the collective of a bucket |
| `pretrained` | folders for transformers |
| `loading` | the way back: full tensors into weights and masters |
| `update` | `send`: an update with its version, coverage and digests |
| **receivers/** | plain torch ranks, folders, vLLM, SGLang, TRL, verl |

An extension package: nothing imports it but the engine's methods `save_pretrained` and `load_weights`, at their first
call. It needs no vLLM, TRL or verl.

May import `engine`; start with `weight_source`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ds_dynatrain.weights.outputs import ParamMeta
from ds_dynatrain.weights.update import Receiver, Update, send

if TYPE_CHECKING:
    from ds_dynatrain.weights.weight_source import WeightSource, source

__all__ = ["ParamMeta", "Receiver", "Update", "WeightSource", "send", "source"]


def __getattr__(name: str) -> Any:
    """Import the trainer's names only when they are first used, because receivers run without DeepSpeed."""
    if name not in ("WeightSource", "source"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from ds_dynatrain.weights import weight_source

    return getattr(weight_source, name)
