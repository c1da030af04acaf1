"""The command `ds-dynatrain`. Heavy imports happen inside the commands, so that `--help` answers at once.

| file | what it does |
|---|---|
| `main` | defines the commands and their options, except those of extensions |
| `doctor` | checks versions, DeepSpeed's private names, accelerator, compiler and launch variables |
| `trial_switch` | tries a switch between two processes, for `doctor --try` |
| `configuration` | checks a configuration file against the support table and with DeepSpeed itself |
| `block` | adds a `dynatrain` block to a configuration file |
| `show` | prints the doctor's report as tables or JSON |
| `checkpoints`, `conversion` | show and check the contents of checkpoints; convert to and from other tools' formats |
| `probe` | measures links under torchrun and writes a cluster file |
| `jobs` | runs a coordinator, shows the status of an elastic job, asks a node to leave |

This package may import only `comparison`, `exact` and `simulate`. Begin reading at `main`.
"""
