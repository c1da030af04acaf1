"""What every process of a launch imports, through public names alone; the process that forks them imports it once."""

from __future__ import annotations

from importlib.metadata import entry_points

import deepspeed.runtime.zero.muon.original_muon  # noqa: F401 - slow, and imported late by DeepSpeed
import torch.distributed.run  # noqa: F401
import transformers.models.llama.modeling_llama
import transformers.models.mixtral.modeling_mixtral  # noqa: F401
from transformers import Trainer  # noqa: F401

import ds_dynatrain
import ds_dynatrain.integrations.transformers
import tests.scenarios.models  # noqa: F401

ds_dynatrain.initialize  # noqa: B018  a name that is imported at its first use
commands = {each.name: each.load() for each in entry_points(group="console_scripts", name="ds-dynatrain")}
handlers = {each.name: each.load() for each in entry_points(group="torchrun.handlers")}
