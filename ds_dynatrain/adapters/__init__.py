"""Adapters to DeepSpeed: the only folder that touches private names of DeepSpeed or of torch.distributed.

May import `data`, `report` and `version`. Its folders, lowest first, are `versions`, `groups`, `zero`, `model` and
`deepspeed`. Start with `deepspeed/host`.
"""

from ds_dynatrain.adapters.versions.deepspeed_versions import check_names
from ds_dynatrain.adapters.versions.torch_versions import check_torch

check_torch()
check_names()
