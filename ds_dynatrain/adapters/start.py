"""What `deepspeed.initialize` does around the engine's constructor, for an engine class of our own."""

from __future__ import annotations

import importlib
import shutil
from typing import Any, TypeVar

from deepspeed import ops, set_optimizer_flags, zero
from deepspeed.runtime.engine import DeepSpeedEngine

from ds_dynatrain.adapters.versions import configure_python_gc, mend

E = TypeVar("E", bound=DeepSpeedEngine)


def engine_around(kind: type[E], settings: tuple[dict[str, Any], Any], **arguments: Any) -> E:
    """An engine of class `kind`, built as `deepspeed.initialize` builds one; the world must be installed.

    settings: the configuration as a dictionary and parsed (`settings.layout_config`).
    """
    mend()
    zero.partition_parameters.shutdown_init_context()
    config, parsed = settings
    set_optimizer_flags(parsed, arguments["model"])
    engine: E = kind(config=config, config_class=parsed, **arguments)
    zero.partition_parameters.restore_init_context()
    configure_python_gc(engine)
    return engine


def start_without_compiler() -> None:
    """Let DeepSpeed start where there is no C++ compiler: its CPU back-end would build an op at once and die."""
    if shutil.which("c++") is None and shutil.which("g++") is None:
        ops.__compatible_ops__["deepspeed_shm_comm"] = False


def import_what_is_lazy() -> None:
    """Modules that DeepSpeed imports in the first build of an optimizer: a second each,
    and not to be paid in a pause.
    """
    for name in ("zero.muon.muon_optimizer", "superoffload.superoffload_stage3", "zero.stage3", "zero.stage_1_and_2"):
        try:
            importlib.import_module(f"deepspeed.runtime.{name}")
        except ImportError:  # it has moved: the first switch is slower, and right all the same
            continue
