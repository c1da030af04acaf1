"""A simulator of weeks of losses, pre-emptions, slow-downs and joins, without a job, a GPU or torch.

The folder implements `ds-dynatrain simulate` (`command`). `trace` reads which events happen to which members and when,
or draws them from distributions. `simulated_job` computes how long a step, a switch and a checkpoint take, from a
profile and a cluster file. `policies` has one function per policy, which returns the policy's reaction to an event.
`player` simulates a trace under each policy and adds up the time spent on each activity. The result is an `outcome`,
which that file also prints and draws.

All of it is a pure function of its arguments: nothing reads a clock, and every random draw has a seed.

This package may import only `balance`, `buddies` and `dry_run`. Begin reading at `player`.
"""
