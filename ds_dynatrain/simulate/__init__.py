"""A simulator of weeks of losses, pre-emptions, slow-downs and joins, without a job, a GPU or torch.

The folder implements `ds-dynatrain simulate` (`command`). `trace` reads what happens to which members, or draws it
from distributions. `simulated_job` knows what a step, a switch and a checkpoint take, from a profile and a cluster
file. `policies` has one function per rival, which answers each event. `player` plays a trace against a policy and adds
up where the time goes, as an `outcome`, which that file also prints and draws.

All of it is a pure function of its arguments: nothing reads a clock, and every draw has a seed.

May import `balance`, `buddies` and `dry_run`; start with `player`.
"""
