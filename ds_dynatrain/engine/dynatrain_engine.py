"""The engine that a user holds: DeepSpeed's, plus `switch`, `plan`, loaders that follow the world, and the boundary."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial, wraps
from pathlib import Path
from typing import Any, Literal, TypeVar, cast, overload

import torch

from ds_dynatrain.adapters.deepspeed.host_engine import COMPILE_BACKEND, NOTHING, HostEngine
from ds_dynatrain.adapters.groups.world import World
from ds_dynatrain.adapters.groups.worlds import add_groups
from ds_dynatrain.adapters.model.module_state import buffers_kept, note
from ds_dynatrain.adapters.model.shaper import Shaper
from ds_dynatrain.data import BatchArithmetic, Cursor, EvaluationLoader, MicroBatch, TrainLoader
from ds_dynatrain.engine.changes import OnChange
from ds_dynatrain.engine.checkpoints.saving import PendingSave
from ds_dynatrain.engine.checkpoints.sources import CheckpointPart
from ds_dynatrain.engine.discarded import needs_peers, plain
from ds_dynatrain.engine.loaders import Shuffling
from ds_dynatrain.engine.parts import EngineParts
from ds_dynatrain.engine.switcher import OnSwitch
from ds_dynatrain.errors import ConfigError, DataError, SwitchRefused
from ds_dynatrain.extension import around, named
from ds_dynatrain.report import SwitchEvent, logger
from ds_dynatrain.reshard.context import Context, Job, OwnGroup, RanksOf
from ds_dynatrain.reshard.pending import PendingSwitch, SwitchEstimate
from ds_dynatrain.reshard.process import PROCESS
from ds_dynatrain.reshard.restoration import Restored
from ds_dynatrain.space import Layout
from ds_dynatrain.support import usage

BOUNDARY = "engine.boundary"
Folder = str | os.PathLike[str]
Call = TypeVar("Call", bound=Callable[..., Any])


def in_turn(call: Call) -> Call:
    """Decorate an engine's method so that it runs within `engine.turn()`, where process-wide state belongs to that
    engine.
    """

    @wraps(call)
    def in_its_turn(engine: DynatrainEngine, *arguments: Any, **named: Any) -> Any:
        with engine.turn():
            return call(engine, *arguments, **named)

    in_its_turn.__doc__ = call.__doc__ or "DeepSpeed's."
    return cast("Call", in_its_turn)


class DynatrainEngine(HostEngine):
    """A DeepSpeed engine whose world and ZeRO stage change between two steps. Built by `ds_dynatrain.initialize`.

    Its parts hang on `_parts`. Below are the calls that DeepSpeed's engine does not have, and then those of its calls
    that do more here: in a world that may be aborted meanwhile, and in the engine's turn.
    """

    _parts: EngineParts
    resumed: Restored | None = None
    """Checkpoint that the engine took its first state from; None if training began anew."""

    def __init__(
        self,
        *,
        job: Job,
        context: Context,
        layout: Layout,
        members: tuple[int, ...],
        world: World | None,
        shaper: Shaper,
        whole: bool = True,
        **arguments: Any,
    ) -> None:
        """Make DeepSpeed's engine and the parts around it.

        world: this member's process groups, which are already installed; None on an idle member.
        arguments: arguments of DeepSpeed's constructor, which calls methods that use the parts.
        """
        sizes = int(job.batch_sizes.train_batch_size), world is not None
        host = self._host = self._HOST(self, layout, shaper, *sizes, whole, in_leaves=job.batch_sizes.in_leaves)
        self._parts = EngineParts(host, job, context, layout, members, world)
        for extension in job.extensions:
            extension.attach(self)
        super().__init__(**arguments)

    def turn(self) -> AbstractContextManager[None]:
        """Return a block in which `torch.distributed`, DeepSpeed and the random generators are this engine's.

        They are in all of its calls. Your own code needs the block only if a process has several engines, and then only
        to ask `torch.distributed` about this engine's world, or to draw from its random streams.
        """
        return PROCESS.turn(self._parts)

    # ---- where it is -------------------------------------------------------------------------------------------------

    @property
    def layout(self) -> Layout:
        """Layout of the present world, also on an idle member."""
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
    def is_newcomer(self) -> bool:
        """Whether this process joined a running job: it has the job's state, and loads none of its own."""
        return PROCESS.membership.is_newcomer

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
    def is_discarded(self) -> bool:
        """Whether the world was formed anew in this global batch: it trains nothing, and will be dealt again."""
        return self._parts.is_discarded

    @property
    def slot_is_borrowed(self) -> bool:
        """Whether the micro-batch that was dealt last, or is in work, has no sample of its own: it counts nothing."""
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
    def buddies(self) -> Any:
        """Cost of a member's death, as this working member knows it; None in a job without buddies."""
        found = self._parts.extension("buddies")
        return None if found is None else found.protection

    @property
    def balancer(self) -> Any:
        """Measured times of layers, and the best boundaries for them; None without `dynatrain.balance`."""
        found = self._parts.extension("balance")
        return None if found is None else found.balancer

    @property
    def exact(self) -> Any:
        """Record of the newest steps of an exact job, such as `engine.exact.digest`; None without `dynatrain.exact`."""
        found = self._parts.extension("exact")
        return None if found is None else found.steps

    def meter(self, *names: str) -> None:
        """Time each of these modules, and the rest of the model, in the windows of `balance`. For models without
        stages.

        names: as in the model's `named_modules`, none within another one. Call it on every process of the job, with the
        same names, before training begins; `engine.balancer.profile` then has a layer for each, and "rest". Raises
        ConfigError for a pipeline, without a `balance` block, once a window has begun, for an unknown name, and if
        anything is compiled.
        """
        if self.balancer is None:
            raise ConfigError(
                "engine.meter: nothing is timed without a `balance` block in `dynatrain`; set dynatrain.balance.mode "
                'to "advise"'
            )
        self.balancer.meter(names)

    @property
    def job_epoch(self) -> int:
        """Epochs that the job has gone through in `engine.epochs`, on any members.

        A plain loop leaves it 0; `loader.cursor.epoch` counts there.
        """
        return self._parts.job_epoch

    # ---- switching ---------------------------------------------------------------------------------------------------

    @in_turn
    def switch(
        self,
        layout: Layout | None = None,
        *,
        at: int | None = None,
        data: int | None = None,
        zero_stage: int | None = None,
        pipe: int | None = None,
        expert: int | None = None,
        tensor: int | None = None,
        sequence: int | None = None,
        boundaries: Sequence[int] | None = None,
        shares: Sequence[int] | None = None,
        late: bool | None = None,
    ) -> PendingSwitch:
        """Ask for another layout; call it on every working member, with the same arguments and at the same step.

        layout, or changes to the present one: `switch(data=4)`. at: take effect after that many optimizer steps
        (`engine.global_steps` for the very next boundary); without it at the first boundary at which all members are
        prepared. late: masters and moments follow during the first global batch of the new world, and the switch is
        over with that batch's optimizer step; `dynatrain.late` by default.

        Returns as soon as all working members have asked. Raises SwitchRefused, on all members alike, with the reason
        and what would be possible; nothing has changed then. Asking again for a pending switch gives the same answer. A
        later roll-back raises nothing: see `last_switch`.
        """
        self._parts.window.refuse_switch()
        sizes = _given(data, zero_stage, pipe, expert, tensor, sequence, boundaries, shares)
        return self._parts.switcher.ask(layout, at, sizes, late)

    @in_turn
    def plan(
        self,
        layout: Layout | None = None,
        *,
        data: int | None = None,
        zero_stage: int | None = None,
        pipe: int | None = None,
        expert: int | None = None,
        tensor: int | None = None,
        sequence: int | None = None,
        boundaries: Sequence[int] | None = None,
        shares: Sequence[int] | None = None,
    ) -> SwitchEstimate:
        """Return what a switch would cost, or why it would be refused; asks no other member and changes nothing."""
        sizes = _given(data, zero_stage, pipe, expert, tensor, sequence, boundaries, shares)
        return self._parts.switcher.dry_run(layout, sizes)

    @in_turn
    def suggest(
        self, profile: Any = None, *, members: int | None = None, horizon_steps: float | None = None
    ) -> tuple[Any, ...]:
        """Return the layouts that are fastest by a profile, best first, of those that a switch would not refuse.

        profile: or its file; by default the measured one, or else that of `dynatrain.balance`. members: how many there
        are; all by default. horizon_steps: number of steps over which the duration of a switch is spread; without it
        that duration is not counted. Each result has `layout` and `time.step_ms`, a prediction. Asks no other member
        and changes nothing. Raises ProfileError for a profile of other batches, LayoutError if no layout fits.
        """
        suggest = named("ds_dynatrain.balance.extension:suggest")
        return cast("tuple[Any, ...]", suggest(self._parts, profile, members, horizon_steps))

    def on_switch(self, function: OnSwitch) -> OnSwitch:
        """Call `function(event)` on this member after every committed switch; usable as a decorator."""
        self._parts.switcher.listeners.append(function)
        return function

    def on_change(self, function: OnChange) -> OnChange:
        """Call `function(change)` on this member whenever its rank, the members or the layout have changed.

        The cause may be a switch, one that is undone, or members that come, leave or die. It is called at a boundary,
        before the next batch is dealt; on an idle member while it waits, and before its first batch when it works. The
        change has `before` and `after`, each with `layout`, `members`, `rank` and `generation`. Usable as a decorator.
        """
        self._parts.changes.listeners.append(function)
        return function

    @in_turn
    def boundary(self) -> None:
        """Let a pending change take effect. Call it at the top of a loop that uses none of our loaders.

        On an idle member it returns when the member works again, and raises SystemExit(0) when the job has ended.
        """
        parts = self._parts
        parts.switcher.at_boundary(BOUNDARY)
        if not PROCESS.membership.stays_discarded(parts):
            parts.is_discarded = False

    @in_turn
    def update_param_groups(self, groups: Iterable[Mapping[str, Any]] | None = None) -> bool:
        """Register what has changed: parameters' `requires_grad`, and new optimizer groups.

        Call it on every working member at the same step, after `engine.step()`. A newly frozen parameter loses its
        master and moments and keeps its weight. A newly trained one gets them, moments as zeros and counts as at the
        start, in a new optimizer group with the hyper-parameters and schedule of the group that it was listed in.
        groups: for parameters in no group, or for other hyper-parameters: `{"params": [...], "like": 0, "weight_decay":
        0.1}`, where `like` is the number of a present group. A group that trains nothing any more is removed.

        Returns False if nothing has changed. Raises SwitchRefused, on all members alike and naming the parameter, for
        an impossible change; SwitchFailed if it failed and the engine goes on as before, with `requires_grad` as it was
        registered; OutcomeUnknown if this member cannot know which.
        """
        if self.idle:
            raise SwitchRefused(
                "update_param_groups: this member is idle and holds no shard",
                "call it on the working members, where engine.idle is false",
            )
        self._parts.window.refuse_switch()
        return self._parts.switcher.register(list(groups or ()))

    def register_for_checkpointing(self, name: str, value: Any) -> Any:
        """Carry and save an object with `state_dict` and `load_state_dict`; return the object.

        A member that starts to work takes rank 0's state of it. Call it on every process, idle ones too, before the
        first switch. Raises ConfigError for an object without the two methods, or a name that is taken.
        """
        wanted, parts = ("state_dict", "load_state_dict"), self._parts
        missing = [method for method in wanted if not callable(getattr(value, method, None))]
        if missing:
            lacks = f"a {type(value).__name__} has no {' and no '.join(missing)}"
            raise ConfigError(
                f"register_for_checkpointing({name!r}): {lacks}; add the two methods, or register an object that has "
                "them"
            )
        if name in parts.carried:
            raise ConfigError(f"register_for_checkpointing({name!r}): another object has this name; give another name")
        parts.carried[name] = value
        if name in parts.arrived["objects"]:
            value.load_state_dict(parts.arrived["objects"].pop(name))
        return value

    @in_turn
    def new_group(self, ranks: RanksOf | None = None) -> OwnGroup:
        """Return a handle for a process group of every world; use it as `group=handle.group`, asked for each time.

        Call it on every process, idle ones too, in the same order, before the first batch. ranks: called as
        `ranks(layout, nodes)`, where `nodes[rank]` names the node of each rank; it returns the ranks of each group, and
        a rank is in one of them or in none. By default all working members are in one group.

        Raises ConfigError after the first batch, or for impossible ranks; a layout for which `ranks` returns such ranks
        is refused.
        """
        parts = self._parts
        if parts.has_stood or parts.is_switching:
            raise ConfigError("new_group: the first batch was dealt; call it before that, on every process")
        kind = parts.own_groups.add(ranks)
        if parts.world is not None:
            wanted = parts.own_groups.kinds(parts.layout, parts.members, parts.candidates.nodes, parts.control.member)
            with PROCESS.membership.building_more(parts.job.number) as note:
                store, seconds = parts.context.background.store, parts.settings.timeout_seconds
                add_groups(store, parts.world, {kind: wanted.get(kind, ())}, seconds, note)
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
        seed: int | None = None,
        reshuffle: bool | None = None,
    ) -> TrainLoader | EvaluationLoader:
        """Return a loader that follows the world; make it on every process, idle ones too, in the same order.

        dataset: map-style, or a torch DataLoader over one, which is taken apart. A train loader has a position, and
        changes take effect at its batches; an evaluation loader (`evaluation=True`, not shuffled unless asked, with a
        `batch_size` of its own) has and does neither. seed: of the order. reshuffle: another order each epoch, that of
        `seed` + epoch; by default as the DataLoader or `dynatrain.data` says.
        """
        order = Shuffling(shuffle, seed, reshuffle)
        return self._parts.loaders.make(dataset, collate_fn, num_workers, order, evaluation, batch_size, name)

    def _training_loader(self, dataset: Any, collate_fn: Callable[[list[Any]], Any] | None) -> TrainLoader:
        """Return the loader for the `training_data` that was given to `initialize`."""
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
        """Return another loader that follows the world, by DeepSpeed's call for it. Raise DataError for a sampler."""
        if data_sampler is not None:
            raise DataError(
                "deepspeed_io: a sampler of your own cannot follow the world; leave data_sampler out, or give "
                "shuffle= to engine.loader"
            )
        evaluation = route != "train"
        if batch_size is not None and not evaluation:
            raise DataError(
                f"deepspeed_io(batch_size={batch_size}): the micro-batch follows from train_batch_size and the world; "
                "leave batch_size out"
            )
        return self.loader(
            dataset,
            collate_fn=collate_fn,
            num_workers=num_local_io_workers,
            evaluation=evaluation,
            batch_size=batch_size,
        )

    def epochs(self, count: int) -> Iterator[int]:
        """Yield the numbers, from 0, of the epochs that remain of `count` for the job, on any members."""
        while self._parts.job_epoch < count:
            yield self._parts.job_epoch
            self._parts.job_epoch += 1

    def micro_batch(self, one: MicroBatch, *, is_divided: bool = False) -> AbstractContextManager[None]:
        """Return a block whose forward pass, backward pass and step are about this micro-batch of `loader.windows()`.

        is_divided: the loss is not a mean over the micro-batch but was divided by a figure of the whole global batch
        (its tokens over all ranks, times the ranks that DeepSpeed means over): it is taken as it is, and that of a
        borrowed micro-batch as 0. Say so for every micro-batch of a global batch or for none.

        Raises DataError for a micro-batch of another world, and if `tokens` are given for a divided loss;
        UnsupportedError for a pipeline, whose `train_batch` draws its own, and for a divided loss in an exact job.
        """
        if self._parts.job.has_stages:
            raise usage("engine.micro_batch of a pipeline").error("engine.micro_batch")
        return self._parts.loaders.micro_batch(one, is_divided)

    def mean(self, value: torch.Tensor | float, samples: int) -> torch.Tensor:
        """Return the mean of `value` (one number) over the data axis, weighted by each rank's `samples`.

        The result is fp32 on the device of `value` (for a plain number, on the CPU). With sequence parallelism it is
        over sequence ranks too: each has the mean over its part of the same samples. This is a collective of the
        working members. If the world is aborted in it, the global batch is discarded, or this member came late and the
        others are elsewhere, the result is this rank's value alone. Raises DataError if no rank has a sample.
        """
        return self._parts.loaders.mean(value, samples)

    # ---- checkpoints -------------------------------------------------------------------------------------------------

    @overload
    def save(self, path: Folder, tag: str | None = None, *, background: Literal[False] = False) -> Path: ...
    @overload
    def save(self, path: Folder, tag: str | None = None, *, background: Literal[True]) -> PendingSave: ...
    @in_turn
    def save(self, path: Folder, tag: str | None = None, *, background: bool = False) -> Path | PendingSave:
        """Save all state into a folder of checkpoints, in a form that any layout and any world can load.

        Call it on every working member with the same arguments and at the same step, after `engine.step()`. path: a
        folder that all members see. tag: a name in it that is not taken; "step" and the number of steps by default.
        `latest` names it from then on. Returns the checkpoint's own folder.

        background: only a copy into host memory delays the step, and a thread writes. The copy takes as much memory as
        this member writes, and is kept for the next one. `wait()` of the result returns the folder, or raises the
        reason why there is none; a boundary that finds it failed logs the error. Another save, a load and the end of
        the engine wait for it.

        Raises CheckpointError, on all members alike, if the checkpoint could not be saved; earlier ones are as they
        were, and training can go on.
        """
        return self._parts.checkpoints.save(path, tag, background)

    @in_turn
    def load(self, path: Folder, tag: str | None = None, *, trust_pickle: bool = False) -> Restored:
        """Load a checkpoint of `save`, of any layout and world, into the present one, and continue from there.

        A checkpoint of DeepSpeed's `save_checkpoint` is read as well; streams, positions and objects stay as they are
        then. trust_pickle: unpickle such files even if they hold more than tensors and plain values, which may run
        their code.

        Call it on every working member with the same arguments and at the same step. tag: the one that `latest` names
        by default. All state is replaced: weights, optimizer, counters, schedule, random streams, loaders' positions,
        objects of `register_for_checkpointing`; a loader or object that is made later gets its own then. An iterator
        over a loader goes on from the position that was loaded.

        Raises CheckpointError, on all members alike, if there is no checkpoint, it does not fit, or (CheckpointDamaged)
        it is not what was saved; training continues as before the call then. Raises OutcomeUnknown if this member
        cannot know whether others have loaded it: it trains no further.
        """
        return self._parts.checkpoints.load(path, tag, trust_pickle)

    @in_turn
    def save_pretrained(
        self, path: Folder, *, max_shard_bytes: int = 5_000_000_000, dtype: torch.dtype | None = None
    ) -> Path:
        """Write the weights into a folder that Hugging Face's `from_pretrained` reads, from any layout; return it.

        Call it on every working member, after `engine.step()`; rank 0 writes, and needs memory for one layer and one
        tensor. Names are those of the model's checkpoint, with an adapter of peft added to the weights that it is
        beside. max_shard_bytes: of tensors in one file. dtype: the type to which weights are converted.

        Raises WeightsError, on all members alike, if the folder could not be written; files of an earlier call stay.
        """
        save = named("ds_dynatrain.weights.pretrained:save_pretrained")
        return cast("Path", save(self, path, max_shard_bytes, dtype))

    @in_turn
    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]] | None) -> None:
        """Replace the weights, and the masters with them, by full tensors under the names of `save_pretrained`.

        Call it on every working member, after `engine.step()`. weights: pairs of name and tensor, each name once, the
        same on all members; or None on all members but rank 0, which then sends them. For a model of peft: its
        adapter alone, under the names of peft's checkpoints. Moments, steps and schedule stay as they are.

        Nothing is replaced before every member has everything. Takes memory for one more copy of this member's weights
        and masters meanwhile. Raises WeightsError, on all members alike and with the weights as they were, for an
        unknown name, another shape, a missing tensor, or an error of `weights`.
        """
        named("ds_dynatrain.weights.loading:load_weights")(self, weights)

    # ---- the end -----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End the engine with the script: tell the others, and take the process groups down while they can still
        answer.
        """
        self._parts.close()

    # ---- DeepSpeed's forward, backward and step, in a world that may be aborted meanwhile ----------------------------

    @in_turn
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run DeepSpeed's forward pass; a micro-batch without a sample of its own does not change the module's buffers.

        In a job whose members come and go: if the world is aborted in it, it is formed anew, and the output trains
        nothing.
        """
        parts, window = self._parts, self._parts.window
        run = partial(self._forward, *inputs, **kwargs)
        parts.control.raise_if_lost()
        if parts.is_discarded:
            return window.forward_again(run, needed_peers=False)
        needed_peers = needs_peers(parts.layout)
        if needed_peers and not parts.is_in_epoch and PROCESS.sync_points.arrive("a forward pass") is None:
            raise DataError(
                f"member {parts.control.member} came late; in {parts.layout} a forward pass needs the others, who are "
                "elsewhere in their scripts: loop over engine.epochs(n), which counts the job's epochs, or evaluate "
                "with engine.loader(..., evaluation=True), which has no batch here"
            )
        output = PROCESS.membership.surviving(parts, run, lambda: window.forward_again(run, needed_peers))
        return output if parts.is_discarded else PROCESS.membership.returned(parts, output)

    def _forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run DeepSpeed's forward pass between the hooks of the extensions."""
        parts, module = self._parts, self.module
        note(module)
        leaves_no_trace = self._host.slot_is_borrowed and any(part.training for part in module.modules())
        kept = buffers_kept(module) if leaves_no_trace else nullcontext()
        with kept, around(each.around_forward() for each in parts.extensions):
            output = super().forward(*inputs, **kwargs)
        for extension in parts.extensions:
            extension.after_forward(output)
        return output

    @in_turn
    def backward(
        self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True, *, tokens: int | None = None
    ) -> torch.Tensor:
        """Run DeepSpeed's backward pass; see `HostEngine.backward`. Does nothing in a discarded global batch."""
        if self._parts.is_discarded:
            return loss
        loss, run, parts = plain(loss), super().backward, self._parts

        def backward() -> torch.Tensor:
            with around(each.around_backward() for each in parts.extensions):
                made: torch.Tensor = run(loss, retain_graph, scale_wrt_gas, tokens=tokens)
            for extension in parts.extensions:
                extension.after_backward(loss)
            return made

        return PROCESS.membership.surviving(parts, backward, lambda: loss)

    def _backward_prologue(self) -> None:
        """Take the engine's turn and run DeepSpeed's prologue of a backward pass; also called for `loss.backward()`."""
        with PROCESS.backward(self._parts):
            super()._backward_prologue()

    @in_turn
    def step(self, lr_kwargs: Any = None) -> None:
        """Make DeepSpeed's step; after a complete window the next boundary can take effect.

        Raises UnsupportedError for a step that the user places (by `set_gradient_accumulation_boundary(True)`, or
        without `managed_gradient_accumulation`) in the middle of a global batch: in another world it would take other
        samples. Does nothing in a discarded global batch.
        """
        if not self._parts.is_discarded:
            PROCESS.membership.surviving(self._parts, lambda: self._step(lr_kwargs), lambda: None)

    def _step(self, lr_kwargs: Any) -> None:
        parts, steps, samples = self._parts, self._parts.accumulation, int(self.global_samples)
        by_hand = self._host.ends_window_by_hand
        if by_hand and parts.open_batch.is_dealt and not parts.open_batch.is_last:
            raise usage("set_gradient_accumulation_boundary").error(
                f"a boundary set by hand in the middle of a global batch of {steps} micro-batches"
            )
        is_last, place = by_hand or self.is_gradient_accumulation_boundary(), parts.switcher.entered_at
        if is_last and not parts.switcher.settle():  # some of the state that follows after the pause did not arrive
            logger.warning(
                "this global batch is void: it trains nothing, and the world before the switch deals it again"
            )
            if parts.idle:  # a member that was idle in the old world waits here until it works
                parts.switcher.at_boundary(place)
            return
        super().step(lr_kwargs)
        if by_hand:  # one call for all of the window's micro-batches
            self.micro_steps += -self.micro_steps % steps
        if self.micro_steps % steps == 0:
            self._end_window(samples)
        parts.finish_step()

    def _take_model_step(self, *arguments: Any) -> None:
        """Make DeepSpeed's optimizer step, and set `is_stepping` while the state is only partly updated."""
        parts = self._parts
        parts.agree()
        parts.is_stepping = True
        with around(each.around_update() for each in parts.extensions):
            super()._take_model_step(*arguments)
        parts.is_stepping = False
        if parts.world is not None and parts.world.status is not None:
            parts.world.status.gate.end_step()

    def _end_window(self, samples: int) -> None:
        """Close the global batch after the optimizer's step.

        samples: the value of `global_samples` before the step.
        """
        parts = self._parts
        parts.switcher.note_first_step()
        parts.switcher.note_step()
        if parts.open_batch.samples is not None:
            self.global_samples = samples + parts.open_batch.samples
        for extension in parts.extensions:
            extension.after_batch()
        parts.forget_batch()

    @in_turn
    def compile(
        self,
        backend: Any = COMPILE_BACKEND,
        compile_kwargs: Mapping[str, Any] | None = NOTHING,
        schedule: Any = None,
        compiled_autograd_enabled: bool = False,
    ) -> None:
        """Compile the module as DeepSpeed does; call it on every process, idle ones too. Each switch compiles anew.

        Raises UnsupportedError for a schedule of DeepCompile and for compiled autograd.
        """
        if schedule is not None:
            raise usage("DeepCompile").error("engine.compile(schedule=...)")
        if compiled_autograd_enabled:
            raise usage("compiled autograd").error("engine.compile(compiled_autograd_enabled=True)")
        super().compile(COMPILE_BACKEND if backend is None else backend, dict(compile_kwargs or {}))

    # ---- what there is of DeepSpeed's besides ------------------------------------------------------------------------

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Raise UnsupportedError: the loaders' epochs are cut by the first batch size."""
        raise usage("set_train_batch_size").error(f"set_train_batch_size({train_batch_size})")

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Raise UnsupportedError: the micro-batch follows from the global batch and the world."""
        raise usage("set_train_micro_batch_size").error(f"set_train_micro_batch_size({micro_batch_size})")

    def set_custom_curriculum_learning_schedule(self, schedule_func_dict: dict[str, Callable[[int], Any]]) -> None:
        """Set a custom curriculum, as DeepSpeed does; call it on every process before the first batch.

        Raises ConfigError if it is too late.
        """
        for loader in self._parts.loaders.of_curricula:
            if loader.cursor > Cursor() or loader.mid_window:
                raise ConfigError(
                    f"set_custom_curriculum_learning_schedule: loader {loader.name!r} has dealt batches by another "
                    "schedule; call it before the first batch, on every process"
                )
            loader.order.set_schedule(schedule_func_dict)  # type: ignore[attr-defined]

    def set_data_post_process_func(self, post_process_func: Callable[[Any, dict[str, Any]], Any]) -> None:
        """Set DeepSpeed's hook: with a curriculum, `function(batch, state of the sampler)` returns the batch to train
        on.
        """
        for loader in self._parts.loaders.of_curricula:
            loader.post_process = post_process_func

    @in_turn
    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: str | None = None,
        client_state: Mapping[str, Any] = NOTHING,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Save a checkpoint as DeepSpeed does.

        Returns False, with a warning, if the world is aborted in it, or was in this global batch. A member that came
        late saves under the folder and tag that the others have said.
        """
        save = partial(
            super().save_checkpoint,
            client_state=dict(client_state),
            save_latest=save_latest,
            exclude_frozen_parameters=exclude_frozen_parameters,
        )
        return self._parts.checkpoints.save_stock(save, save_dir, tag)

    @in_turn
    def load_checkpoint(
        self,
        load_dir: Any,
        tag: Any = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Callable[..., Any] | None = None,
        *,
        trust_pickle: bool = False,
    ) -> Any:
        """Load a checkpoint as DeepSpeed does, also one of another layout or of `engine.save`.

        Those are loaded in one step for all members, as in `engine.load`, which also explains `trust_pickle`;
        CheckpointError has the reason if they cannot be. DeepSpeed's own code loads a checkpoint of this layout that
        was cut by the same options, and one of which only weights are asked for. With `load_module_strict=False`,
        frozen weights that the checkpoint lacks stay as they are.

        On a member that joins a running job, before its first batch there, it loads nothing and returns the result of
        the job's own call, with those parts of the client state that JSON can hold.
        """
        part = CheckpointPart(
            load_module_strict, load_optimizer_states, load_lr_scheduler_states, load_module_only, custom_load_fn
        )
        return self._parts.checkpoints.load_stock(super().load_checkpoint, load_dir, tag, trust_pickle, part)

    save_16bit_model = in_turn(HostEngine.save_16bit_model)
    module_state_dict = in_turn(HostEngine.module_state_dict)
    offload_states = in_turn(HostEngine.offload_states)
    reload_states = in_turn(HostEngine.reload_states)

    def destroy(self) -> None:
        """Destroy DeepSpeed's engine, and end its job: members that wait for work in it may go."""
        if "_parts" not in self.__dict__:
            return
        with self.turn():
            self._parts.end_job()
            super().destroy()
            if hasattr(self._host, "model_map"):  # otherwise the host could not be built
                self._host.let_module_go()
        PROCESS.leave(self._parts)


def _given(*sizes: object) -> dict[str, Any]:
    """Return the given layout sizes by name, leaving out those that are None."""
    names = ("data", "zero_stage", "pipe", "expert", "tensor", "sequence", "boundaries", "shares")
    return {name: size for name, size in zip(names, sizes, strict=True) if size is not None}
