"""Receivers of weights: what `send` brings them to.

| file | receiver |
|---|---|
| `group` | plain torch processes; `group_receiver` is their side, `board` and `deltas` are used by both |
| `version_folders` | a folder of safetensors for each version |
| `servers` | requests and packed broadcasts, for `vllm` and `sglang` |
| `trl` | the object that AsyncGRPOTrainer takes as `weight_transfer` |
| `verl` | shards for verl's delta engine |
"""
