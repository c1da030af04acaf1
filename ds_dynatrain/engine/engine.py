"""The engine that a user holds: DeepSpeed's, plus `switch`, `plan`, loaders that follow the world, and the boundary."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar, cast

import torch

from ds_dynatrain.adapters.host_engine import HostEngine
from ds_dynatrain.adapters.shaping import Shaper
from ds_dynatrain.adapters.worlds import World, add_groups
from ds_dynatrain.data import BatchArithmetic, EvaluationLoader, TrainLoader
from ds_dynatrain.data.cursor import Cursor
from ds_dynatrain.engine import ending
from ds_dynatrain.engine.attempts import OnSwitch
from ds_dynatrain.engine.checkpoints.restoration import Restored
from ds_dynatrain.engine.checkpoints.saving import PendingSave
from ds_dynatrain.engine.groups import OwnGroup, RanksOf
from ds_dynatrain.engine.job import Job
from ds_dynatrain.engine.members.loss import guarded, plain
from ds_dynatrain.engine.members.voiding import needs_peers, surviving
from ds_dynatrain.engine.parts import EngineParts
from ds_dynatrain.engine.pending import PendingSwitch, SwitchEstimate
from ds_dynatrain.engine.process import PROCESS
from ds_dynatrain.engine.surroundings import Surroundings
from ds_dynatrain.errors import ConfigError, DataError, SwitchRefused
from ds_dynatrain.report import SwitchEvent
from ds_dynatrain.space import Layout
from ds_dynatrain.support import practice

BOUNDARY = "engine.boundary"

Call = TypeVar("Call", bound=Callable[..., Any])


def in_turn(call: Call) -> Call:
    """Decorates a call of an engine: where a process has several, it is made in the engine's turn."""

    @wraps(call)
    def in_its_turn(engine: DynatrainEngine, *arguments: Any, **named: Any) -> Any:
        with engine.turn():
            return call(engine, *arguments, **named)

    return cast("Call", in_its_turn)


