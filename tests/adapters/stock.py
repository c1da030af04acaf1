"""DeepSpeed as it is: an engine of its own on all ranks of a pool, and nothing of it left afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import deepspeed
import torch.distributed as td
from deepspeed.utils import groups
from torch import nn
from torch.distributed import distributed_c10d as c10d

from ds_dynatrain.adapters.zero.stages import reset_counters, restore_linear


@contextmanager
def stock_engine(model: nn.Module, config: dict[str, Any], **arguments: Any) -> Iterator[Any]:
    """The engine of `deepspeed.initialize`; its groups, hooks and process-wide state are gone after the block."""
    with own_groups():
        reset_counters()  # ranks may have had different engines before
        engine, *_ = deepspeed.initialize(model=model, config=config, **arguments)
        try:
            yield engine
        finally:
            engine.module_forward_pre_hook.remove()
            engine.module_forward_post_hook.remove()
            engine.destroy()
            reset_counters()
            restore_linear()


@contextmanager
def own_groups() -> Iterator[None]:
    """Process groups that are made in the block are destroyed after it, and DeepSpeed forgets them."""
    before, known = set(c10d._world.pg_map), _known()
    tables = [(table, dict(table)) for table in known.values() if isinstance(table, dict)]  # others hold them, too
    try:
        yield
    finally:
        if hasattr(groups, "_release_process_group_references"):
            groups._release_process_group_references()
        else:  # DeepSpeed 0.18
            for table, held in tables:
                table.clear()
                table.update(held)
            vars(groups).update(known)
        for group in [group for group in c10d._world.pg_map if group not in before]:
            td.destroy_process_group(group)


def _known() -> dict[str, Any]:
    """What DeepSpeed's module of groups knows of them."""
    return {name: value for name, value in vars(groups).items() if name.isupper() or name == "mpu"}
