"""Checkpoints of others, described as tensors at offsets in their files: read in place, never loaded whole.

| file | role |
|---|---|
| `pickles` | what a pickle would make, counted before it is read |
| `archives` | the zip that `torch.save` writes, and the CRC32s in it |
| `torch_files` | what `torch.save` wrote, without its values and without running anything |
| `zero_files` | a checkpoint folder of DeepSpeed's: which file has which buffer of which rank |
| `zero_rows` | the same as rows of a manifest, by the arithmetic of the space |
| `universal` `dcp` | ours in DeepSpeed's universal format, and in that of torch's distributed checkpoints |
| `foreign` | what a checkpoint tells of a training, whosever it is; from here on no format matters |
| `zero_reader` `universal_reader` `dcp_reader` `safetensors_reader` | the same from each tool's files alone |
| `recognize` | whose checkpoint lies at a path |

Knows no engine and no DeepSpeed: the files say what they are.
"""

from ds_dynatrain.checkpoint.others.archives import Archive, check_crcs
from ds_dynatrain.checkpoint.others.pickles import Opaque
from ds_dynatrain.checkpoint.others.torch_files import Stored, fields_of, read_tree, value_of, with_values
from ds_dynatrain.checkpoint.others.zero_files import ZeroFolder, is_zero_folder, scaler_fields
from ds_dynatrain.checkpoint.others.zero_rows import frozen_left_out, layout_of, rows_of, rules_then, scalars_of, then

__all__ = [
    "Archive",
    "Opaque",
    "Stored",
    "ZeroFolder",
    "check_crcs",
    "fields_of",
    "frozen_left_out",
    "is_zero_folder",
    "layout_of",
    "read_tree",
    "rows_of",
    "rules_then",
    "scalars_of",
    "scaler_fields",
    "then",
    "value_of",
    "with_values",
]
