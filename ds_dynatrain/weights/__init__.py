"""Export of a training run's weights, in any layout, to rollout engines and Hugging Face folders, and their import.

    from ds_dynatrain import weights

    for name, tensor in weights.source(engine).iter_full():
        ...

| file | role |
|---|---|
| `weight_source` | the weights of one world: full tensors bucket by bucket, or this rank's parts |
| `outputs` `naming` | the tensors that leave the trainer: names, shapes, order, and the elements they consist of |
| `buckets` | which tensors are gathered together, and the collective that gathers them |
| `pretrained` | writes folders for transformers |
| `loading` | loads full tensors into weights and masters |
| `update` | `send`: an update with its version, coverage and digests |
| **receivers/** | plain torch ranks, folders, vLLM, SGLang, TRL, verl |

Only the engine's methods `save_pretrained` and `load_weights` import this package, at their first call. It does not
require vLLM, TRL or verl.

This package may import only `engine`. Begin reading at `weight_source`.
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
