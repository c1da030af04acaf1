"""Checkpoints of other tools, described as tensors at offsets in their files.

They are read in place, never loaded whole.

| file | role |
|---|---|
| `torch_files` | reads the structure of `torch.save` files without values and without running code; checks CRC32s |
| `foreign` | describes a checkpoint of any tool, and converts it to one of ours |
| `zero_files` | finds the buffers of each rank in a DeepSpeed checkpoint folder |
| `zero_folder` | describes these buffers as rows of a manifest, with or without the model |
| `universal_folder` `dcp_folder` `safetensors` | read and write DeepSpeed's universal format, DCP, safetensors |
| `recognize` | finds out which tool wrote the checkpoint at a path |

This package uses neither an engine nor DeepSpeed; it knows only what the files contain. May import what `checkpoint`
may; start with `recognize`.
"""

from ds_dynatrain.checkpoint.others.torch_files import (
    Archive,
    Stored,
    check_crcs,
    fields_of,
    read_tree,
    value_of,
    with_values,
)
from ds_dynatrain.checkpoint.others.zero_files import ZeroFolder, carry_of, is_zero_folder
from ds_dynatrain.checkpoint.others.zero_folder import frozen_left_out, rows_of, rules_then, scalars_of, then

__all__ = [
    "Archive",
    "Stored",
    "ZeroFolder",
    "carry_of",
    "check_crcs",
    "fields_of",
    "frozen_left_out",
    "is_zero_folder",
    "read_tree",
    "rows_of",
    "rules_then",
    "scalars_of",
    "then",
    "value_of",
    "with_values",
]
