"""The yardstick: one change, done live and by checkpoint and restart, measured side by side in real processes.

The process that was asked (`comparison`, `launch`, `assembly`) starts ranks, which run `worker`; what they noted
becomes `results`, and these a table (`markdown`), pictures (`charts`) and a page (`page`). Ranks import torch and
DeepSpeed; the process that was asked imports neither. Both know `job`: sizes, changes, ways.

Of the ranks: `ours`, `stock` and `dcp` are what they run, `converter` is between two runs of DeepSpeed, `workload` is
what they train, `notes` what they write down, `digests` how states of different programs are compared.
"""
