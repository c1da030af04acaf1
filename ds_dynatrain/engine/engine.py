"""The engine that a user holds: DeepSpeed's, plus `switch`, `plan`, loaders that follow the world, and the boundary."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal, cast, overload

import torch

from ds_dynatrain.adapters.worlds import add_groups
from ds_dynatrain.data import BatchArithmetic, EvaluationLoader, MicroBatch, TrainLoader
from ds_dynatrain.engine.changes import OnChange
from ds_dynatrain.engine.checkpoints.restoration import Restored
from ds_dynatrain.engine.checkpoints.saving import PendingSave
from ds_dynatrain.engine.context import OwnGroup, RanksOf
from ds_dynatrain.engine.loaders import Shuffling
from ds_dynatrain.engine.overrides import OverridingEngine, in_turn
from ds_dynatrain.engine.pending import PendingSwitch, SwitchEstimate
from ds_dynatrain.engine.process import PROCESS
from ds_dynatrain.engine.switcher import OnSwitch
from ds_dynatrain.errors import ConfigError, DataError, SwitchRefused
from ds_dynatrain.extension import named
from ds_dynatrain.report import SwitchEvent
from ds_dynatrain.space import Layout
from ds_dynatrain.support import usage

BOUNDARY = "engine.boundary"
Folder = str | os.PathLike[str]


class DynatrainEngine(OverridingEngine):
    """A DeepSpeed engine whose world and ZeRO stage change between two steps. Built by `ds_dynatrain.initialize`.

    What it is made of hangs on `_parts`; here are the calls that DeepSpeed's engine has not.
    """

    resumed: Restored | None = None
    """What `dynatrain.resume` found, None if it began."""

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
        """What the death of a member would cost, as this working member knows it; None where there are no buddies."""
        found = self._parts.extension("buddies")
        return None if found is None else found.protection

    @property
    def balancer(self) -> Any:
        """What layers take, and which boundaries they would best have; None without `dynatrain.balance`."""
        found = self._parts.extension("balance")
        return None if found is None else found.balancer

    @property
    def exact(self) -> Any:
        """What the newest steps of an exact job had: `engine.exact.digest`; None of a job without `dynatrain.exact`."""
        found = self._parts.extension("exact")
        return None if found is None else found.steps

    def meter(self, *names: str) -> None:
        """Time these modules of a model without stages apart in the windows of `balance`, and the rest of it.

        names: as `named_modules` of the model has them, none within another one. Call it on every process of the job,
        with the same names, before training begins; `engine.balancer.profile` then has a layer for each, and "rest".
        ConfigError for a pipeline, without a `balance` block, once a window has begun, for a name that is not there,
        and where something is compiled.
        """
        if self.balancer is None:
            raise ConfigError(
                "engine.meter: nothing is timed without a `balance` block in `dynatrain`; set dynatrain.balance.mode "
                'to "advise"'
            )
        self.balancer.meter(names)

    @property
    def job_epoch(self) -> int:
        """Epochs that `engine.epochs` has gone through, on whichever members. A plain loop leaves it 0: there
        `loader.cursor.epoch` counts.
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
        over with that batch's optimizer step; `dynatrain.late` by default. Returns as soon as all working members have
        asked. SwitchRefused, on all members alike, says why not and what would be possible; nothing has changed then.
        Asking again for what is pending gives the same answer. A roll-back later on does not raise: see `last_switch`.
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
        """What a switch would cost, or why it would be refused; asks nobody and changes nothing."""
        sizes = _given(data, zero_stage, pipe, expert, tensor, sequence, boundaries, shares)
        return self._parts.switcher.dry_run(layout, sizes)

    @in_turn
    def suggest(
        self, profile: Any = None, *, members: int | None = None, horizon_steps: float | None = None
    ) -> tuple[Any, ...]:
        """The layouts that are fastest by a profile, best first, of those that a switch would not refuse.

        profile: or its file; by default what was measured, or else that of `dynatrain.balance`. members: how many there
        are; all by default. horizon_steps: over how many steps what a switch takes is spread; without it that counts
        for nothing. Each has `layout` and `time.step_ms`, a prediction. Asks nobody and changes nothing. ProfileError
        for a profile of other batches, LayoutError if nothing fits.
        """
        suggest = named("ds_dynatrain.balance.extension:suggest")
        return cast("tuple[Any, ...]", suggest(self._parts, profile, members, horizon_steps))

    def on_switch(self, function: OnSwitch) -> OnSwitch:
        """Call `function(event)` on this member after every committed switch; usable as a decorator."""
        self._parts.switcher.listeners.append(function)
        return function

    def on_change(self, function: OnChange) -> OnChange:
        """Call `function(change)` on this member whenever its rank, the members or the layout have become others.

        For whatever reason: a switch, one that is undone, members that come, leave or die. It is called at a boundary,
        before the next batch is dealt; on an idle member while it waits, and before its first batch when it works. The
        change has `before` and `after`, each with `layout`, `members`, `rank` and `generation`. Usable as a decorator.
        """
        self._parts.changes.listeners.append(function)
        return function

    @in_turn
    def boundary(self) -> None:
        """For a loop without one of our loaders: call it at the top of the loop; a pending change takes effect here.

        On an idle member it returns when the member works again, and raises SystemExit(0) when the job has ended.
        """
        parts = self._parts
        parts.switcher.at_boundary(BOUNDARY)
        if not PROCESS.membership.stays_discarded(parts):
            parts.is_discarded = False

    @in_turn
    def update_param_groups(self, groups: Iterable[Mapping[str, Any]] | None = None) -> bool:
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
            raise SwitchRefused(
                "update_param_groups: this member is idle and holds no shard",
                "call it on the working members, where engine.idle is false",
            )
        self._parts.window.refuse_switch()
        return self._parts.switcher.register(list(groups or ()))

    def register_for_checkpointing(self, name: str, value: Any) -> Any:
        """Carry and save an object with `state_dict` and `load_state_dict`.

        A member that starts to work takes rank 0's state of it. Call it on every process, idle ones too, before the
        first switch. Returns the object. ConfigError for one without the two methods, or a name that is taken.
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
        """A group that stands for one of every world; use it as `group=handle.group`, asked for each time.

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
        """A loader that follows the world; make it on every process, idle ones too, in the same order.

        dataset: map-style, or a torch DataLoader over one, which is taken apart. A train loader has a position and is
        where a change takes effect; an evaluation loader (`evaluation=True`, not shuffled unless asked; `batch_size` is
        its own) has neither. seed: of the order. reshuffle: another order each epoch, that of `seed` + epoch; by
        default what the DataLoader or `dynatrain.data` says.
        """
        order = Shuffling(shuffle, seed, reshuffle)
        return self._parts.loaders.make(dataset, collate_fn, num_workers, order, evaluation, batch_size, name)

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
        """The numbers, from 0, of the epochs that remain of `count` for the job, on whichever member."""
        while self._parts.job_epoch < count:
            yield self._parts.job_epoch
            self._parts.job_epoch += 1

    def micro_batch(self, one: MicroBatch, *, is_divided: bool = False) -> AbstractContextManager[None]:
        """A block whose forward and backward pass, and step, are about this micro-batch of `loader.windows()`.

        is_divided: the loss is divided by what the whole global batch has of something (its tokens over all ranks,
        times the ranks that DeepSpeed means over), not a mean over the micro-batch: it is taken as it is, and that of a
        borrowed one as 0. Say so for every micro-batch of a global batch or for none.

        DataError for a micro-batch of another world, and if `tokens` are given for a loss that is divided;
        UnsupportedError for a pipeline, whose `train_batch` draws for itself, and for a divided loss in an exact job.
        """
        if self._parts.job.has_stages:
            raise usage("engine.micro_batch of a pipeline").error("engine.micro_batch")
        return self._parts.loaders.micro_batch(one, is_divided)

    def mean(self, value: torch.Tensor | float, samples: int) -> torch.Tensor:
        """The mean of `value` (one number) over the data axis, weighted by each rank's `samples`; fp32, on the
        device of `value` (of a plain number: the CPU).

        With sequence parallelism it is over sequence ranks too: each has the mean over its part of the same samples.
        A collective of the working members. If the world is aborted in it, or the global batch is discarded, or
        this member came late and the others are elsewhere, it is the value of this rank alone. DataError if nobody has
        a sample.
        """
        return self._parts.loaders.mean(value, samples)

    # ---- checkpoints -------------------------------------------------------------------------------------------------

    @overload
    def save(self, path: Folder, tag: str | None = None, *, background: Literal[False] = False) -> Path: ...
    @overload
    def save(self, path: Folder, tag: str | None = None, *, background: Literal[True]) -> PendingSave: ...
    @in_turn
    def save(self, path: Folder, tag: str | None = None, *, background: bool = False) -> Path | PendingSave:
        """Save all state into a folder of checkpoints, as one that any layout and any world can load.

        Call it on every working member with the same arguments and at the same step, after `engine.step()`. path: a
        folder that all members see. tag: a name in it that is not taken; "step" and the number of steps by default.
        `latest` names it from then on. Returns the checkpoint's own folder.

        background: the step waits for a copy in host memory alone, and a thread writes. The copy takes as much memory
        as this member writes, and is kept for the next one. `wait()` of the result gives the folder, or raises why
        there is none; a boundary that finds it failed logs the error. Another save, a load and the end of the engine
        wait for it.

        CheckpointError, on all members alike, says why there is none; what was there before is as it was, and training
        can go on.
        """
        return self._parts.checkpoints.save(path, tag, background)

    @in_turn
    def load(self, path: Folder, tag: str | None = None, *, trust_pickle: bool = False) -> Restored:
        """Go on from a checkpoint of `save`, whatever layout and world it was saved in, in the present one.

        One of DeepSpeed's `save_checkpoint` is read as well; streams, positions and objects stay as they are then.
        trust_pickle: of such files, run what they say where they hold more than tensors and plain values.

        Call it on every working member with the same arguments and at the same step. tag: what `latest` names by
        default. All state is replaced: weights, optimizer, counters, schedule, random streams, loaders' positions,
        objects of `register_for_checkpointing`; a loader or object that is made later gets its own then. An iterator
        over a loader goes on from the position that was loaded.

        CheckpointError, on all members alike, if there is none, it does not fit, or (CheckpointDamaged) it is not what
        was saved: training goes on as before the call. OutcomeUnknown if this member cannot know whether others
        have loaded it: it trains no further.
        """
        return self._parts.checkpoints.load(path, tag, trust_pickle)

    # ---- the end -----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End of the script: tell the others, and take the process groups down while they can still answer."""
        self._parts.close()


def _given(*sizes: object) -> dict[str, Any]:
    """The changes to a layout that were asked for."""
    names = ("data", "zero_stage", "pipe", "expert", "tensor", "sequence", "boundaries", "shares")
    return {name: size for name, size in zip(names, sizes, strict=True) if size is not None}
