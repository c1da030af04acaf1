"""ds_dynatrain: DeepSpeed training that changes world size, ZeRO stage and parallel sizes while it runs.

    engine, optimizer, loader, scheduler = ds_dynatrain.initialize(model=model, config=config, training_data=data)
    engine.switch(data=4, zero_stage=3)

Heavy imports (torch, DeepSpeed, numpy) happen at the first use of a name that needs them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ds_dynatrain.errors import DynatrainError, SwitchRefused, WorldChanged
from ds_dynatrain.extension import Extension
from ds_dynatrain.version import __version__

if TYPE_CHECKING:
    from ds_dynatrain.adapters.zero.optimizers import register_optimizer
    from ds_dynatrain.engine.changes import Change
    from ds_dynatrain.engine.initialize import init_distributed, initialize
    from ds_dynatrain.report import SwitchEvent
    from ds_dynatrain.space.layout import Layout

__all__ = [
    "Change",
    "DynatrainError",
    "Extension",
    "Layout",
    "SwitchEvent",
    "SwitchRefused",
    "WorldChanged",
    "__version__",
    "init_distributed",
    "initialize",
    "register_optimizer",
]


_HOMES = {
    "initialize": "engine.initialize",
    "init_distributed": "engine.initialize",
    "register_optimizer": "adapters.zero.optimizers",
    "Change": "engine.changes",
    "Layout": "space.layout",
    "SwitchEvent": "report",
}
"""Map from each name that needs heavy imports to its module."""


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'ds_dynatrain' has no attribute {name!r}")
    return getattr(import_module(f"ds_dynatrain.{_HOMES[name]}"), name)
