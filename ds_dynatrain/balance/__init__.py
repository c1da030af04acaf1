"""Timing of layers and members, predicted step times, and the partition of layers into pipeline stages.

This package implements the `balance` block of a configuration and the command `ds-dynatrain balance`.

In a job the engine calls `extension`, which also answers `engine.suggest` and `"layouts": "best"`. `balancer` times
layers in windows (a number of timed steps), using `timed_model` and `adapters/`, and requests moves (switches to
layouts that are predicted to be faster). `config` defines the block, and `balance_rows` its row in the table of
features.

The other files are arithmetic and need neither torch nor DeepSpeed. `profile` holds the measurements of each layer.
`partition` finds the best division of the layers into stages. `deal` computes the samples and the bytes of every rank.
`step_time` simulates DeepSpeed's pipeline schedule and predicts the step time. `choose` compares layouts by that time,
and `decision` determines whether a move pays. `window` makes a profile from the ranks' timings, `advice` proposes a
layout from a profile, and `course` is the record of moves that all members share. A profile is a file, so a laptop can
predict for a cluster: `command` and `prediction` implement `ds-dynatrain balance`.

This package may import only `engine` and `exits`. Begin reading at `extension`.
"""
