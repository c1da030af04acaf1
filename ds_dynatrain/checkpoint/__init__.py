"""Checkpoints of a whole job that any layout can read: the format, and which rank writes and reads which bytes.

| file | role |
|---|---|
| `arrow` | Arrow IPC files, by pyarrow: tables, and data files except their values |
| `extents` `manifest` | runs that lie in one piece in a file, element types by name; the table that says where |
| `writing` | what a rank writes, and its files; copies of it, for a save in the background |
| `reading` | a rank's buffers, filled from the byte ranges of its own pieces; whole tensors, proven |
| `files` | regular files only, and no more of them in memory than is allowed; names; hidden until whole |
| `record` `folder` | `checkpoint.json`; hidden until whole, `latest` last |
| **others/** | checkpoints of other tools, as tensors at offsets in their files, and ours in their formats |

Geometry, digests and bytes: no engine, no DeepSpeed, no messages between processes. docs/dev/format.md has the format.

May import `transfer` and `version`; start with `manifest`.
"""

from ds_dynatrain.checkpoint.extents import Extent
from ds_dynatrain.checkpoint.folder import latest, newest, tags
from ds_dynatrain.checkpoint.manifest import Manifest, ManifestRow
from ds_dynatrain.checkpoint.reading import Reader
from ds_dynatrain.checkpoint.record import Saved, TrainingRecord
from ds_dynatrain.checkpoint.writing import HostMemory, Share, shares_of, write_shares

__all__ = [
    "Extent",
    "HostMemory",
    "Manifest",
    "ManifestRow",
    "Reader",
    "Saved",
    "Share",
    "TrainingRecord",
    "latest",
    "newest",
    "shares_of",
    "tags",
    "write_shares",
]
