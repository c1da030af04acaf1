"""The engine that a user holds: DeepSpeed's, plus `switch`, `plan`, loaders that follow the world, and the boundary."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

from ds_dynatrain.adapters.compiled import compiled_by_wrapping
from ds_dynatrain.adapters.sequence import enter as enter_sequence
from ds_dynatrain.engine.attempts import OnSwitch
from ds_dynatrain.engine.calls.checkpoints import CheckpointCalls
from ds_dynatrain.engine.calls.data import DataCalls
from ds_dynatrain.engine.calls.ending import EndingCalls
from ds_dynatrain.engine.calls.groups import GroupCalls
from ds_dynatrain.engine.calls.training import TrainingCalls
from ds_dynatrain.engine.pending import PendingSwitch, SwitchEstimate
from ds_dynatrain.engine.turns import in_turn
from ds_dynatrain.errors import ConfigError, SwitchRefused
from ds_dynatrain.space import Layout, VirtualParameterSpace
from ds_dynatrain.support import practice

BOUNDARY = "engine.boundary"
CALLS = (
    *("forward", "backward", "step", "loader", "boundary", "switch", "plan", "register_parameters", "new_group"),
    *("save_universal", "start_save_universal", "load_universal", "save_checkpoint", "load_checkpoint", "compile"),
    *("save_16bit_model", "save_fp16_model", "module_state_dict", "offload_states", "reload_states"),
)
"""What an engine does in its turn, where a process has several. (`destroy` ends its turns.)"""


@in_turn(*CALLS)
class DynatrainEngine(CheckpointCalls, DataCalls, TrainingCalls, GroupCalls, EndingCalls):
    """A DeepSpeed engine whose world and ZeRO stage change between two steps. Built by `ds_dynatrain.initialize`."""

    def switch(self, layout: Layout | None = None, *, at: int | None = None, **changes: int) -> PendingSwitch:
        """Ask for another layout; call it on every working member, with the same arguments and at the same step.

        layout, or changes to the present one: `switch(data=4)`. at: take effect after that many optimizer steps
        (`engine.global_steps` for the very next boundary); without it at the first boundary at which all members are
        prepared. Returns as soon as all working members have asked. SwitchRefused, on all members alike, says why not
        and what would be possible; nothing
        has changed then. Asking again for what is pending gives the same answer. A roll-back later on does not raise:
        see `last_switch`.
        """
        self._window.refuse_switch()
        return self._switcher.ask(layout, at, changes)

    def register_parameters(self, groups: Iterable[Mapping[str, Any]] | None = None) -> bool:
        """Take over what has changed since it was registered: parameters' `requires_grad`, and new optimizer groups.

        Call it on every working member at the same step, after `engine.step()`. What is frozen now loses its master and
        moments and keeps its weight. What is trained now gets them, moments as zeros and counts as at the start, in a
        new optimizer group with the hyper-parameters and schedule of the group that it was listed in. groups: for
        parameters in no group, or for other hyper-parameters: `{"params": [...], "like": 0, "weight_decay": 0.1}`,
        where `like` is the number of a present group. A group that trains nothing any more is removed.

        False if nothing has changed. SwitchRefused, on all members alike, naming the parameter, for what cannot be;
        SwitchFailed if it failed and the engine goes on as before, with `requires_grad` as it was registered;
        OutcomeUnknown if this member cannot know which.
        """
        if self.idle:
            raise SwitchRefused("this member is idle and holds no shard", "call it on the working members")
        self._window.refuse_switch()
        return self._switcher.register(list(groups or ()), self._window_is_open)

    def plan(self, layout: Layout | None = None, **changes: int) -> SwitchEstimate:
        """What a switch would cost, or why it would be refused; asks nobody and changes nothing."""
        return self._switcher.dry_run(layout, changes)

    def on_switch(self, function: OnSwitch) -> OnSwitch:
        """Call `function(event)` on this member after every committed switch; usable as a decorator."""
        self._switcher.listeners.append(function)
        return function

    def carry(self, name: str, value: Any) -> Any:
        """Carry an object with `state_dict` and `load_state_dict`: a member that starts to work takes rank 0's state.

        Call it on every process, idle ones too, before the first switch. Returns the object. ConfigError for an object
        without the two methods or a name that is taken.
        """
        wanted = ("state_dict", "load_state_dict")
        missing = [method for method in wanted if not callable(getattr(value, method, None))]
        if missing:
            raise ConfigError(f"carry({name!r}): a {type(value).__name__} has no {' and no '.join(missing)}")
        if name in self.carried:
            raise ConfigError(f"carry({name!r}): the name is taken; take another one")
        self.carried[name] = value
        if name in self._arrived["objects"]:
            value.load_state_dict(self._arrived["objects"].pop(name))
        return value

    def boundary(self) -> None:
        """For a loop without one of our loaders: call it at the top of the loop; a pending change takes effect here.

        On an idle member it returns when the member works again, and raises SystemExit(0) when the job has ended.
        """
        self._switcher.stand_at(BOUNDARY, self._window_is_open)
        if not self.membership.keeps_void(self):
            self.end_void()

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """UnsupportedError: the loaders' epochs are cut by the batch size of the start."""
        raise practice("set_train_batch_size").error(f"set_train_batch_size({train_batch_size})")

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """UnsupportedError: the micro-batch follows from the global batch and the world."""
        raise practice("set_train_micro_batch_size").error(f"set_train_micro_batch_size({micro_batch_size})")

    def compile(
        self,
        backend: Any = None,
        compile_kwargs: dict[str, Any] | None = None,
        schedule: Any = None,
        compiled_autograd_enabled: bool = False,
    ) -> None:
        """DeepSpeed's, with `torch.compile`; call it on every process, idle ones too. Each switch compiles anew.

        UnsupportedError for a schedule of DeepCompile and for compiled autograd.
        """
        if schedule is not None:
            raise practice("DeepCompile").error("engine.compile(schedule=...)")
        if compiled_autograd_enabled:
            raise practice("compiled autograd").error("engine.compile(compiled_autograd_enabled=True)")
        given = {} if backend is None else {"backend": backend}
        super().compile(compile_kwargs=compile_kwargs or {}, **given)

    def open_for_work(self, space: VirtualParameterSpace) -> None:
        """Last step of `initialize`: the space is registered, and the process knows of it."""
        self._space = space
        self._is_open = True
        if self.world is not None:
            enter_sequence(self, self.world, self.layout)
        if self.idle:  # pay first imports now, not in a pause
            others = set() if compiled_by_wrapping(self.module) else {3}
            for stage in sorted({self.layout.zero_stage} | others):
                layout = self.layout.replace(zero_stage=stage)
                with suppress(SwitchRefused):  # it will never be asked to go there
                    self._switcher.check_features(layout)
                    self._switcher.rehearse(layout, 0)
        self.membership.add(self)
        self.turns.add(self)
