"""DeepSpeed's private layouts: the only place that touches a private name of DeepSpeed's or of torch.distributed's.

May import `data`, `report` and `version`; its folders, lowest first: `versions`, `groups`, `zero`, `model`,
`deepspeed`. Start with `deepspeed/host`.
"""

from ds_dynatrain.adapters.versions.deepspeed_versions import check_names
from ds_dynatrain.adapters.versions.torch_versions import check_torch

check_torch()
check_names()
