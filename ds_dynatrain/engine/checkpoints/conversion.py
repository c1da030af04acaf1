"""What another tool's checkpoint tells as a checkpoint of ours: the carry is encoded here, the rest is `taking`'s."""

from __future__ import annotations

from pathlib import Path

import torch

from ds_dynatrain.checkpoint.convert import Progress, silent
from ds_dynatrain.checkpoint.others.foreign import Foreign
from ds_dynatrain.checkpoint.others.torch_files import value_of
from ds_dynatrain.checkpoint.taking import take
from ds_dynatrain.engine.checkpoints.extra_state import packed
from ds_dynatrain.engine.encoding import encode
from ds_dynatrain.errors import CheckpointError, ConfigError


def convert_foreign(foreign: Foreign, folder: Path, progress: Progress = silent) -> Path:
    """Write it into a folder of checkpoints; the new one. Errors as `take`, CheckpointError for values of a carry that
    have no place in ours.
    """
    buffers = {name: value_of(foreign.path, stored) for name, stored in foreign.buffers.items()}
    rest = {"grad_norm": None, "buffers": buffers, "objects": {}}
    tensors: list[torch.Tensor] = []
    try:
        carry = encode(dict(foreign.carry), tensors)
        encoded, shares = packed(0, rest)
    except ConfigError as error:
        raise CheckpointError(f"{foreign.path}: {error}") from None
    if tensors:
        raise CheckpointError(
            f"{foreign.path}: a hyper-parameter or the scheduler's state is a tensor or numpy value; save it with "
            "plain numbers"
        )
    return take(foreign, folder, carry, encoded, shares, progress)
