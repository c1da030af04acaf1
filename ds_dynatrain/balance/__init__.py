"""Which layer belongs to which stage, and what a layout costs: answers from a profile, by arithmetic alone.

`profile` is what was measured of each layer. `partition` cuts layers into stages, exactly; `diffusion` by exchanges of
neighbours, to compare with. `schedule` plays DeepSpeed's pipeline schedule through. `deal` says who gets how many
samples, `links` what messages take, `memory` what a rank holds, and `cost` puts the seconds of a step together.
`choose` compares layouts by it, and `decision` says whether a move pays. `window` makes a profile of what ranks timed,
and `advice` proposes boundaries from one. Nothing here talks to anyone or acts: a profile is a file, so a laptop can
answer for a cluster.
"""
