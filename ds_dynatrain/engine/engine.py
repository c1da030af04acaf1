"""The engine that a user holds: DeepSpeed's, plus `switch`, `plan`, loaders that follow the world, and the boundary."""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as td
from torch import nn

from ds_dynatrain.adapters.children import Made
from ds_dynatrain.adapters.compiled import compiled_by_wrapping
from ds_dynatrain.adapters.curriculum import CurriculumOrder
from ds_dynatrain.adapters.host import HostEngine, Replaced
from ds_dynatrain.adapters.incoming import Incoming, Row, fill
from ds_dynatrain.adapters.memory import provide, zeros
from ds_dynatrain.adapters.sequence import enter as enter_sequence
from ds_dynatrain.adapters.settings import BatchSizes, layout_config
from ds_dynatrain.adapters.state import Buffers
from ds_dynatrain.adapters.worlds import LaunchWorld, World, drop
from ds_dynatrain.config import DynatrainConfig
from ds_dynatrain.data import BatchArithmetic, EvaluationLoader, Slot, Source, TrainLoader
from ds_dynatrain.data.cursor import Cursor
from ds_dynatrain.engine.agreement import Proposal
from ds_dynatrain.engine.checkpoints.restore import Restored
from ds_dynatrain.engine.checkpoints.saving import PendingSave, Saver
from ds_dynatrain.engine.control import Control
from ds_dynatrain.engine.liveness import Heartbeat, ended_in_error, post_end
from ds_dynatrain.engine.members.description import plain_part
from ds_dynatrain.engine.members.elastic import Elastic
from ds_dynatrain.engine.members.voiding import Window, needs_peers, surviving
from ds_dynatrain.engine.pending import PendingSwitch, SwitchEstimate
from ds_dynatrain.engine.surroundings import Candidates, Surroundings
from ds_dynatrain.engine.switcher import OnIdle, OnSwitch, Switcher
from ds_dynatrain.errors import CheckpointError, ConfigError, DataError, SwitchRefused
from ds_dynatrain.report import SwitchEvent, logger
from ds_dynatrain.space import HOST_GRAD, MASTER, STALE_GRAD, WEIGHT, Layout, VirtualParameterSpace
from ds_dynatrain.support import practice
from ds_dynatrain.support.axes import Features
from ds_dynatrain.transfer import digest

BOUNDARY = "engine.boundary"
FIRST_KINDS = (WEIGHT, MASTER, STALE_GRAD, HOST_GRAD)
"""The state kinds that are there before the first step."""
SEE_OFF_SECONDS = 5.0
DRAW_SECONDS = 1800.0
"""Large models take their time; as long as DeepSpeed waits for a collective."""


@dataclass(frozen=True)
class Job:
    """What is settled once for the whole job, the same on every process.

    features: what the model has in it. rows: its parameters, and described: the configuration, as every process has to
    have them. claims: the notice board of all engines of this launch, None in a job whose members come and go; elastic:
    this member's part in such a job.
    """

    settings: DynatrainConfig
    user_config: dict[str, Any]
    batch_sizes: BatchSizes
    job_seed: int
    features: Features
    rows: list[Row]
    described: dict[str, str]
    on_idle: OnIdle | None
    claims: Control | None
    elastic: Elastic | None = None


