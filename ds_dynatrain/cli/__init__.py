"""The command `ds-dynatrain`. Heavy imports happen inside the commands: `--help` answers at once.

| file | what it does |
|---|---|
| `main` | the commands and their options, but for those of extensions |
| `doctor` | versions, names, accelerator, compiler, launch variables |
| `configuration` | a configuration file against the support table and DeepSpeed's own reading |
| `show` | the doctor's report, as tables or JSON |
| `checkpoints`, `conversion` | contents and soundness of checkpoints; other tools' formats, there and back |
| `jobs` | a coordinator as a command; the status of an elastic job |

May import `balance`, `buddies`, `comparison` and `exact`; start with `main`.
"""
