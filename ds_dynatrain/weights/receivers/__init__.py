"""Receivers of weights, which are the destinations of `send`.

| file | receiver |
|---|---|
| `group` | plain torch processes; `group_receiver` is their side, `board` and `deltas` are used by both |
| `version_folders` | a folder of safetensors for each version |
| `servers` | requests and packed broadcasts, for `vllm` and `sglang` |
| `trl` | the object that AsyncGRPOTrainer takes as `weight_transfer` |
| `verl` | shards for verl's delta engine |
"""

from __future__ import annotations

from ds_dynatrain.weights.receivers.group import Group
from ds_dynatrain.weights.receivers.group_receiver import GroupReceiver
from ds_dynatrain.weights.receivers.sglang import SGLang
from ds_dynatrain.weights.receivers.trl import TRLWeights
from ds_dynatrain.weights.receivers.verl import shards
from ds_dynatrain.weights.receivers.version_folders import Folder
from ds_dynatrain.weights.receivers.vllm import VLLM

__all__ = ["VLLM", "Folder", "Group", "GroupReceiver", "SGLang", "TRLWeights", "shards"]
