"""Measurements of a layout change carried out by several methods: live, or by a checkpoint and a restart.

The process that the user starts (`command`, `comparison`) launches ranks, which run `worker`. The measurements that the
ranks record (`notes`) become `results`, which `report` shows in tables, in charts, and in a page with both.
Ranks import torch and DeepSpeed; the first process imports neither. All of them use `job`: model sizes, changes, and
the ways (methods) to carry out a change.

Ranks run `ours`, `stock` or `dcp`, each of which has a trainer based on `workload`; `stock` also converts between two
jobs of DeepSpeed. To check that the state after a change equals the state before it, digests of tensors are compared.
Each framework's own functions return these tensors, so the check shares no code with what is measured.

This package may import only the package's public names and `exits`. Begin reading at `comparison`.
"""
