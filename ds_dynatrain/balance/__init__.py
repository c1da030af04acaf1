"""Which layer belongs to which stage, and which layout is the fastest: answers from a profile, by arithmetic alone.

`profile` is what was measured of each layer. `partition` cuts layers into stages, exactly; `diffusion` by exchanges of
neighbours, to compare with. `schedule` simulates DeepSpeed's pipeline, `cost` and `memory` say what a layout takes, in
seconds and in bytes. `boundaries` and `search` put them together. Nothing here talks to anyone or acts: a profile is a
file, so a laptop can answer for a cluster.
"""
