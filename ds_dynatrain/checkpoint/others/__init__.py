"""Checkpoints of other tools, described as tensors at offsets in their files: read in place, never loaded whole.

| file | role |
|---|---|
| `torch_files` | files of `torch.save`, without their values and without running anything; the CRC32s in them |
| `foreign` | what a checkpoint of any tool tells of a training, and how it is written as one of ours |
| `zero_files` | a checkpoint folder of DeepSpeed's: which file has which buffer of which rank |
| `zero_folder` | the same as rows of a manifest, by the arithmetic of the space; from the files alone |
| `universal_folder` `dcp_folder` `safetensors` | DeepSpeed's universal format, torch's DCP, safetensors: both ways |
| `recognize` | which tool's checkpoint lies at a path |

Knows no engine and no DeepSpeed: the files say what they are.

May import what `checkpoint` may; start with `recognize`.
"""

from ds_dynatrain.checkpoint.others.torch_files import (
    Archive,
    Opaque,
    Stored,
    check_crcs,
    fields_of,
    read_tree,
    value_of,
    with_values,
)
from ds_dynatrain.checkpoint.others.zero_files import ZeroFolder, carry_of, is_zero_folder
from ds_dynatrain.checkpoint.others.zero_folder import frozen_left_out, layout_of, rows_of, rules_then, scalars_of, then

__all__ = [
    "Archive",
    "Opaque",
    "Stored",
    "ZeroFolder",
    "carry_of",
    "check_crcs",
    "fields_of",
    "frozen_left_out",
    "is_zero_folder",
    "layout_of",
    "read_tree",
    "rows_of",
    "rules_then",
    "scalars_of",
    "then",
    "value_of",
    "with_values",
]
