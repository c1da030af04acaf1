"""DeepSpeed's private layouts: the only place that touches a private name of DeepSpeed's or of torch.distributed's.

The table of folders in `ds_dynatrain/README.md` says what each file knows.
"""

from ds_dynatrain.adapters.versions.deepspeed_versions import check_names
from ds_dynatrain.adapters.versions.torch_versions import check_torch

check_torch()
check_names()
