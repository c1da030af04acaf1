"""The command `ds-dynatrain`. Heavy imports happen inside of a command: `--help` answers at once.

| file | what it does |
|---|---|
| `main` | the commands and their options, but for those of extensions |
| `environment` | versions, names, accelerator, compiler, launch variables |
| `configuration` | a configuration file against the support table and DeepSpeed's own reading |
| `show` | all of it, as tables or JSON |
| `checkpoints`, `conversion` | what is in a checkpoint, and whether it is sound; other tools' formats, there and back |
| `membership` | a coordinator as a command; the status of an elastic job |
"""
