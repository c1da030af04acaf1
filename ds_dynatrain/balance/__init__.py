"""Which layer belongs to which stage: answers from a profile, by arithmetic alone.

`profile` is what was measured of each layer. `partition` cuts layers into stages, exactly; `diffusion` by exchanges of
neighbours, to compare with. `schedule` plays DeepSpeed's pipeline schedule through. Nothing here talks to anyone or acts: a profile is a file, so a laptop can answer for a
cluster.
"""
