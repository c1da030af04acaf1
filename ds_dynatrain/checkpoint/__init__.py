"""A checkpoint of a whole training that any layout can read: the format, and who writes and reads which bytes of it.

| file | role |
|---|---|
| `arrow` | Arrow IPC files, by pyarrow: tables, and data files but for their values |
| `elements` | element types by name |
| `extents` `manifest` | what lies in one piece in a file; the table that says where |
| `shares` `writing` `holding` | what a rank writes, and its files; copies of it, for a save in the background |
| `reading` | a rank's buffers, filled from the byte ranges of its own pieces |
| `files` | regular files only, and no more of them in memory than is allowed |
| `names` | names of tensors and kinds are no paths |
| `hidden` | a file or folder that has its name only when it is whole |
| `convert` `taking` | weights as safetensors, proven; what another tool's checkpoint tells as one of ours |
| **others/** | checkpoints of others, described as tensors at offsets in their files |
| `record` `folder` | `checkpoint.json`; hidden until whole, `latest` last |

Geometry, digests and bytes: no engine, no DeepSpeed, no messages between processes. docs/dev/format.md has the format.
"""

from ds_dynatrain.checkpoint.extents import Extent
from ds_dynatrain.checkpoint.folder import latest, newest, tags
from ds_dynatrain.checkpoint.holding import HostMemory
from ds_dynatrain.checkpoint.manifest import Manifest, Row
from ds_dynatrain.checkpoint.reading import Reader
from ds_dynatrain.checkpoint.record import Record, Saved
from ds_dynatrain.checkpoint.shares import shares_of
from ds_dynatrain.checkpoint.writing import Share, write_shares

__all__ = [
    "Extent",
    "HostMemory",
    "Manifest",
    "Reader",
    "Record",
    "Row",
    "Saved",
    "Share",
    "latest",
    "newest",
    "shares_of",
    "tags",
    "write_shares",
]
