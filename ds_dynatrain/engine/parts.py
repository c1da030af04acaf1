"""An engine's state and calls as one object: the features of its base classes, its beginning and end, and its
extensions."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as td

from ds_dynatrain.adapters.groups.process_groups import is_known
from ds_dynatrain.adapters.groups.worlds import drop
from ds_dynatrain.adapters.model.ulysses import enter as enter_sequence
from ds_dynatrain.adapters.versions.compiled import compiled_by_wrapping
from ds_dynatrain.engine.calls import SavingEngine
from ds_dynatrain.engine.copies.kept import Kept
from ds_dynatrain.errors import SwitchRefused
from ds_dynatrain.extension import Extension
from ds_dynatrain.membership.liveness import Heartbeat
from ds_dynatrain.reshard.context import OwnGroups
from ds_dynatrain.reshard.core import EngineCore
from ds_dynatrain.reshard.process import PROCESS
from ds_dynatrain.space import VirtualParameterSpace


@dataclass(eq=False)
class EngineParts(SavingEngine):
    """The state and the calls of an engine. A `DynatrainEngine` keeps this object in one attribute."""

    heartbeat: Heartbeat | None = None
    """This member's heartbeat thread; None in jobs whose coordinator detects deaths."""
    last_loss: torch.Tensor | None = None
    """Mean loss of this member's last micro-batch, for people who watch the job; None before the first one."""
    kept: Kept = field(default_factory=Kept)
    """Copies of state that this member keeps for restoration after a death: of its own rank and of other ranks."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.stream_seed = self.job.job_seed
        self.own_groups = OwnGroups(each.group for each in self.extensions if each.group)

    @property
    def extensions(self) -> tuple[Extension, ...]:
        """The extensions of this engine, in the order in which their hooks are called."""
        return self.job.extensions

    def extension(self, name: str) -> Any:
        """Return this engine's extension with a given name; None if the job has none."""
        return next((each for each in self.extensions if each.name == name), None)

    @property
    def others(self) -> list[EngineParts]:
        """The other engines of this process."""
        return [one for one in open_engines() if one is not self]

    def begin_segment(self) -> None:
        """Record that a checkpoint is about to be loaded, so that step numbers may recur, and notify the extensions."""
        super().begin_segment()
        for extension in self.extensions:
            extension.before_load()

    def before_leaving_world(self) -> None:
        """Let the extensions finish their work in the current world before the engine leaves it."""
        for extension in self.extensions:
            extension.before_leaving_world()

    def finish_step(self) -> None:
        """Notify the extensions that an optimizer step, and with it a global batch, is complete.

        Raises WorldChanged if a member may have been lost while replicas took the step.
        """
        for extension in () if self.micro_steps % self.accumulation else self.extensions:
            extension.after_step()
        if self.is_in_doubt and self.layout.zero_stage == 0:  # surviving replicas keep their state
            self.agree()

    def forget_batch(self) -> None:
        """Record that no global batch is in progress any longer, and notify the extensions."""
        super().forget_batch()
        for extension in self.extensions:
            extension.on_batch_forgotten()

    # ---- the begin and the end -------------------------------------------------------------------------------------

    def begin_work(self, space: VirtualParameterSpace) -> None:
        """Open the engine, as the last step of `initialize`: set its parameter space, and register it with the process.

        space: all logical tensors of the model.
        """
        self.adopt_space(space)
        self.is_open = True
        if self.world is not None:
            enter_sequence(self.deepspeed, self.world, self.layout)
            for extension in self.extensions:
                extension.on_start()
        self.tell_of_batch()
        if self.idle:  # do a first build's work now, not in a pause
            others = set() if compiled_by_wrapping(self.host.module) else {3}
            for stage in sorted({self.layout.zero_stage} | others):
                layout = self.layout.replace(zero_stage=stage)
                with suppress(SwitchRefused):  # no switch to this layout is possible
                    self.targets.check(layout, len(self.candidates.nodes))
                    self.rehearse(layout, 0)
        PROCESS.membership.add(self)
        PROCESS.add(self)
        self.begin_places()

    def close(self) -> None:
        """End the engine at the end of the script: notify the other members, and destroy the process groups while all
        members still respond."""
        with self.turn():
            if self.end_job():
                PROCESS.membership.end_script(self)
        PROCESS.leave(self)
        if is_known(td.group.WORLD) and not PROCESS.engines:
            td.destroy_process_group()

    def end_job(self) -> bool:
        """Leave the world and return to the process group of the launch. Returns False if this was already done."""
        for extension in self.extensions:
            extension.on_end()
        if not self.is_open:
            return False
        self.is_open = False
        try:
            self.give_up_late("its script has ended")
            self.cancel()
            self.saver.settle()
            PROCESS.membership.say_end(self)
            self.close_loaders()
        except RuntimeError:  # without the store, no member can be notified
            pass
        PROCESS.membership.remove(self)
        if self.world is not None:
            self.host.leave_shape()
        self.leave_groups()
        self.control.teardowns.finish(self.control.timeout_seconds)
        return True

    def leave_groups(self) -> None:
        """Leave the world. Install the process group of the launch, unless another engine of the process is being
        made."""
        if not PROCESS.is_joining:
            self.launch.install()
        self.release_old_state()
        if self.world is not None:
            self.before_leaving_world()
            self.control.teardowns.add(drop(self.world))
            self.world = None


def parts_of(engine: EngineCore) -> EngineParts:
    """Return an engine as `EngineParts`. Raises TypeError if it is of another class."""
    if not isinstance(engine, EngineParts):
        raise TypeError(f"an engine without its parts: {engine!r}")
    return engine


def open_engines() -> list[EngineParts]:
    """Return the open engines of this process, in the order in which they were made."""
    return [parts_of(engine) for engine in PROCESS.engines]
