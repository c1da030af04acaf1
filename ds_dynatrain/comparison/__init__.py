"""The yardstick: one change, done live and by checkpoint and restart, measured side by side in real processes.

The process that was asked (`comparison`) starts ranks, which run `worker`; what they noted becomes `results`, and these
a table (`markdown`), pictures (`charts`) and a page (`page`). Ranks import torch and DeepSpeed; the process that was
asked imports neither. Both know `job`: sizes, changes, ways.

What ranks run: `ours`, `stock` and `dcp`, each a trainer of `workload`; `converter` is between two runs of DeepSpeed.
`notes` is what they write down. States of different programs are compared by digests of what each framework's own
functions give: no code is shared with what is measured.
"""
