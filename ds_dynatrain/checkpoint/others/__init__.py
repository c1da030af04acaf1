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
