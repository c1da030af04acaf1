"""Which layer belongs to which stage, and what a layout costs: the `balance` block, and answers from a profile.

In a job `extension` is what the engine calls; it answers `engine.suggest` and `"layouts": "best"`, too. `balancer`
times layers in windows, by `timed_model` and `adapters/`, and asks for moves. `rows` is for the docs.

All else is arithmetic, and needs neither torch nor DeepSpeed. `profile` is what was measured of each layer. `partition`
cuts layers into stages, exactly. `deal` says who gets how many samples and holds how many bytes, and `cost` plays
DeepSpeed's pipeline schedule through and puts the seconds of a step together. `choose` compares layouts by it, and
`decision` says whether a move pays. `window` makes a profile of what ranks timed, `advice` proposes boundaries from
one, and `course` is what members remember of moves. A profile is a file, so a laptop can answer for a cluster:
`command` and `prediction` are `ds-dynatrain balance`.
"""
