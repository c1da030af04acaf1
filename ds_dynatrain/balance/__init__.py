"""Timing of layers and members, predicted step times, and the partition of layers into pipeline stages.

The folder implements the `balance` block of a configuration and the command `ds-dynatrain balance`.

In a job the engine calls `extension`, which also answers `engine.suggest` and `"layouts": "best"`. `balancer` times
layers in windows, using `timed_model` and `adapters/`, and requests moves. `config` defines the block, and
`balance_rows` its row in the table of features.

The other files are arithmetic and need neither torch nor DeepSpeed. `profile` holds the measurements of each layer.
`partition` finds the best division of the layers into stages. `deal` computes the samples and the bytes of every rank.
`step_time` simulates DeepSpeed's pipeline schedule and adds up the seconds of a step. `choose` compares layouts by that
time, and `decision` determines whether a move pays. `window` makes a profile from the ranks' timings, `advice` proposes
a layout from a profile, and `course` is the members' shared record of moves. A profile is a file, so a laptop can
predict for a cluster: `command` and `prediction` implement `ds-dynatrain balance`.

May import `engine` and `exits`; start with `extension`.
"""
