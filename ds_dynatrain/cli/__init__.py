"""The command `ds-dynatrain`. Heavy imports happen inside of a command: `--help` answers at once.

| file | what it does |
|---|---|
| `main`, `balance`, `exits` | the commands and their options; how one ends that cannot do what it is asked |
| `advice` | what a profile says of layouts |
| `environment` | versions, names, accelerator, compiler, launch variables |
| `configuration` | a configuration file against the support table and DeepSpeed's own reading |
| `exact_machine` | what an exact job needs of a machine, and how kernels round on it |
| `show` | all of it, as tables or JSON |
| `checkpoints`, `conversion` | what is in a checkpoint, and whether it is sound; other tools' formats, there and back |
| `exact_runs` | two runs of an exact job, held against each other |
| `membership` | a coordinator as a command; the status of an elastic job |
"""
