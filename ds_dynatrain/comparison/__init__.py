"""Comparison of the same layout change done live and by checkpoint and restart, measured in real processes.

The process that the user starts (`command`, `comparison`) launches ranks, which run `worker`. The measurements that
they record (`notes`) become `results`, which are shown in `tables`, `charts` and a `report_page` with both. Ranks
import torch and DeepSpeed; the first process imports neither. All of them use `job`: model sizes, changes, and the ways
to carry out a change.

Ranks run `ours`, `stock` or `dcp`, each of which has a trainer based on `workload`; `converter` runs between two jobs
of DeepSpeed. States of different programs are compared by digests of the tensors that each framework's own functions
return, so the check shares no code with what is measured.

May import the package's public names and `exits`; start with `comparison`.
"""
