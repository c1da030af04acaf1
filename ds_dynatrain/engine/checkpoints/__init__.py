"""Universal checkpoints of an engine: `ds_dynatrain.checkpoint` has the files, this has the state that goes in and out.

| file | what it does |
|---|---|
| `saving`, `snapshot` | the state of all members into a checkpoint |
| `shared` | the shared carry of one, decoded and of the right types |
| `restore`, `restoration` | out of one into the present layout; one member's part of that |
| `opening`, `sources`, `stock` | what is restored from: ours or DeepSpeed's; which of these DeepSpeed loads itself |
| `converted`, `merging` | one that was converted from another tool's: what it lacks stays as it is |
| `conversion` | such a one, from what another tool's checkpoint tells |
| `extra_state` | what belongs to single ranks |
| `resume` | what a job goes on from when it starts |
| `fallback` | saves that the engine makes by itself |
| `asking` | what stands in the way of a save or a load, and that all ask for the same |
"""
