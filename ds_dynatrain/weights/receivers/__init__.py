"""Receivers of weights: what `send` brings them to.

| file | receiver |
|---|---|
| `group` | plain torch processes; `group_receiver` is their side, `blocks` the geometry of both |
| `folder` | a folder of safetensors for each version |
| `http` | requests to servers, and the packed broadcast to their workers |
| `vllm`, `sglang` | servers of vLLM and SGLang |
| `trl` | the object that AsyncGRPOTrainer takes as `weight_transfer` |
| `verl` | shards for verl's delta engine |
"""
