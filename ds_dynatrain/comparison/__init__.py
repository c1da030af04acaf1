"""The comparison: the same change, done live and by checkpoint and restart, measured in real processes.

The process that the user starts (`command`, `comparison`) launches ranks, which run `worker`; their notes become
`results`, and these `tables`, `charts` and a `report_page` with both. Ranks import torch and DeepSpeed; the first
process imports neither. Both use `job`: sizes, changes, ways.

Ranks run `ours`, `stock` or `dcp`, each a trainer of `workload`; `converter` runs between two jobs of DeepSpeed. Ranks
write down their measurements in `notes`. States of different programs are compared by digests of the tensors that each
framework's own functions return: no code is shared with the subject of the measurement.

May import the package's public names and `exits`; start with `comparison`.
"""
