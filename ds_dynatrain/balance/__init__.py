"""Which layer belongs to which stage, and what a layout costs: the `balance` block, and answers from a profile.

In a job `extension` is what the engine calls. `balancer` times layers in windows, by `timed_model` and `adapters/`, and
`acting` asks for moves. `suggesting` answers `engine.suggest` and `"layouts": "best"`. `rows` is for the docs.

All else is arithmetic, and needs neither torch nor DeepSpeed. `profile` is what was measured of each layer. `partition`
cuts layers into stages, exactly; `diffusion` by exchanges of neighbours, to compare with. `schedule` plays DeepSpeed's
pipeline schedule through. `deal` says who gets how many samples, `links` what messages take, `memory` what a rank
holds, and `cost` puts the seconds of a step together. `choose` compares layouts by it, and `decision` says whether a
move pays. `window` makes a profile of what ranks timed, `advice` proposes boundaries from one, and `course` is what
members remember of moves. A profile is a file, so a laptop can answer for a cluster: `command` and `prediction` are
`ds-dynatrain balance`.
"""
