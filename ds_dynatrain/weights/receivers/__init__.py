"""Receivers of weights, which are the destinations of `send`.

- `group`: plain torch processes. `group_receiver` is their side; both sides use `board` and `deltas`.
- `version_folders`: a folder of safetensors for each version.
- `servers`: vLLM and SGLang, by requests and packed broadcasts; `patches` are vLLM's sparse updates.
- `trl`: the object that AsyncGRPOTrainer takes as `weight_transfer`.
- `verl`, `for_vllm`: what verl's delta engine and vLLM's own trainer engines read.
"""

from __future__ import annotations

from ds_dynatrain.weights.receivers.for_vllm import vllm_source
from ds_dynatrain.weights.receivers.group import Group
from ds_dynatrain.weights.receivers.group_receiver import GroupReceiver
from ds_dynatrain.weights.receivers.servers import VLLM, SGLang
from ds_dynatrain.weights.receivers.trl import TRLWeights
from ds_dynatrain.weights.receivers.verl import shards
from ds_dynatrain.weights.receivers.version_folders import Folder

__all__ = ["VLLM", "Folder", "Group", "GroupReceiver", "SGLang", "TRLWeights", "shards", "vllm_source"]
