"""Steps of `deepspeed.initialize` around the engine's constructor, for an engine class of our own.

`initialize` returns one optimizer object for the whole job, which forwards to DeepSpeed's current optimizer.
"""

from __future__ import annotations

import importlib
import logging
import os
import shutil
import time
from contextlib import suppress
from inspect import isfunction
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar

import torch
from deepspeed import ops, set_optimizer_flags, zero
from deepspeed.ops.op_builder.builder import OpBuilder
from deepspeed.runtime.engine import DeepSpeedEngine
from torch.utils.file_baton import FileBaton

from ds_dynatrain.adapters.deepspeed.host import Host
from ds_dynatrain.adapters.versions.deepspeed_versions import configure_python_gc, repair_defects
from ds_dynatrain.adapters.versions.replaced import passing_on
from ds_dynatrain.adapters.zero.deepspeed_config import Settings
from ds_dynatrain.adapters.zero.stages import restore_linear
from ds_dynatrain.report import telling_if_long

E = TypeVar("E", bound=DeepSpeedEngine)

LOCK_SECONDS = 60.0
"""Seconds that a process waits for another one to compile an operator before it reports the lock file."""

logger = logging.getLogger("ds_dynatrain")
jit_load = OpBuilder.jit_load


def engine_around(kind: type[E], settings: Settings, **arguments: Any) -> E:
    """Build an engine of class `kind` the way `deepspeed.initialize` does. The world must be installed.

    settings: the configuration as a dictionary and parsed (see `deepspeed_config.layout_config`).
    arguments: further arguments of the engine's constructor.

    Settings that stage 3 changes for the whole process are reset here and in every switch, because a plain DeepSpeed
    engine may have changed them.
    """
    repair_defects()
    restore_linear()
    zero.partition_parameters.shutdown_init_context()
    config, parsed = settings
    set_optimizer_flags(parsed, arguments["model"])
    engine: E = kind(config=config, config_class=parsed, **arguments)
    zero.partition_parameters.restore_init_context()
    configure_python_gc(engine)
    return engine


def start_without_compiler() -> None:
    """Make DeepSpeed start without a C++ compiler, although its CPU back-end would then fail to build an operator."""
    if shutil.which("c++") is None and shutil.which("g++") is None:
        ops.__compatible_ops__["deepspeed_shm_comm"] = False


def tell_of_compilers() -> None:
    """Make one process on each node log a message if it waits long for the compilation of an operator.

    Called when the engine is imported, because DeepSpeed also compiles in calls that a framework or a script makes
    before any call of this package. torch before 2.14 waits without limit until a lock file is gone, and a process that
    is killed while it compiles leaves its lock file behind.
    """
    OpBuilder.jit_load = _load_aloud
    FileBaton.wait = _wait_aloud  # type: ignore[method-assign]


def _load_aloud(self: OpBuilder, verbose: bool = True) -> Any:
    with telling_if_long(f"the operator {self.name}, which a first start compiles; that takes a minute or two"):
        return jit_load(self, verbose)


def _wait_aloud(self: FileBaton) -> None:
    begin, is_said = time.monotonic(), os.environ.get("LOCAL_RANK", "0") != "0"
    lock = Path(self.lock_file_path)
    while lock.exists():
        time.sleep(self.wait_seconds)
        if is_said or time.monotonic() - begin <= LOCK_SECONDS:
            continue
        with suppress(FileNotFoundError):  # the lock may have been removed
            made, is_said = lock.stat(), True
            logger.warning(
                "for %g s this start has waited for another process that compiles %s, which a first start takes a "
                "minute or two for. If it goes on: the lock is %s, made by user %d at %s. Where no such process runs "
                "any more (ninja, c++), it was killed; its user, or another one who may write there, deletes the lock "
                "(rm '%s'), and all that wait go on",
                LOCK_SECONDS,
                lock.parent.name,
                lock,
                made.st_uid,
                time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(made.st_mtime)),
                lock,
            )


def import_what_is_lazy() -> None:
    """Import modules that DeepSpeed would otherwise import during the pause of a switch.

    DeepSpeed imports them when it first builds an optimizer. Each import takes about a second.
    """
    for name in ("zero.muon.muon_optimizer", "superoffload.superoffload_stage3", "zero.stage3", "zero.stage_1_and_2"):
        try:
            importlib.import_module(f"deepspeed.runtime.{name}")
        except ImportError:  # DeepSpeed has renamed it: the first switch is slower but still correct
            continue


class OptimizerForwarder(torch.optim.Optimizer):
    """An optimizer object that stays the same for the whole job and stands for the current world's optimizer.

    Its methods and attributes are those of `engine.optimizer`, DeepSpeed's own object, which a switch replaces.
    Attributes that DeepSpeed's object lacks are read from the torch optimizer inside it. An attribute that is set here
    and that neither object has (such as a user's tag, or a scheduler's replacement of `step`) is kept by the forwarder.
    """

    def __init__(self, host: Host) -> None:
        self.__dict__["_host"] = host  # torch's constructor would keep its own groups

    @property
    def current(self) -> Any:
        """DeepSpeed's current optimizer object."""
        return self._host.optimizer

    @property
    def basic(self) -> torch.optim.Optimizer:
        """The torch optimizer inside DeepSpeed's optimizer: one object for the whole job."""
        return self._host.basic_optimizer  # type: ignore[no-any-return]

    @property
    def overflow(self) -> bool:
        """Whether the last step was skipped because gradients overflowed fp16. False for optimizers that never skip
        steps.

        The attribute exists in every layout and on idle members, because callers check for it only once.
        """
        return bool(getattr(self.current, "overflow", False))

    @property
    def _opt_called(self) -> bool:
        """Whether `engine.step` has stepped the optimizer. torch's schedulers read this before their own first step."""
        return bool(self._host.engine.global_steps)

    @_opt_called.setter
    def _opt_called(self, value: bool) -> None:
        """Ignore the value that torch's schedulers set when a script calls `step` itself."""

    def __getattr__(self, name: str) -> Any:
        if name == "_host":  # a copy that is still being made may lack it
            raise AttributeError(name)
        return getattr(self.current if hasattr(self.current, name) else self.basic, name)

    def __setattr__(self, name: str, value: Any) -> None:
        holders = [held for held in (self.current, self.basic) if hasattr(held, name)]
        if name in vars(self) or hasattr(type(self), name) or not holders:
            object.__setattr__(self, name, value)
        else:
            setattr(holders[0], name, value)

    def __repr__(self) -> str:
        return f"OptimizerForwarder({self.current!r})"


for _name, _own in vars(torch.optim.Optimizer).items():
    if isfunction(_own) and not _name.startswith("_"):
        setattr(OptimizerForwarder, _name, passing_on(_name, attrgetter("current")))
