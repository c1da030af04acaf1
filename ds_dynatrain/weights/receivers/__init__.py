"""Receivers of weights, which are the destinations of `send`.

| file | receiver | |---|---| | `group` | plain torch processes; `group_receiver` is their side, and both sides use
`board` and `deltas` | | `version_folders` | a folder of safetensors for each version | | `servers` | vLLM and SGLang,
by requests and packed broadcasts | | `trl` | the object that AsyncGRPOTrainer takes as `weight_transfer` | | `verl` |
shards for verl's delta engine |
"""

from __future__ import annotations

from ds_dynatrain.weights.receivers.group import Group
from ds_dynatrain.weights.receivers.group_receiver import GroupReceiver
from ds_dynatrain.weights.receivers.servers import VLLM, SGLang
from ds_dynatrain.weights.receivers.trl import TRLWeights
from ds_dynatrain.weights.receivers.verl import shards
from ds_dynatrain.weights.receivers.version_folders import Folder

__all__ = ["VLLM", "Folder", "Group", "GroupReceiver", "SGLang", "TRLWeights", "shards"]