class DynatrainEngine(HostEngine):
    """A DeepSpeed engine whose world and ZeRO stage change between two steps. Built by `ds_dynatrain.initialize`.

    layout, members: of the present world, also on an idle member. world: this member's process groups in it, None if
    it is idle. job_epoch: epochs that the job has begun. last_switch: how the last switch ended.
    """

    layout: Layout
    members: tuple[int, ...]
    world: World | None
    job_epoch: int
    surroundings: Surroundings
    registered: list[dict[str, Any]]
    """What the job has registered anew, in order; plain JSON."""
    last_switch: SwitchEvent | None
    train_loaders: dict[str, TrainLoader]
    carried: dict[str, Any]
    is_stepping: bool
    """Whether an optimizer step was begun and not finished."""
    _window: Window
    saver: Saver
    _switcher: Switcher
    _heartbeat: Heartbeat | None
    _window_samples: int | None
    global_samples: int
    _arrived: dict[str, dict[str, Any]]
    """States that were loaded for loaders and objects which are not there yet."""
    _last_dealt: bool
    """Whether the micro-batch that was dealt last closes its global batch."""

    def __init__(
        self,
        *,
        job: Job,
        surroundings: Surroundings,
        layout: Layout,
        members: tuple[int, ...],
        world: World | None,
        **arguments: Any,
    ) -> None:
        # DeepSpeed's constructor calls methods that read these, and torch's Module takes no attribute before its own
        self.__dict__.update(job=job, layout=layout, members=members, world=world, job_epoch=0, registered=[])
        self.__dict__.update(surroundings=surroundings)
        self.__dict__.update(last_switch=None, train_loaders={}, carried={}, _space=None, _configs={})
        self.__dict__.update(_arrived={"loaders": {}, "objects": {}})
        self.__dict__.update(_dealt=False, _window_samples=None, _is_open=False, _last_dealt=True)
        self.__dict__.update(settings=job.settings, _heartbeat=None, _window=Window(self), is_stepping=False)
        self.__dict__.update(saver=Saver(self), _switcher=Switcher(self, job.on_idle))
        super().__init__(attached=world is not None, **arguments)

    # ---- what is around it ---------------------------------------------------------------------------------------

    @property
    def launch(self) -> LaunchWorld:
        """The group that this process stands in while it is idle."""
        return self.surroundings.launch

    @property
    def candidates(self) -> Candidates:
        """Who could work at present."""
        return self.surroundings.candidates

    @property
    def control(self) -> Control:
        """The notice board of the present generation."""
        return self.surroundings.control

    # ---- what a user reads ---------------------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """Whether this member holds no state now and waits for work."""
        return self.world is None

    @property
    def generation(self) -> int:
        """Number of the present world, from 1."""
        return self.world.generation if self.world is not None else self._switcher.attempt

    @property
    def attempt(self) -> int:
        """The highest number of a generation that was ever asked for."""
        return self._switcher.attempt

    @property
    def rank(self) -> int:
        """This member's place in the world (-1 on an idle member)."""
        return -1 if self.world is None or self.world.rank is None else self.world.rank

    @property
    def data_rank(self) -> int:
        """This member's place on the data axis (-1 on an idle member); ranks that share it get the same samples."""
        return -1 if self.idle else self.layout.coordinate(self.rank)["data"]

    @property
    def data(self) -> int:
        """Size of the data axis."""
        return self.layout.data

    @property
    def sequence_rank(self) -> int:
        """This member's place on the sequence axis (-1 on an idle member): which part of each sequence is its own."""
        return -1 if self.idle else self.layout.coordinate(self.rank)["sequence"]

    @property
    def sequence(self) -> int:
        """Size of the sequence axis: in how many parts a sequence is cut."""
        return self.layout.sequence

    @property
    def batch(self) -> BatchArithmetic:
        """How a global batch is dealt in the present world."""
        return self.batch_for(self.layout)

    @property
    def global_batch_size(self) -> int:
        """Samples per optimizer step: `train_batch_size` of the configuration, in every world."""
        return int(self.job.batch_sizes.train_batch_size)

    @property
    def vps(self) -> VirtualParameterSpace:
        """The Virtual Parameter Space of the model under the present layout and members."""
        space: VirtualParameterSpace = self._space
        return space.with_layout(self.layout, self.members)

    # ---- asking --------------------------------------------------------------------------------------------------

    def switch(self, layout: Layout | None = None, *, at: int | None = None, **changes: int) -> PendingSwitch:
        """Ask for another layout; call it on every working member, with the same arguments and at the same step.

        layout, or changes to the present one: `switch(data=4)`. at: take effect after that many optimizer steps
        (`engine.global_steps` for the very next boundary); without it at the first boundary at which all members are
        prepared. Returns as soon as all working members have asked. SwitchRefused, on all members alike, says why not
        and what would be possible; nothing
        has changed then. Asking again for what is pending gives the same answer. A roll-back later on does not raise:
        see `last_switch`.
        """
        return self._switcher.ask(layout, at, changes)

    def register_parameters(self, groups: Iterable[Mapping[str, Any]] | None = None) -> bool:
        """Take over what has changed since it was registered: parameters' `requires_grad`, and new optimizer groups.

        Call it on every working member at the same step, after `engine.step()`. What is frozen now loses its master and
        moments and keeps its weight. What is trained now gets them, moments as zeros and counts as at the start, in a
        new optimizer group with the hyper-parameters and schedule of the group that it was listed in. groups: for
        parameters in no group, or for other hyper-parameters: `{"params": [...], "like": 0, "weight_decay": 0.1}`,
        where `like` is the number of a present group. A group that trains nothing any more is removed.

        False if nothing has changed. SwitchRefused, on all members alike, naming the parameter, for what cannot be;
        SwitchFailed if it failed and the engine goes on as before, with `requires_grad` as it was registered.
        """
        if self.idle:
            raise SwitchRefused("this member is idle and holds no shard", "call it on the working members")
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

    # ---- checkpoints ---------------------------------------------------------------------------------------------

    def save_universal(self, path: str | os.PathLike[str], tag: str | None = None) -> Path:
        """Save all state into a folder of checkpoints, as one that any layout and any world can load.

        Call it on every working member with the same arguments and at the same step, after `engine.step()`. path: a
        folder that all members see. tag: a name in it that is not taken; "step" and the number of steps by default.
        `latest` names it from then on. Returns the checkpoint's own folder.

        CheckpointError, on all members alike, says why there is none; what was there before is as it was, and training
        can go on.
        """
        if self.idle:
            raise CheckpointError("this member is idle and holds no shard: call it on the working members")
        return self._switcher.save(path, tag, self._window_is_open)

    def start_save_universal(self, path: str | os.PathLike[str], tag: str | None = None) -> PendingSave:
        """`save_universal` in the background: the step waits for a copy in host memory, and a thread writes.

        The copy takes as much memory as this member writes, and is kept for the next one. `wait()` of the result gives
        the folder, or raises why there is none; a boundary that finds it failed logs the error. Another save, a load
        and the end of the engine wait for it.
        """
        if self.idle:
            raise CheckpointError("this member is idle and holds no shard: call it on the working members")
        return self._switcher.start_save(path, tag, self._window_is_open)

    def load_universal(self, path: str | os.PathLike[str], tag: str | None = None) -> Restored:
        """Go on from a checkpoint of `save_universal`, whatever layout and world it was saved in, in the present one.

        Call it on every working member with the same arguments and at the same step. tag: what `latest` names by
        default. All state is replaced: weights, optimizer, counters, schedule, random streams, loaders' positions,
        objects of `carry`; a loader or object that is made later gets its own then. An iterator over a loader goes on
        from the position that was loaded.

        CheckpointError, on all members alike, if there is none, it does not fit, or (CheckpointDamaged) it is not what
        was saved: training goes on as before the call.
        """
        if self.idle:
            raise CheckpointError("this member is idle and holds no shard: call it on the working members")
        self.saver.settle()
        return self._switcher.load(path, tag, self._window_is_open)

    # ---- the boundary --------------------------------------------------------------------------------------------

    def boundary(self) -> None:
        """For a loop without one of our loaders: call it at the top of the loop; a pending change takes effect here.

        On an idle member it returns when the member works again, and raises SystemExit(0) when the job has ended.
        """
        self._switcher.stand_at(BOUNDARY, self._window_is_open)
        self._window.is_void = False

    def before_batch(self, loader: TrainLoader) -> None:
        """Called by a train loader before a global batch is dealt."""
        self._switcher.stand_at(loader.name, self._window_is_open)
        if self._switcher.changes is not None:
            self._window.open()

    @property
    def _window_is_open(self) -> bool:
        """Whether something was dealt or accumulated since the last optimizer step."""
        return self._dealt or self.micro_steps % int(self.gradient_accumulation_steps()) != 0

    def enter(self, proposal: Proposal, world: World | None) -> None:
        """Become part of a committed world, or idle; called by the transaction."""
        self.world, self.layout, self.members = world, proposal.layout, proposal.members

    # ---- data ----------------------------------------------------------------------------------------------------

    def loader(
        self,
        dataset: Any,
        *,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_workers: int | None = None,
        shuffle: bool | None = None,
        evaluation: bool = False,
        batch_size: int | None = None,
        name: str | None = None,
    ) -> TrainLoader | EvaluationLoader:
        """A loader that follows the world; make it on every process, idle ones too, in the same order.

        dataset: map-style, or a torch DataLoader over one, which is taken apart. A train loader has a position and is
        where a change takes effect; an evaluation loader (`evaluation=True`, not shuffled unless asked; `batch_size` is
        its own) has neither.
        """
        order = None if evaluation else self.curriculum_order(_length(dataset))
        if order is not None and num_workers is None:
            num_workers = int(self.data_sampling_config()["num_workers"])
        drop_last = True if self.job.user_config.get("dataloader_drop_last") and not evaluation else None
        source = Source.build(
            dataset,
            collate_fn=collate_fn if collate_fn is not None else self.collate_fn,
            num_workers=num_workers,
            shuffle=bool(shuffle) if evaluation else shuffle,
            reshuffle=self.settings.data.reshuffle or None,
            drop_last=drop_last,
        )
        if evaluation:
            return EvaluationLoader(source, self, batch_size)
        name = name or f"train{len(self.train_loaders) or ''}"
        if name in self.train_loaders:
            raise ConfigError(f"loader {name!r} exists; give another name")
        loader = TrainLoader(source, self, name, order)
        self.train_loaders[name] = loader
        if name in self._arrived["loaders"]:
            loader.load_state_dict(self._arrived["loaders"].pop(name))
        return loader

    def set_custom_curriculum_learning_schedule(self, schedule_func_dict: dict[str, Callable[[int], Any]]) -> None:
        """DeepSpeed's; call it on every process before the first batch, or the ConfigError says that it is too late."""
        for loader in self._curriculum_loaders():
            if loader.cursor > Cursor() or loader.mid_window:
                raise ConfigError(
                    f"set_custom_curriculum_learning_schedule: loader {loader.name!r} has dealt batches by another "
                    "schedule; call it before the first batch, on every process"
                )
            loader.order.set_schedule(schedule_func_dict)  # type: ignore[attr-defined]

    def set_data_post_process_func(self, post_process_func: Callable[[Any, dict[str, Any]], Any]) -> None:
        """DeepSpeed's: with a curriculum, `function(batch, state of the sampler)` gives the batch to train on."""
        for loader in self._curriculum_loaders():
            loader.post_process = post_process_func

    def _curriculum_loaders(self) -> list[TrainLoader]:
        return [loader for loader in self.train_loaders.values() if isinstance(loader.order, CurriculumOrder)]

    def close_loaders(self) -> None:
        """End the worker processes of all train loaders; their positions stay."""
        for loader in self.train_loaders.values():
            loader.close()

    def deal(self, slot: Slot, first: bool, last: bool) -> None:
        """Called by a train loader with the slot of the micro-batch that it is about to return."""
        self.slot_weight = slot.weight
        self.slot_is_borrowed = slot.samples == 0
        self._dealt, self._last_dealt = True, last
        if slot.weight:
            self._window_samples = round(slot.samples * self.batch.slots / slot.weight)

    def epochs(self, count: int) -> Iterator[int]:
        """The numbers, from 0, of the epochs that remain of `count` for the job, on whichever member."""
        while self.job_epoch < count:
            yield self.job_epoch
            self.job_epoch += 1

    def mean(self, value: torch.Tensor | float, samples: int) -> torch.Tensor:
        """The mean of `value` (one number) over the data axis, weighted by each rank's `samples`; fp32, on the CPU.

        With sequence parallelism it is over sequence ranks too: each has the mean over its part of the same samples.
        A collective of the working members; if the world is torn in it, it is the value of this rank alone. DataError
        if nobody has a sample.
        """
        plain = float(value.detach()) if isinstance(value, torch.Tensor) else float(value)
        pair = torch.tensor([plain * samples if samples else 0.0, float(samples)], dtype=torch.float64)
        mine = pair.clone()
        surviving(self, lambda: self._add_up(pair), lambda: pair.copy_(mine))
        if not pair[1]:
            raise DataError("mean over no samples: every rank gave samples=0")
        return (pair[0] / pair[1]).to(torch.float32)

    def _add_up(self, pair: torch.Tensor) -> torch.Tensor:
        if self.world is not None and self.world.data.size() > 1:
            td.all_reduce(pair, group=self.world.data)
        return pair

    # ---- DeepSpeed's calls ---------------------------------------------------------------------------------------

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """DeepSpeed's; a micro-batch without a sample of its own leaves no trace in the module's buffers.

        Where members come and go: if the world is torn in it, it is formed anew, and what is returned trains nothing.
        """
        needed_peers = needs_peers(self.layout)
        output = surviving(
            self,
            lambda: self._forward(*inputs, **kwargs),
            lambda: self._window.forward_again(lambda: self._forward(*inputs, **kwargs), needed_peers),
        )
        return output if self._switcher.changes is None else self._window.remember(output)

    def _forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if not (self.slot_is_borrowed and self.module.training):
            return super().forward(*inputs, **kwargs)
        before = [(held, held.detach().clone()) for held in self.module.buffers()]
        output = super().forward(*inputs, **kwargs)
        with torch.no_grad():
            for held, value in before:
                held.copy_(value)
        return output

    def backward(
        self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True, tokens: int | None = None
    ) -> torch.Tensor:
        """DeepSpeed's; see `HostEngine.backward`. In a global batch that is void it does nothing."""
        if self._window.is_void:
            return loss
        return surviving(
            self,
            lambda: super(DynatrainEngine, self).backward(loss, retain_graph, scale_wrt_gas, tokens),
            lambda: loss,
        )

    def step(self, lr_kwargs: Any = None) -> None:
        """DeepSpeed's; a complete window opens the way to the next boundary.

        UnsupportedError for a step that the user places (by `set_gradient_accumulation_boundary(True)`, or without
        `managed_gradient_accumulation`) in the middle of a global batch: in another world that would be another set
        of samples. In a global batch that is void it does nothing.
        """
        if not self._window.is_void:
            surviving(self, lambda: self._step(lr_kwargs), lambda: None)

    def _step(self, lr_kwargs: Any) -> None:
        steps, samples = int(self.gradient_accumulation_steps()), int(self.global_samples)
        by_hand = self.ends_window_by_hand
        if by_hand and self._dealt and not self._last_dealt:
            raise practice("set_gradient_accumulation_boundary").error(
                f"a boundary set by hand in the middle of a global batch of {steps} micro-batches"
            )
        super().step(lr_kwargs)
        if by_hand:  # one call for all of the window's micro-batches
            self.micro_steps += -self.micro_steps % steps
        if self.micro_steps % steps == 0:
            self._end_window(samples)

    def _take_model_step(self, *arguments: Any) -> None:
        """DeepSpeed's; from its begin to its end the state is neither that before it nor that after it."""
        self.is_stepping = True
        super()._take_model_step(*arguments)
        self.is_stepping = False

    def void_window(self) -> None:
        """The world is torn: drop the gradients of the open global batch, and go back to where it began."""
        dealt = self._dealt
        self._window.void(dealt)
        self.micro_steps -= self.micro_steps % int(self.gradient_accumulation_steps())
        self._dealt, self._window_samples, self.window_tokens = False, None, None
        self.slot_weight, self.slot_is_borrowed = 1.0, False
        self.drop_gradients()

    def give_state_up(self) -> None:
        """Hold nothing any more: others have a newer state, or all of it is restored from elsewhere."""
        self.detach()
        self.is_stepping = False
        self.leave_world()
        self.launch.install()
        if self.world is not None:
            self.control.bury(drop(self.world))
            self.world = None

    def _end_window(self, samples: int) -> None:
        """After the optimizer's step; samples: `global_samples` before it."""
        self._switcher.note_first_step()
        if self._window_samples is not None:
            self.global_samples = samples + self._window_samples
        self._dealt, self._window_samples = False, None
        self.slot_weight, self.slot_is_borrowed = 1.0, False

    def load_checkpoint(self, *arguments: Any, **named: Any) -> Any:
        """DeepSpeed's. On a member that joined a running job it loads nothing, and returns what the job's own call did.

        Of the client state it returns what JSON has a word for.
        """
        elastic = self.job.elastic
        if elastic is None:
            return super().load_checkpoint(*arguments, **named)
        if elastic.is_newcomer:
            logger.info("load_checkpoint: this member joined a running job, whose state it gets in the switch")
            return tuple(elastic.loaded) if elastic.loaded else (None, {})
        result = super().load_checkpoint(*arguments, **named)
        elastic.loaded = [plain_part(part) for part in result]
        return result

    def deepspeed_io(
        self,
        dataset: Any,
        batch_size: int | None = None,
        route: str = "train",
        pin_memory: bool = True,
        data_sampler: Any = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_local_io_workers: int | None = None,
    ) -> TrainLoader | EvaluationLoader:
        """DeepSpeed's call for another loader: here one that follows the world. DataError for a sampler."""
        if data_sampler is not None:
            raise DataError("a sampler of your own cannot follow the world; leave data_sampler out, or use shuffle=")
        evaluation = route != "train"
        if batch_size is not None and not evaluation:
            raise DataError("the micro-batch follows from train_batch_size and the world; leave batch_size out")
        return self.loader(
            dataset,
            collate_fn=collate_fn,
            num_workers=num_local_io_workers,
            evaluation=evaluation,
            batch_size=batch_size,
        )

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

    # ---- the end -------------------------------------------------------------------------------------------------

    def destroy(self) -> None:
        """DeepSpeed's, and the end of this engine's job: members that wait for work in it are let go."""
        self._end_job()
        super().destroy()
        if "_gradients" in self.__dict__:
            self.let_module_go()

    def close(self) -> None:
        """End of the script: tell the others, and take the process groups down while they can still answer."""
        if self._end_job() and self.job.elastic is None and self.control.member == 0:
            self._see_idle_members_off()
        if td.is_initialized():
            td.destroy_process_group()

    def _end_job(self) -> bool:
        """Leave the world and stand in the launch group again; False if that was done before."""
        if not self.__dict__.get("_is_open", False):
            return False
        self._is_open = False
        try:
            self.saver.settle()
            post_end(self.control)
            if self._heartbeat is not None:
                self._heartbeat.stop()
            self._switcher.close()
            self.surroundings.background.see_buried()
            self.close_loaders()
            if self.job.claims is not None:
                self.job.claims.erase(f"open/{self.control.member}")
        except RuntimeError:  # the store is gone: there is nobody left to tell
            pass
        if self.job.elastic is not None:
            self.job.elastic.member.stop(has_ended=not ended_in_error())
        if self.world is not None:
            self.shaper.leave(self)
            self.control.bury(drop(self.world))
            self.world = None
        self.launch.install()
        self.control.see_buried()
        return True

    def _see_idle_members_off(self) -> None:
        """The store may live in this process: idle members read their release from it before it goes."""
        waiting = [member for member in self.candidates.members if member not in self.members]
        deadline = time.monotonic() + SEE_OFF_SECONDS
        while waiting and time.monotonic() < deadline:
            waiting = [member for member in waiting if not self.control.all_posted("left", [member])]
            time.sleep(0.02)

    # ---- for the rest of the package -----------------------------------------------------------------------------

    def open_for_work(self, space: VirtualParameterSpace) -> None:
        """Last step of `initialize`: the space is registered, the heartbeat beats."""
        self._space = space
        self._is_open = True
        if self.world is not None:
            enter_sequence(self, self.world, self.layout)
        if self.job.elastic is None:
            self._heartbeat = Heartbeat(self.control)
            self._heartbeat.start()
        if self.idle:  # pay first imports now, not in a pause
            others = set() if compiled_by_wrapping(self.module) else {3}
            for stage in sorted({self.layout.zero_stage} | others):
                layout = self.layout.replace(zero_stage=stage)
                with suppress(SwitchRefused):  # it will never be asked to go there
                    self._switcher.check_features(layout)
                    self._switcher.rehearse(layout, 0)

    def take_in(self, incoming: Incoming, space: VirtualParameterSpace) -> None:
        """Put the first layout together out of parameters that come in one by one; all processes take part."""
        self._space = space
        values = incoming.values(self.launch, self.job.job_seed, works=self.world is not None)
        numbers = {id(parameter): number for number, parameter in enumerate(self.model_map.parameters)}
        buffers: Buffers = {}
        if self.world is None:
            for _ in values:
                pass  # an idle member gives what it has, and keeps nothing
            self._compare_draws(incoming)
            return
        try:
            buffers, drawn = self._fill(incoming, values, numbers)
        except ConfigError as error:  # the others would wait
            self._compare_draws(incoming, {"failed": str(error)})
            raise
        self._compare_draws(incoming, {"values": drawn})
        self.take_shape(space, self.layout, self.rank)
        self.attach_first(self.layout, self.world, self.config_for(self.layout), buffers)

    def take_shape(
        self, space: VirtualParameterSpace, layout: Layout, rank: int, made: Made | None = None
    ) -> Replaced | None:
        """`reshape` to a rank of a layout, whose world must be installed."""
        return self.reshape(layout, rank, space.local(layout, rank).tensors, made)

    def _fill(
        self, incoming: Incoming, values: Iterator[tuple[nn.Parameter, torch.Tensor]], numbers: dict[int, int]
    ) -> tuple[Buffers, dict[str, int]]:
        """The buffers of the first layout, and the digests of what this member drew for itself, by name."""
        drawn: dict[str, int] = {}

        def noted() -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
            for parameter, value in values:
                if incoming.is_drawn(parameter):
                    drawn[self.param_names[parameter]] = digest(value)
                yield parameter, value

        types = {kind: dtype for kind, dtype in self._switcher.types(self.layout).items() if kind in FIRST_KINDS}
        buffers = provide(self.vps.local(self.layout, self.rank), types, set(), {}, zeros)
        fill(buffers, self.vps, self.rank, noted(), numbers)
        return buffers, drawn

    def _compare_draws(self, incoming: Incoming, mine: dict[str, Any] | None = None) -> None:
        """ConfigError on all processes, naming the parameter, unless all working members drew the same values."""
        if not incoming.draws:
            return
        if mine is not None:
            self.control.post(f"drawn/{self.control.member}", mine)
        deadline = time.monotonic() + DRAW_SECONDS
        records = self.control.gather("drawn", self.members, "drawing the parameters", deadline)
        failed = [record["failed"] for record in records.values() if "failed" in record]
        if failed:
            raise ConfigError(failed[0])
        first = records[self.members[0]]["values"]
        for member, record in sorted(records.items()):
            differs = [name for name, value in record["values"].items() if value != first[name]]
            if differs:
                raise ConfigError(
                    f"{differs[0]!r} was drawn otherwise on member {member} than on member {self.members[0]}: its "
                    "initialization must depend on the random generators alone"
                )

    def keep_arrived(self, loaders: dict[str, Any], objects: dict[str, Any]) -> None:
        """States of loaders and carried objects by name: what is not there yet gets its own when it is made."""
        self._arrived = {
            "loaders": {name: state for name, state in loaders.items() if name not in self.train_loaders},
            "objects": {name: state for name, state in objects.items() if name not in self.carried},
        }

    def begin_anew(self, generation: int) -> None:
        """No window is open and no change is pending, whatever was; numbers up to `generation` are used up."""
        self._dealt, self._window_samples, self._last_dealt = False, None, True
        self.slot_weight, self.slot_is_borrowed, self.window_tokens = 1.0, False, None
        self._switcher.begin_anew(generation)

    def types_in(self, layout: Layout) -> dict[str, torch.dtype]:
        """Element type of each state kind under a layout."""
        return self._switcher.types(layout)

    def room_for(self, layout: Layout, members: tuple[int, ...]) -> dict[int, int]:
        """Bytes that each member would allocate for a layout, at most."""
        return self._switcher.needs(layout, members)

    def adopt_space(self, space: VirtualParameterSpace) -> None:
        """Register other logical tensors."""
        self._space = space

    def config_for(self, layout: Layout) -> tuple[dict[str, Any], Any]:
        """DeepSpeed's configuration of a layout, as a dictionary and parsed; made once."""
        configs: dict[Layout, tuple[dict[str, Any], Any]] = self._configs
        if layout not in configs:
            config = copy.deepcopy(self.job.user_config)
            self.shaper.configure(config, layout)
            configs[layout] = layout_config(config, layout, self.batch_for(layout))
        return configs[layout]

    def batch_for(self, layout: Layout) -> BatchArithmetic:
        """How a global batch is dealt under a layout."""
        sizes = self.job.batch_sizes
        return BatchArithmetic(sizes.train_batch_size, sizes.micro_batch_size, layout.data)


def _length(data: Any) -> int:
    """Samples of a data set, or of the one that a torch loader reads; 0 if it does not say (`Source` refuses it)."""
    dataset = getattr(data, "dataset", data)
    return len(dataset) if hasattr(dataset, "__len__") else 0
