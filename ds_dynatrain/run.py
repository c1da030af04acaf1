"""`python -m ds_dynatrain.run SCRIPT ARGUMENTS`: run an unchanged Hugging Face script with elastic trainers.

Under torchrun: `torchrun --nnodes=2:8 --rdzv-backend=dynatrain ... -m ds_dynatrain.run train.py ARGUMENTS`, or `-m
ds_dynatrain.run -m package.module ARGUMENTS`. Trainers whose DeepSpeed configuration has no `dynatrain` block behave as
usual.
"""

from __future__ import annotations

import importlib.util
import runpy
import sys
from pathlib import Path

from ds_dynatrain.errors import ConfigError

USAGE = "python -m ds_dynatrain.run SCRIPT [ARGUMENTS], or python -m ds_dynatrain.run -m MODULE [ARGUMENTS]"


def main(arguments: list[str]) -> None:
    """Run a script or module as `__main__`. Raises ConfigError if `arguments` names none."""
    is_module = arguments[:1] == ["-m"]
    rest = arguments[1:] if is_module else arguments
    if not rest or rest[0].startswith("-"):
        raise ConfigError(f"no script was given; {USAGE}")
    from ds_dynatrain import elasticity
    from ds_dynatrain.integrations.transformers import make_trainers_elastic

    if importlib.util.find_spec("deepspeed.elasticity") is None:
        sys.modules["deepspeed.elasticity"] = elasticity
    make_trainers_elastic()
    sys.argv = rest
    if is_module:
        sys.path.insert(0, "")
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(rest[0]).resolve().parent))
        runpy.run_path(rest[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
