"""Weights out of a training, in any layout: to rollout engines, to Hugging Face folders, and back in.

    from ds_dynatrain import weights

    for name, tensor in weights.source(engine).iter_full():
        ...

| file | role |
|---|---|
| `source` | the weights of one world: full tensors bucket by bucket, or this rank's parts |
| `buckets` | which tensors travel together, and the collective of a bucket |
| `naming` | names, shapes and order of what leaves the trainer |

An extension package: nothing imports it but the engine's methods `save_pretrained` and `load_weights`, at their first
call. It needs no vLLM, TRL or verl.

May import `engine`; start with `source`.
"""

from ds_dynatrain.weights.source import ParamMeta, WeightSource, source

__all__ = ["ParamMeta", "WeightSource", "source"]