class DynatrainEngine(HostEngine):
    """A DeepSpeed engine whose world and ZeRO stage change between two steps. Built by `ds_dynatrain.initialize`.

    What it is made of hangs on `_parts`; here are a user's calls, and DeepSpeed's that do more than DeepSpeed's.
    """

    _parts: EngineParts
    resumed: Restored | None = None
    """What `dynatrain.resume` found, None if it began."""

    def __init__(
        self,
        *,
        job: Job,
        surroundings: Surroundings,
        layout: Layout,
        members: tuple[int, ...],
        world: World | None,
        shaper: Shaper,
        whole: bool = True,
        **arguments: Any,
    ) -> None:
        """world: this member's process groups, which are installed; None on an idle member. arguments: of DeepSpeed's
        constructor, which calls methods that ask the parts."""
        sizes = int(job.batch_sizes.train_batch_size), world is not None
        host = self._host = self._HOST(self, layout, shaper, *sizes, whole)
        self._parts = EngineParts(host, job, surroundings, layout, members, world)
        super().__init__(**arguments)

    # ---- where it is -------------------------------------------------------------------------------------------------

    @property
    def layout(self) -> Layout:
        """That of the present world, also on an idle member."""
        return self._parts.layout

    @property
    def members(self) -> tuple[int, ...]:
        """The member at each rank of the present world, also on an idle member."""
        return self._parts.members

    @property
    def member(self) -> int:
        """This member's number, which never changes."""
        return self._parts.control.member

    @property
    def idle(self) -> bool:
        """Whether this member holds no state now and waits for work."""
        return self._parts.idle

    @property
    def rank(self) -> int:
        """This member's place in the world (-1 on an idle member)."""
        return self._parts.rank

    @property
    def generation(self) -> int:
        """Number of the present world, from 1."""
        return self._parts.generation

    @property
    def data_rank(self) -> int:
        """This member's place on the data axis (-1 on an idle member); ranks that share it get the same samples."""
        return self._parts.place("data")

    @property
    def data(self) -> int:
        """Size of the data axis."""
        return self._parts.layout.data

    @property
    def sequence_rank(self) -> int:
        """This member's place on the sequence axis (-1 on an idle member): which part of each sequence is its own."""
        return self._parts.place("sequence")

    @property
    def sequence(self) -> int:
        """Size of the sequence axis: in how many parts a sequence is cut."""
        return self._parts.layout.sequence

    @property
    def batch(self) -> BatchArithmetic:
        """How a global batch is dealt in the present world."""
        return self._parts.batch_for(self._parts.layout)

    @property
    def global_batch_size(self) -> int:
        """Samples per optimizer step: `train_batch_size` of the configuration, in every world."""
        return self._host.global_batch_size

    @property
    def is_void(self) -> bool:
        """Whether the world was formed anew in this global batch: it trains nothing, and will be dealt again."""
        return self._parts.is_void

    @property
    def slot_is_borrowed(self) -> bool:
        """Whether the micro-batch that was dealt last has no sample of its own: it counts nothing."""
        return self._host.slot_is_borrowed

    @property
    def is_switching(self) -> bool:
        """Whether a switch is being prepared."""
        return self._parts.is_switching

    @property
    def last_switch(self) -> SwitchEvent | None:
        """How the last switch ended; None before the first."""
        return self._parts.last_switch

    @property
    def job_epoch(self) -> int:
        """Epochs that the job has begun."""
        return self._parts.job_epoch

    def turn(self) -> AbstractContextManager[None]:
        """A block in which `torch.distributed`, DeepSpeed and the random generators are this engine's.

        They are in all of its calls. Code of your own needs it only where a process has several engines, and there
        only to ask `torch.distributed` about this engine's world, or to draw from its random streams.
        """
        return PROCESS.turn(self._parts)

    # ---- switching ---------------------------------------------------------------------------------------------------

    @in_turn
    def switch(self, layout: Layout | None = None, *, at: int | None = None, **changes: int) -> PendingSwitch:
        """Ask for another layout; call it on every working member, with the same arguments and at the same step.

        layout, or changes to the present one: `switch(data=4)`. at: take effect after that many optimizer steps
        (`engine.global_steps` for the very next boundary); without it at the first boundary at which all members are
        prepared. Returns as soon as all working members have asked. SwitchRefused, on all members alike, says why not
        and what would be possible; nothing
        has changed then. Asking again for what is pending gives the same answer. A roll-back later on does not raise:
        see `last_switch`.
        """
        self._parts.window.refuse_switch()
        return self._parts.switcher.ask(layout, at, changes)

    @in_turn
    def plan(self, layout: Layout | None = None, **changes: int) -> SwitchEstimate:
        """What a switch would cost, or why it would be refused; asks nobody and changes nothing."""
        return self._parts.switcher.dry_run(layout, changes)

    def on_switch(self, function: OnSwitch) -> OnSwitch:
        """Call `function(event)` on this member after every committed switch; usable as a decorator."""
        self._parts.attempts.listeners.append(function)
        return function

    @in_turn
    def boundary(self) -> None:
        """For a loop without one of our loaders: call it at the top of the loop; a pending change takes effect here.

        On an idle member it returns when the member works again, and raises SystemExit(0) when the job has ended.
        """
        parts = self._parts
        parts.switcher.stand_at(BOUNDARY)
        if PROCESS.membership is None or not PROCESS.membership.keeps_void(parts):
            parts.is_void = False

    @in_turn
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
        self._parts.window.refuse_switch()
        return self._parts.switcher.register(list(groups or ()))

    def carry(self, name: str, value: Any) -> Any:
        """Carry an object with `state_dict` and `load_state_dict`: a member that starts to work takes rank 0's state.

        Call it on every process, idle ones too, before the first switch. Returns the object. ConfigError for an object
        without the two methods or a name that is taken.
        """
        wanted, parts = ("state_dict", "load_state_dict"), self._parts
        missing = [method for method in wanted if not callable(getattr(value, method, None))]
        if missing:
            raise ConfigError(f"carry({name!r}): a {type(value).__name__} has no {' and no '.join(missing)}")
        if name in parts.carried:
            raise ConfigError(f"carry({name!r}): the name is taken; take another one")
        parts.carried[name] = value
        if name in parts.arrived["objects"]:
            value.load_state_dict(parts.arrived["objects"].pop(name))
        return value

    @in_turn
    def new_group(self, ranks: RanksOf | None = None) -> OwnGroup:
        """A group that is built anew with every world; use it as `group=handle.group`, asked for each time.

        Call it on every process, idle ones too, in the same order, before the first batch. ranks: called as
        `ranks(layout, nodes)`, where `nodes[rank]` names the node of each rank; it returns the ranks of each group, and
        a rank is in one of them or in none. By default all working members are in one group.

        ConfigError after the first batch, or for ranks that cannot be; a layout for which `ranks` returns such is
        refused.
        """
        parts = self._parts
        if parts.has_stood or parts.is_switching:
            raise ConfigError("new_group: the first batch was dealt; call it before that, on every process")
        kind = parts.own_groups.add(ranks)
        if parts.world is not None:
            wanted = parts.own_groups.kinds(parts.layout, parts.members, parts.candidates.nodes, parts.control.member)
            elastic = parts.job.elastic
            with nullcontext() if elastic is None else elastic.building_more(parts.job.number):
                store, seconds = parts.surroundings.background.store, parts.settings.timeout_seconds
                add_groups(store, parts.world, {kind: wanted.get(kind, ())}, seconds)
        return OwnGroup(lambda: parts.world, kind)

    # ---- data --------------------------------------------------------------------------------------------------------

    @in_turn
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
        return self._parts.loaders.make(
            dataset,
            collate_fn=collate_fn,
            num_workers=num_workers,
            shuffle=shuffle,
            evaluation=evaluation,
            batch_size=batch_size,
            name=name,
        )

    def _training_loader(self, dataset: Any, collate_fn: Callable[[list[Any]], Any] | None) -> TrainLoader:
        """The one of `training_data`."""
        return cast("TrainLoader", self.loader(dataset, collate_fn=collate_fn))

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

    def set_custom_curriculum_learning_schedule(self, schedule_func_dict: dict[str, Callable[[int], Any]]) -> None:
        """DeepSpeed's; call it on every process before the first batch, or the ConfigError says that it is too late."""
        for loader in self._parts.loaders.of_curricula:
            if loader.cursor > Cursor() or loader.mid_window:
                raise ConfigError(
                    f"set_custom_curriculum_learning_schedule: loader {loader.name!r} has dealt batches by another "
                    "schedule; call it before the first batch, on every process"
                )
            loader.order.set_schedule(schedule_func_dict)  # type: ignore[attr-defined]

    def set_data_post_process_func(self, post_process_func: Callable[[Any, dict[str, Any]], Any]) -> None:
        """DeepSpeed's: with a curriculum, `function(batch, state of the sampler)` gives the batch to train on."""
        for loader in self._parts.loaders.of_curricula:
            loader.post_process = post_process_func

    def epochs(self, count: int) -> Iterator[int]:
        """The numbers, from 0, of the epochs that remain of `count` for the job, on whichever member."""
        while self._parts.job_epoch < count:
            yield self._parts.job_epoch
            self._parts.job_epoch += 1

    def mean(self, value: torch.Tensor | float, samples: int) -> torch.Tensor:
        """The mean of `value` (one number) over the data axis, weighted by each rank's `samples`; fp32, on the CPU.

        With sequence parallelism it is over sequence ranks too: each has the mean over its part of the same samples.
        A collective of the working members. If the world is torn in it, or the global batch is void, or this member
        came late and the others are elsewhere, it is the value of this rank alone. DataError if nobody has a sample.
        """
        return self._parts.loaders.mean(value, samples)

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """UnsupportedError: the loaders' epochs are cut by the batch size of the start."""
        raise practice("set_train_batch_size").error(f"set_train_batch_size({train_batch_size})")

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """UnsupportedError: the micro-batch follows from the global batch and the world."""
        raise practice("set_train_micro_batch_size").error(f"set_train_micro_batch_size({micro_batch_size})")

    # ---- DeepSpeed's forward, backward and step, in a world that may be torn inside of them --------------------------

    @in_turn
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """DeepSpeed's; a micro-batch without a sample of its own leaves no trace in the module's buffers.

        Where members come and go: if the world is torn in it, it is formed anew, and what is returned trains nothing.
        """
        parts, window = self._parts, self._parts.window
        parts.control.raise_if_lost()
        if parts.is_void:
            return window.forward_again(lambda: self._forward(*inputs, **kwargs), needed_peers=False)
        needed_peers = needs_peers(parts.layout)
        if needed_peers and not parts.is_in_epoch and PROCESS.course.arrive("a forward pass") is None:
            raise DataError(
                f"member {parts.control.member} came late; in {parts.layout} a forward pass needs the others, who are "
                "elsewhere in their scripts: loop over engine.epochs(n), which counts the job's epochs, or evaluate "
                "with engine.loader(..., evaluation=True), which has no batch here"
            )
        output = surviving(
            lambda: self._forward(*inputs, **kwargs),
            lambda: window.forward_again(lambda: self._forward(*inputs, **kwargs), needed_peers),
        )
        if PROCESS.membership is None or parts.is_void:
            return output
        return guarded(window.remember(output), parts)

    def _forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if not (self._host.slot_is_borrowed and self.module.training):
            return super().forward(*inputs, **kwargs)
        before = [(held, held.detach().clone()) for held in self.module.buffers()]
        output = super().forward(*inputs, **kwargs)
        with torch.no_grad():
            for held, value in before:
                held.copy_(value)
        return output

    @in_turn
    def backward(
        self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True, tokens: int | None = None
    ) -> torch.Tensor:
        """DeepSpeed's; see `HostEngine.backward`. In a global batch that is void it does nothing."""
        if self._parts.is_void:
            return loss
        loss, run = plain(loss), super().backward
        return surviving(lambda: run(loss, retain_graph, scale_wrt_gas, tokens), lambda: loss)

    def _backward_prologue(self) -> None:
        """DeepSpeed's, where any backward pass begins, also one of `loss.backward()`."""
        with PROCESS.backward(self._parts):
            super()._backward_prologue()

    @in_turn
    def step(self, lr_kwargs: Any = None) -> None:
        """DeepSpeed's; a complete window opens the way to the next boundary.

        UnsupportedError for a step that the user places (by `set_gradient_accumulation_boundary(True)`, or without
        `managed_gradient_accumulation`) in the middle of a global batch: in another world that would be another set
        of samples. In a global batch that is void it does nothing.
        """
        if not self._parts.is_void:
            surviving(lambda: self._step(lr_kwargs), lambda: None)

    def _step(self, lr_kwargs: Any) -> None:
        parts, steps, samples = self._parts, self._parts.accumulation, int(self.global_samples)
        by_hand = self._host.ends_window_by_hand
        if by_hand and parts.open_batch.is_dealt and not parts.open_batch.is_last:
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
        self._parts.is_stepping = True
        super()._take_model_step(*arguments)
        self._parts.is_stepping = False

    def _end_window(self, samples: int) -> None:
        """After the optimizer's step; samples: `global_samples` before it."""
        parts = self._parts
        parts.attempts.note_first_step()
        if parts.open_batch.samples is not None:
            self.global_samples = samples + parts.open_batch.samples
        parts.forget_batch()

    @in_turn
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

    # ---- checkpoints -------------------------------------------------------------------------------------------------

    @in_turn
    def save_universal(self, path: str | os.PathLike[str], tag: str | None = None) -> Path:
        """Save all state into a folder of checkpoints, as one that any layout and any world can load.

        Call it on every working member with the same arguments and at the same step, after `engine.step()`. path: a
        folder that all members see. tag: a name in it that is not taken; "step" and the number of steps by default.
        `latest` names it from then on. Returns the checkpoint's own folder.

        CheckpointError, on all members alike, says why there is none; what was there before is as it was, and training
        can go on.
        """
        return self._parts.checkpoints.save(path, tag)

    @in_turn
    def start_save_universal(self, path: str | os.PathLike[str], tag: str | None = None) -> PendingSave:
        """`save_universal` in the background: the step waits for a copy in host memory, and a thread writes.

        The copy takes as much memory as this member writes, and is kept for the next one. `wait()` of the result gives
        the folder, or raises why there is none; a boundary that finds it failed logs the error. Another save, a load
        and the end of the engine wait for it.
        """
        return self._parts.checkpoints.start_save(path, tag)

    @in_turn
    def load_universal(
        self, path: str | os.PathLike[str], tag: str | None = None, *, trust_pickle: bool = False
    ) -> Restored:
        """Go on from a checkpoint of `save_universal`, whatever layout and world it was saved in, in the present one.

        One of DeepSpeed's `save_checkpoint` is read as well; streams, positions and objects stay as they are then.
        trust_pickle: of such files, run what they say where they hold more than tensors and plain values.

        Call it on every working member with the same arguments and at the same step. tag: what `latest` names by
        default. All state is replaced: weights, optimizer, counters, schedule, random streams, loaders' positions,
        objects of `carry`; a loader or object that is made later gets its own then. An iterator over a loader goes on
        from the position that was loaded.

        CheckpointError, on all members alike, if there is none, it does not fit, or (CheckpointDamaged) it is not what
        was saved: training goes on as before the call. OutcomeUnknown if this member cannot know whether others
        have loaded it: it trains no further.
        """
        return self._parts.checkpoints.load(path, tag, trust_pickle)

    @in_turn
    def save_checkpoint(
        self, save_dir: str | os.PathLike[str], tag: str | None = None, *arguments: Any, **named: Any
    ) -> bool:
        """DeepSpeed's; False, with a warning, if the world is torn in it, or was in this global batch.

        On a member that came late it saves under the folder and tag that the others have said.
        """
        return self._parts.checkpoints.save_stock(super().save_checkpoint, save_dir, tag, arguments, named)

    @in_turn
    def load_checkpoint(
        self, load_dir: Any, tag: Any = None, *arguments: Any, trust_pickle: bool = False, **named: Any
    ) -> Any:
        """DeepSpeed's; and it loads what was saved in another layout, and checkpoints of `save_universal`.

        That is one step for all members, as `load_universal`, which see also for `trust_pickle`; CheckpointError says
        why it cannot be. In the layout that was saved, or with only a part of the state asked for, it is DeepSpeed's.

        On a member that joined a running job it loads nothing, and returns what the job's own call did. Of the client
        state it returns what JSON has a word for.
        """
        load = super().load_checkpoint
        return self._parts.checkpoints.load_stock(load, load_dir, tag, trust_pickle, arguments, named)

    @in_turn
    def save_16bit_model(self, *arguments: Any, **named: Any) -> Any:
        """DeepSpeed's."""
        return super().save_16bit_model(*arguments, **named)

    @in_turn
    def save_fp16_model(self, *arguments: Any, **named: Any) -> Any:
        """DeepSpeed's."""
        return super().save_fp16_model(*arguments, **named)

    @in_turn
    def module_state_dict(self, *arguments: Any, **named: Any) -> Any:
        """DeepSpeed's."""
        return super().module_state_dict(*arguments, **named)

    @in_turn
    def offload_states(self, *arguments: Any, **named: Any) -> None:
        """DeepSpeed's."""
        super().offload_states(*arguments, **named)

    @in_turn
    def reload_states(self, *arguments: Any, **named: Any) -> None:
        """DeepSpeed's."""
        super().reload_states(*arguments, **named)

    # ---- the end -----------------------------------------------------------------------------------------------------

    def destroy(self) -> None:
        """DeepSpeed's, and the end of this engine's job: members that wait for work in it are let go."""
        if "_parts" not in self.__dict__:  # it could not be built
            return
        with self.turn():
            ending.end_job(self._parts)
            super().destroy()
            self._host.let_module_go()
        PROCESS.leave(self._parts)

    def close(self) -> None:
        """End of the script: tell the others, and take the process groups down while they can still answer."""
        ending.close(self._parts)
