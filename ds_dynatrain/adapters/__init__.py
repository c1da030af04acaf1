"""Adapters to DeepSpeed's engine: they start it, and detach and reattach its parts in a live switch.

No other package touches private names of DeepSpeed or of torch.distributed.

This package may import only `data`, `report` and `version`. Its folders, lowest first, are `versions`, `groups`,
`zero`, `model` and `deepspeed`. Begin reading at `deepspeed/host`.
"""

from ds_dynatrain.adapters.versions.deepspeed_versions import check_names
from ds_dynatrain.adapters.versions.torch_versions import check_torch

check_torch()
check_names()
