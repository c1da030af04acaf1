"""Checkpoints of a whole job that any layout can read: the format, and which rank writes and reads which bytes.

| file | role |
|---|---|
| `arrow` | Arrow IPC files, made with pyarrow: tables, and data files |
| `extents` `manifest` | parts of tensors that are contiguous in a file; the table of their positions |
| `writing` | what each rank writes, and its files; copies in host memory for a save in the background |
| `reading` | fills a rank's buffers from the byte ranges of its pieces; reads whole tensors and checks digests |
| `files` | safe access to untrusted files and names; files and folders that appear when complete |
| `record` `folder` | `checkpoint.json`; a folder of checkpoints, each of which appears when complete |
| **others/** | reads checkpoints of other tools, and converts ours to their formats |

This package uses neither an engine nor DeepSpeed, and sends no messages between processes. docs/dev/format.md describes
the format. This package may import only `transfer` and `version`. Begin reading at `manifest`.
"""
