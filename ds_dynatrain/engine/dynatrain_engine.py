"""The engine that a user holds: DeepSpeed's engine with calls to switch its layout, and loaders that follow the world.

Changes take effect at a boundary, which is the point between two optimizer steps.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial, wraps
from pathlib import Path
from typing import Any, Literal, TypeVar, cast, overload

import torch
import torch.distributed as td

from ds_dynatrain.adapters.deepspeed.host_engine import COMPILE_BACKEND, NOTHING, HostEngine
from ds_dynatrain.adapters.groups.device import is_accelerated
from ds_dynatrain.adapters.groups.world import World
from ds_dynatrain.adapters.groups.worlds import add_groups
from ds_dynatrain.adapters.model.module_state import buffers_kept, note
from ds_dynatrain.adapters.model.shaper import Shaper
from ds_dynatrain.data import BatchArithmetic, Cursor, DataSource, EvaluationLoader, MicroBatch, TrainLoader
from ds_dynatrain.data.stream import SampleStream
from ds_dynatrain.engine.changes import OnChange
from ds_dynatrain.engine.checkpoints.saving import PendingSave
from ds_dynatrain.engine.checkpoints.sources import ALL, CheckpointPart
from ds_dynatrain.engine.discarded import needs_peers, plain
from ds_dynatrain.engine.parts import EngineParts
from ds_dynatrain.engine.switcher import OnSwitch
from ds_dynatrain.errors import ConfigError, DataError, SwitchRefused
from ds_dynatrain.extension import around, named
from ds_dynatrain.report import SwitchEvent, logger
from ds_dynatrain.reshard import regrouping
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
    """Decorate a method of an engine so that it runs inside `engine.turn()`, where process-wide state belongs to that
    engine."""

    @wraps(call)
    def in_its_turn(engine: DynatrainEngine, *arguments: Any, **named: Any) -> Any:
        with engine.turn():
            return call(engine, *arguments, **named)

    in_its_turn.__doc__ = call.__doc__ or "DeepSpeed's."
    return cast("Call", in_its_turn)


class DynatrainEngine(HostEngine):
    """A DeepSpeed engine whose world and ZeRO stage can change between two steps. Built by `ds_dynatrain.initialize`.

    Calls that DeepSpeed's engine lacks come first. They are followed by DeepSpeed's own calls with changed behavior:
    while they run, process-wide state belongs to this engine, and they handle the loss of the world. The engine's state
    is in `_parts`.
    """

    _parts: EngineParts
    resumed: Restored | None = None
    """The checkpoint from which the engine got its first state; None if training started from scratch."""

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
        """Make DeepSpeed's engine and the objects around it.

        world: this member's process groups, which are already installed; None on an idle member.
        arguments: arguments of DeepSpeed's constructor. It is called last, because it calls methods that use the other
            objects.
        """
        sizes = int(job.batch_sizes.train_batch_size), world is not None
        host = self._host = self._HOST(self, layout, shaper, *sizes, whole, in_leaves=job.batch_sizes.in_leaves)
        self._parts = EngineParts(host, job, context, layout, members, world)
        for extension in job.extensions:
            extension.attach(self)
        super().__init__(**arguments)

    def turn(self) -> AbstractContextManager[None]:
        """Return a context manager within which `torch.distributed`, DeepSpeed and the random generators belong to this
        engine.

        All calls of the engine already run inside it. Your own code needs it only if a process has several engines, and
        then only to use this engine's world through `torch.distributed`, or to draw from its random streams.
        """
        return PROCESS.turn(self._parts)

    # ---- place in the job ----------------------------------------------------------------------------------------

    @property
    def layout(self) -> Layout:
        """The layout of the current world, also on an idle member."""
        return self._parts.layout

    @property
    def members(self) -> tuple[int, ...]:
        """The member at each rank of the current world, also on an idle member."""
        return self._parts.members

    @property
    def member(self) -> int:
        """This member's number, which never changes."""
        return self._parts.control.member

    @property
    def is_newcomer(self) -> bool:
        """Whether this process has joined a running job. If so, it receives the job's state and must not load any of
        its own."""
        return PROCESS.membership.is_newcomer

    @property
    def idle(self) -> bool:
        """Whether this member currently holds no state and waits for work."""
        return self._parts.idle

    @property
    def rank(self) -> int:
        """This member's rank in the world; -1 on an idle member."""
        return self._parts.rank

    @property
    def generation(self) -> int:
        """Number of the current world, counted from 1."""
        return self._parts.generation

    @property
    def data_rank(self) -> int:
        """This member's index on the data axis; -1 on an idle member. Ranks with equal indices get the same samples."""
        return self._parts.data_rank

    @property
    def data(self) -> int:
        """Size of the data axis."""
        return self._parts.layout.data

    @property
    def sequence_rank(self) -> int:
        """This member's index on the sequence axis; -1 on an idle member. It determines which part of each sequence the
        member holds."""
        return self._parts.place("sequence")

    @property
    def sequence(self) -> int:
        """Size of the sequence axis: the number of parts into which a sequence is cut."""
        return self._parts.layout.sequence

    @property
    def batch(self) -> BatchArithmetic:
        """How a global batch is divided among the ranks of the current world."""
        return self._parts.batch

    @property
    def global_batch_size(self) -> int:
        """Number of samples per optimizer step, which is the same in every world: `train_batch_size` of the
        configuration."""
        return self._host.global_batch_size

    @property
    def is_discarded(self) -> bool:
        """Whether the current global batch is discarded, because a new world was formed during it. A discarded batch
        trains nothing, and the loader returns the same batch again."""
        return self._parts.is_discarded

    @property
    def slot_is_borrowed(self) -> bool:
        """Whether the micro-batch that was last fetched, or is being trained, has no samples of its own and does not
        count. Such a micro-batch repeats another rank's sample, only so that its collectives match those of the
        others."""
        return self._host.slot_is_borrowed

    @property
    def is_switching(self) -> bool:
        """Whether a switch is being prepared."""
        return self._parts.is_switching

    @property
    def last_switch(self) -> SwitchEvent | None:
        """The event that describes the last switch; None before the first one."""
        return self._parts.last_switch

    @property
    def buddies(self) -> Any:
        """How well the state is protected against a member's death, as known to this member; None if members keep no
        copies for each other."""
        return getattr(self._parts.extension("buddies"), "protection", None)

    @property
    def balancer(self) -> Any:
        """Measured times of layers, and the best stage boundaries for these times; None without `dynatrain.balance`."""
        return getattr(self._parts.extension("balance"), "balancer", None)

    @property
    def exact(self) -> Any:
        """Records of the newest steps of an exact (bitwise reproducible) job, such as `engine.exact.digest`; None
        without `dynatrain.exact`."""
        return getattr(self._parts.extension("exact"), "steps", None)

    def meter(self, *names: str) -> None:
        """Measure the time of each of these modules, and of the rest of the model, whenever `balance` takes
        measurements. For models without pipeline stages.

        Call it on every process of the job, with the same names, before training begins. `engine.balancer.profile` will
        then have an entry for each module, and "rest".

        names: names as in the model's `named_modules`; no module may be inside another one.

        Raises ConfigError for a pipeline, without a `balance` block, once measurements have begun, for an unknown name,
        and if anything is compiled.
        """
        if self.balancer is None:
            raise ConfigError(
                "engine.meter: nothing is timed without a `balance` block in `dynatrain`; set dynatrain.balance.mode "
                'to "advise"'
            )
        self.balancer.meter(names)

    @property
    def job_epoch(self) -> int:
        """Number of epochs that the job has completed in `engine.epochs`, whichever members have trained them.

        The number stays 0 if the script does not use `engine.epochs`; `loader.cursor.epoch` counts the epochs of such a
        script.
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
        experts: Sequence[Sequence[Sequence[int]]] | None = None,
        late: bool | None = None,
    ) -> PendingSwitch:
        """Request another layout. Call it on every working member, with the same arguments and at the same step.

        Returns as soon as all working members have made the request. If the same switch is already pending, the call
        returns it again. If the switch is rolled back later, no error is raised; see `last_switch`.

        layout: the new layout, unless changes to the current one are given, such as `switch(data=4)`.

        at: the number of optimizer steps after which to switch (`engine.global_steps` for the very next boundary); by
            default the first boundary at which all members are prepared.

        late: whether optimizer state moves during the first global batch of the new world, whose optimizer step
            completes the switch; `dynatrain.late` by default.

        Raises SwitchRefused on all members, with the reason and what would be possible. In this case nothing has
        changed.
        """
        self._parts.refuse_switch()
        sizes = _given(data, zero_stage, pipe, expert, tensor, sequence, boundaries, shares, experts)
        return self._parts.ask_for_switch(layout, at, sizes, late)

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
        experts: Sequence[Sequence[Sequence[int]]] | None = None,
    ) -> SwitchEstimate:
        """Return what a switch would cost, or why it would be refused. Contacts no other member and changes nothing.

        The arguments are those of `switch`.
        """
        sizes = _given(data, zero_stage, pipe, expert, tensor, sequence, boundaries, shares, experts)
        return self._parts.estimate(layout, sizes)

    def shapes(self) -> dict[str, dict[str, Any]]:
        """Return a map from the name of each parameter to its whole `shape` and its optimizer `group` (-1: frozen).

        Written to a JSON file, this map can be given as a model to `ds-dynatrain plan`, which divides its parameters
        only by ZeRO.
        """
        tensors = (tensor for tensor in self._parts.vps.tensors if tensor.numel)
        return {tensor.name: {"shape": [*tensor.shape], "group": tensor.group} for tensor in tensors}

    @in_turn
    def suggest(
        self, profile: Any = None, *, members: int | None = None, horizon_steps: float | None = None
    ) -> tuple[Any, ...]:
        """Return the layouts that are fastest according to a profile, best first, without those to which a switch would
        be refused.

        Each result has `layout` and `time.step_ms`, the predicted step time in milliseconds. Contacts no other member
        and changes nothing.

        profile: a profile, or the path of its file; by default the measured one, or else that of `dynatrain.balance`.

        members: the number of members; all by default.

        horizon_steps: the number of steps over which the duration of a switch is spread; without it that duration is
            ignored.

        Raises ProfileError for a profile that was measured with other batches, LayoutError if no layout fits.
        """
        suggest = named("ds_dynatrain.balance.extension:suggest")
        return cast("tuple[Any, ...]", suggest(self._parts, profile, members, horizon_steps))

    def on_switch(self, function: OnSwitch) -> OnSwitch:
        """Call `function(event)` on this member after every committed switch. Can be used as a decorator."""
        self._parts.switch_listeners.append(function)
        return function

    def on_change(self, function: OnChange) -> OnChange:
        """Call `function(change)` on this member whenever its rank, the members or the layout have changed.

        The cause may be a switch, a switch that is undone, or members that join, leave or die. The function is called
        between two optimizer steps, before the next batch is fetched. On an idle member it is called while the member
        waits, and before its first batch once it works. The change has `before` and `after`, each with `layout`,
        `members`, `rank` and `generation`. Can be used as a decorator.
        """
        self._parts.change_listeners.append(function)
        return function

    @in_turn
    def boundary(self) -> None:
        """Let a pending change take effect. Call it at the top of a training loop that uses no loader of this package.

        On an idle member the call returns when the member works again, and raises SystemExit(0) when the job has ended.
        """
        parts = self._parts
        parts.at_boundary(BOUNDARY)
        if not PROCESS.membership.stays_discarded(parts):
            parts.is_discarded = False

    @in_turn
    def update_param_groups(self, groups: Iterable[Mapping[str, Any]] | None = None) -> bool:
        """Adopt changes of parameters' `requires_grad`, and new optimizer groups. Returns False if nothing has changed.

        Call it on every working member at the same step, after `engine.step()`. A newly frozen parameter loses its
        master and moments and keeps its weight. A newly trained one gets a master, moments of zero and initial step
        counts, in a new optimizer group with the hyper-parameters and schedule of the group in which it was listed. A
        group that no longer trains anything is removed.

        groups: groups for parameters that are in none, or that need other hyper-parameters: `{"params": [...], "like":
            0, "weight_decay": 0.1}`, where `like` is the number of a current group.

        Raises SwitchRefused on all members for an invalid change; the error names the parameter.

        Raises SwitchFailed if the change failed. In this case the engine continues unchanged, and `requires_grad` is
        reset to its previous values. Raises OutcomeUnknown if this member cannot know whether the change was made.
        """
        if self.idle:
            raise SwitchRefused(
                "update_param_groups: this member is idle and holds no shard",
                "call it on the working members, where engine.idle is false",
            )
        parts = self._parts
        parts.refuse_switch()
        return regrouping.register(parts, parts.place_in_training(), list(groups or ()), parts.in_the_way())

    def register_for_checkpointing(self, name: str, value: Any) -> Any:
        """Save an object that has `state_dict` and `load_state_dict` together with the job's state; return the object.

        A member that joins training receives rank 0's state of the object. Call this on every process, idle ones
        included, before the first switch. Raises ConfigError for an object without the two methods, or a name that is
        taken.
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
        """Return a handle for a process group that exists in every world. Pass `group=handle.group`, read anew for each
        call, because the group object differs between worlds.

        Call this on every process, idle ones included, in the same order, before the first batch.

        ranks: called as `ranks(layout, nodes)`, where `nodes[rank]` names the node of each rank. It returns the ranks
            of each group; a rank is in at most one of them. By default all working members are in one group.

        Raises ConfigError after the first batch, or for invalid ranks. A switch to a layout for which `ranks` returns
        invalid ranks is refused.
        """
        parts = self._parts
        if parts.has_stood or parts.is_switching:
            raise ConfigError("new_group: the first batch was dealt; call it before that, on every process")
        kind = parts.own_groups.add(ranks)
        if parts.world is not None:
            wanted = parts.own_groups.kinds(parts.layout, parts.members, parts.candidates.nodes, parts.control.member)
            with PROCESS.membership.building_more(parts.job.number):
                store, seconds = parts.context.background.store, parts.settings.timeout_seconds
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
        seed: int | None = None,
        reshuffle: bool | None = None,
    ) -> TrainLoader | EvaluationLoader:
        """Return a loader that keeps its position when the world changes. Make it on every process, idle ones included,
        in the same order.

        A train loader has a position, and changes take effect between its global batches. An evaluation loader
        (`evaluation=True`) has no position, and no change takes effect at its batches; it is not shuffled unless
        `shuffle` is true, and has a `batch_size` of its own.

        dataset: a map-style data set, a stream that yields the same samples on all processes, or a torch DataLoader
            over one of these, whose settings are used.

        seed: the seed of the order.

        reshuffle: whether each epoch has a different order, seeded by `seed` + epoch; by default the setting of the
            DataLoader or of `dynatrain.data`.
        """
        parts, host, data = self._parts, self._host, getattr(dataset, "dataset", dataset)
        order = None if evaluation else host.curriculum_order(len(data) if hasattr(data, "__len__") else 0)
        if order is not None and num_workers is None:
            num_workers = int(self.data_sampling_config()["num_workers"])
        source = DataSource.build(
            dataset,
            collate_fn=collate_fn if collate_fn is not None else self.collate_fn,
            num_workers=num_workers,
            shuffle=bool(shuffle) if evaluation else shuffle,
            seed=seed,
            reshuffle=parts.settings.data.reshuffle or None if reshuffle is None else reshuffle,
            drop_last=True if parts.job.user_config.get("dataloader_drop_last") and not evaluation else None,
            pin_memory=getattr(dataset, "pin_memory", is_accelerated()),
            seeds_samples=host.in_leaves and not evaluation,
        )
        if isinstance(source.dataset, SampleStream) and (evaluation or order is not None):
            what = "evaluated" if evaluation else "read by a curriculum"
            raise DataError(
                f"engine.loader: a stream cannot be {what}, which takes samples by their index; give a data set with "
                "__getitem__ and __len__, such as list(stream)"
            )
        if evaluation:
            parts.evaluation_loaders += 1
            return EvaluationLoader(source, parts, batch_size, f"evaluation {parts.evaluation_loaders}")
        name = name or f"train{len(parts.train_loaders) or ''}"
        if name in parts.train_loaders:
            raise ConfigError(f"engine.loader: there is a loader {name!r} already; give another name")
        loader = parts.train_loaders[name] = TrainLoader(source, parts, name, order)
        if name in parts.arrived["loaders"]:
            loader.load_state_dict(parts.arrived["loaders"].pop(name))
        return loader

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
        """Return another loader that keeps its position when the world changes, by DeepSpeed's call. It takes
        DeepSpeed's arguments, and otherwise does the same as `loader`. Raises DataError for a sampler."""
        if data_sampler is not None:
            raise DataError(
                "deepspeed_io: a sampler of your own cannot follow the world; leave data_sampler out, or give "
                "shuffle= to engine.loader"
            )
        if batch_size is not None and route == "train":
            raise DataError(
                f"deepspeed_io(batch_size={batch_size}): the micro-batch follows from train_batch_size and the world; "
                "leave batch_size out"
            )
        return self.loader(
            dataset,
            collate_fn=collate_fn,
            num_workers=num_local_io_workers,
            evaluation=route != "train",
            batch_size=batch_size,
        )

    def epochs(self, count: int) -> Iterator[int]:
        """Yield the numbers, counted from 0, of those of `count` epochs that the job still has to run. Epochs that the
        job has run before, with whichever members, are not repeated."""
        while self._parts.job_epoch < count:
            yield self._parts.job_epoch
            self._parts.job_epoch += 1

    def micro_batch(self, one: MicroBatch, *, is_divided: bool = False) -> AbstractContextManager[None]:
        """Return a context manager for the forward pass, backward pass and step of one micro-batch of
        `loader.windows()`.

        is_divided: whether the loss is not a mean over the micro-batch, but was divided by a number for the whole
            global batch (its tokens over all ranks, times the number of ranks over which DeepSpeed takes the mean).
            Such a loss is used unchanged, and counts as 0 for a micro-batch without samples of its own. Set it for
            every micro-batch of a global batch or for none.

        Raises DataError for a micro-batch of another world, and if `tokens` are given for a divided loss. Raises
        UnsupportedError for a pipeline, whose `train_batch` fetches its own micro-batches, and for a divided loss in an
        exact (bitwise reproducible) job.
        """
        if self._parts.job.has_stages:
            raise usage("engine.micro_batch of a pipeline").error("engine.micro_batch")
        return self._parts.micro_batch(one, is_divided)

    def mean(self, value: torch.Tensor | float, samples: int) -> torch.Tensor:
        """Return the mean of a number over the data axis, weighted by the number of samples of each rank.

        value: this rank's number.
        samples: the number of samples that this rank's number stands for.

        The result is fp32 on the device of `value` (on the CPU for a plain number). With sequence parallelism the mean
        also covers the sequence ranks, each of which has the mean over its part of the same samples. This is a
        collective of the working members. The result is this rank's value alone if the world is aborted during the
        call, if the global batch is discarded, or if this member joined late and the others are elsewhere in their
        scripts. Raises DataError if no rank has a sample.
        """
        number, parts = float(value.detach() if isinstance(value, torch.Tensor) else value), self._parts
        pair = torch.tensor([number * samples if samples else 0.0, float(samples)], dtype=torch.float64)
        alone = torch.tensor([number, 1.0], dtype=torch.float64)

        def added() -> torch.Tensor:
            world = parts.world
            if world is not None and world.data.size() > 1:
                td.all_reduce(pair, group=world.data)
            return pair

        pair = parts.together("a mean", added, lambda: alone)
        if not pair[1]:
            raise DataError(
                f"engine.mean: every rank of data={self.layout.data} gave samples=0; give the number of "
                "samples that the value is the mean of"
            )
        found = (pair[0] / pair[1]).to(torch.float32)
        return found.to(value.device) if isinstance(value, torch.Tensor) else found

    # ---- checkpoints -------------------------------------------------------------------------------------------------

    @overload
    def save(self, path: Folder, tag: str | None = None, *, background: Literal[False] = False) -> Path: ...
    @overload
    def save(self, path: Folder, tag: str | None = None, *, background: Literal[True]) -> PendingSave: ...
    @in_turn
    def save(self, path: Folder, tag: str | None = None, *, background: bool = False) -> Path | PendingSave:
        """Save all state into a folder of checkpoints, in a form that any layout and any world can load.

        Call it on every working member with the same arguments and at the same step, after `engine.step()`. Returns the
        new checkpoint's own folder within that folder. The file `latest` then names the new checkpoint.

        path: a folder that all members see.

        tag: an unused name in this folder; "step" and the number of steps by default.

        background: whether training waits only for a copy into host memory, while a thread does the writing. The copy
            takes as many bytes as this member writes, and its memory is kept for the next save. `wait()` of the result
            returns the folder, or raises the error if saving failed; the error is also logged at the next boundary.
            Another save, a load and the end of the engine wait until the save has ended.

        Raises CheckpointError on all members if the checkpoint could not be saved. Earlier checkpoints are unchanged,
        and training can continue.
        """
        return self._parts.save(path, tag, background)

    @in_turn
    def load(self, path: Folder, tag: str | None = None, *, trust_pickle: bool = False) -> Restored:
        """Load a checkpoint written by `save`, from any layout and world, into the current world, and continue from it.

        Call it on every working member with the same arguments and at the same step. All state is replaced: weights,
        optimizer, counters, schedule, random streams, loader positions, objects of `register_for_checkpointing`.
        Loaders and objects created later receive their state when they are created. An existing iterator over a loader
        continues from the loaded position. A checkpoint of DeepSpeed's `save_checkpoint` is accepted as well; it leaves
        random streams, positions and objects unchanged.

        tag: which checkpoint to load; by default the one named in `latest`.

        trust_pickle: whether to unpickle DeepSpeed's files even if they contain more than tensors and plain values.
            Unpickling such files can run code that they contain.

        Raises CheckpointError on all members if there is no checkpoint or it does not fit, and CheckpointDamaged if it
        differs from what was saved. In both cases the engine is left unchanged, and training can continue. Raises
        OutcomeUnknown if this member cannot know whether others have loaded it; this member must not continue training.
        """
        return self._parts.load(path, tag, ALL._replace(trust_pickle=trust_pickle))

    @in_turn
    def save_pretrained(
        self, path: Folder, *, max_shard_bytes: int = 5_000_000_000, dtype: torch.dtype | None = None
    ) -> Path:
        """Write the weights into a folder that Hugging Face's `from_pretrained` reads, from any layout; return the
        folder.

        Call it on every working member, after `engine.step()`. Rank 0 writes, and needs additional memory for one layer
        and one tensor. Names are those of the model's checkpoint. An adapter of peft is added to the weights that it
        adapts.

        max_shard_bytes: the maximum size of the tensors in one file.

        dtype: the type to which weights are converted.

        Raises WeightsError on all members if the folder could not be written. Files of an earlier call stay unless the
        message says that they were partly replaced.
        """
        save = named("ds_dynatrain.weights.pretrained:save_pretrained")
        return cast("Path", save(self, path, max_shard_bytes, dtype))

    @in_turn
    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]] | None) -> None:
        """Replace the model's weights, and with them the masters, by full tensors under the names of `save_pretrained`.

        Call it on every working member, after `engine.step()`. Moments, steps and schedule stay unchanged.

        weights: pairs of name and tensor, each name once, the same on all members. Alternatively None on all members
            but rank 0, which then sends its tensors. For a model of peft these are only the tensors of its adapter,
            under the names of peft's checkpoints.

        Nothing is replaced before every member has received everything. Until then the call needs memory for one more
        copy of this member's weights and masters. Raises WeightsError on all members for an unknown name, another
        shape, a missing tensor, or an error of `weights`; the weights then stay unchanged.
        """
        named("ds_dynatrain.weights.loading:load_weights")(self, weights)

    # ---- the end -----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End the engine at the end of the script: notify the other members, and destroy the process groups while other
        members still respond."""
        self._parts.close()

    # ---- DeepSpeed's forward, backward and step, in a world that may be aborted during the call ----------------------

    @in_turn
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run DeepSpeed's forward pass. A micro-batch without samples of its own does not change the module's buffers.

        If the world is aborted during the pass (in a job whose members come and go), a new world is formed, and
        training on the output has no effect.
        """
        parts = self._parts
        run = partial(self._forward, *inputs, **kwargs)
        parts.control.raise_if_lost()
        if parts.is_discarded:
            return parts.forward_again(run, needed_peers=False)
        needed_peers = needs_peers(parts.layout)
        if needed_peers and not parts.is_in_epoch and PROCESS.sync_points.arrive("a forward pass") is None:
            raise DataError(
                f"member {parts.control.member} came late; in {parts.layout} a forward pass needs the others, who are "
                "elsewhere in their scripts: loop over engine.epochs(n), which counts the job's epochs, or evaluate "
                "with engine.loader(..., evaluation=True), which has no batch here"
            )
        output = PROCESS.membership.surviving(parts, run, lambda: parts.forward_again(run, needed_peers))
        return output if parts.is_discarded else PROCESS.membership.returned(parts, output)

    def _forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run DeepSpeed's forward pass. Hooks of the extensions run before and after it."""
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
            parts.last_loss = loss.detach() if scale_wrt_gas else loss.detach() * parts.accumulation
            for extension in parts.extensions:
                extension.after_backward(loss)
            return made

        return PROCESS.membership.surviving(parts, backward, lambda: loss)

    def _backward_prologue(self) -> None:
        """Run DeepSpeed's prologue of a backward pass. From here to the end of the pass, process-wide state belongs to
        this engine. Also called for `loss.backward()`."""
        with PROCESS.backward(self._parts):
            super()._backward_prologue()

    @in_turn
    def step(self, lr_kwargs: Any = None) -> None:
        """Run DeepSpeed's step. If it completes a global batch, a pending change may take effect before the next one.

        Does nothing in a discarded global batch. Raises UnsupportedError if the script takes an optimizer step in the
        middle of a global batch, because such a step would cover other samples in another world. A script does so by
        `set_gradient_accumulation_boundary(True)`, or without `managed_gradient_accumulation`.
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
        is_last, place = by_hand or self.is_gradient_accumulation_boundary(), parts.entered_at
        if is_last and not parts.settle_late():  # some masters or moments did not arrive
            logger.warning(
                "this global batch is void: it trains nothing, and the world before the switch deals it again"
            )
            if parts.idle:  # a member that was idle in the old world waits here until it works
                parts.at_boundary(place)
            return
        super().step(lr_kwargs)
        if by_hand:  # count all micro-batches of the window
            self.micro_steps += -self.micro_steps % steps
        if self.micro_steps % steps == 0:
            self._end_window(samples)
        parts.finish_step()

    def _take_model_step(self, *arguments: Any) -> None:
        """Run DeepSpeed's optimizer step. `is_stepping` is set meanwhile, because the state is only partly updated."""
        parts = self._parts
        parts.agree()
        parts.is_stepping = True
        with around(each.around_update() for each in parts.extensions):
            super()._take_model_step(*arguments)
        parts.is_stepping = False
        if parts.world is not None and parts.world.status is not None:
            parts.world.status.gate.end_step()

    def _end_window(self, samples: int) -> None:
        """Record the end of a global batch, after its optimizer step.

        samples: the value of `global_samples` before the step.
        """
        parts = self._parts
        parts.note_first_step()
        parts.note_step()
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
        """Compile the module the way DeepSpeed does. Call it on every process, idle ones included. The module is
        compiled again after each switch.

        Raises UnsupportedError for a schedule of DeepCompile and for compiled autograd.
        """
        if schedule is not None:
            raise usage("DeepCompile").error("engine.compile(schedule=...)")
        if compiled_autograd_enabled:
            raise usage("compiled autograd").error("engine.compile(compiled_autograd_enabled=True)")
        super().compile(COMPILE_BACKEND if backend is None else backend, dict(compile_kwargs or {}))

    # ---- other calls of DeepSpeed ------------------------------------------------------------------------------------

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Raise UnsupportedError: the batch size cannot be changed, because the loaders' epochs depend on it."""
        raise usage("set_train_batch_size").error(f"set_train_batch_size({train_batch_size})")

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Raise UnsupportedError: the size of micro-batches cannot be set, because it is derived from the global batch
        and the world."""
        raise usage("set_train_micro_batch_size").error(f"set_train_micro_batch_size({micro_batch_size})")

    def set_custom_curriculum_learning_schedule(self, schedule_func_dict: dict[str, Callable[[int], Any]]) -> None:
        """Set a custom curriculum as DeepSpeed does. Call it on every process before the first batch.

        Raises ConfigError after the first batch.
        """
        for loader in self._parts.of_curricula:
            if loader.cursor > Cursor() or loader.mid_window:
                raise ConfigError(
                    f"set_custom_curriculum_learning_schedule: loader {loader.name!r} has dealt batches by another "
                    "schedule; call it before the first batch, on every process"
                )
            loader.order.set_schedule(schedule_func_dict)  # type: ignore[attr-defined]

    def set_data_post_process_func(self, post_process_func: Callable[[Any, dict[str, Any]], Any]) -> None:
        """Set DeepSpeed's hook for curricula: `function(batch, sampler_state)` returns the batch to train on."""
        for loader in self._parts.of_curricula:
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
        """Save a checkpoint the way DeepSpeed does.

        Returns False, with a warning, if the world is aborted during the call, or was aborted in this global batch. A
        member that joined late uses the folder and tag of the others. If the others are elsewhere in their scripts,
        that member saves nothing and returns False.

        Raises CheckpointError if the layout assigns experts to ranks by a map, which DeepSpeed's files cannot express.
        """
        save = partial(
            super().save_checkpoint,
            client_state=dict(client_state),
            save_latest=save_latest,
            exclude_frozen_parameters=exclude_frozen_parameters,
        )
        return self._parts.save_stock(save, save_dir, tag)

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
        """Load a checkpoint the way DeepSpeed does. The checkpoint may also come from another layout or from
        `engine.save`.

        In these two cases either all members load it or none does, as in `engine.load`, which also explains
        `trust_pickle`. If it cannot be loaded, CheckpointError is raised with the reason. DeepSpeed's own code loads a
        checkpoint that was written in this layout with the same options, and any checkpoint from which only weights are
        requested. With `load_module_strict=False`, frozen weights that the checkpoint lacks stay unchanged. Raises
        CheckpointError for a checkpoint of DeepSpeed's if the layout assigns experts to ranks by a map, or if this
        package saved it with another expert size.

        A member that has just joined a running job loads nothing before its first batch. In this case the call returns
        the result of the job's own call, with the parts of the client state that JSON can represent.
        """
        states = load_optimizer_states, load_lr_scheduler_states, load_module_only
        part = CheckpointPart(load_module_strict, *states, custom_load_fn, trust_pickle)
        return self._parts.load_stock(super().load_checkpoint, load_dir, tag, part)

    save_16bit_model = in_turn(HostEngine.save_16bit_model)
    module_state_dict = in_turn(HostEngine.module_state_dict)
    offload_states = in_turn(HostEngine.offload_states)
    reload_states = in_turn(HostEngine.reload_states)

    def destroy(self) -> None:
        """Destroy DeepSpeed's engine and end its job, so that members that wait for work in this job can end as
        well."""
        if "_parts" not in self.__dict__:
            return
        with self.turn():
            self._parts.end_job()
            super().destroy()
            if hasattr(self._host, "model_map"):  # otherwise the host could not be built
                self._host.let_module_go()
        PROCESS.leave(self._parts)


def _given(*sizes: object) -> dict[str, Any]:
    """Return those sizes of a layout that are given (not None), by name."""
    names = ("data", "zero_stage", "pipe", "expert", "tensor", "sequence", "boundaries", "shares", "experts")
    return {name: size for name, size in zip(names, sizes, strict=True) if size is not None}
