"""The engine that a user holds: DeepSpeed's, plus `switch`, `plan`, loaders that follow the world, and the boundary."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as td

from ds_dynatrain.adapters.host import HostEngine
from ds_dynatrain.adapters.memory import dtypes, sizes
from ds_dynatrain.adapters.settings import BatchSizes, layout_config
from ds_dynatrain.adapters.worlds import LaunchWorld, World, drop
from ds_dynatrain.config import DynatrainConfig
from ds_dynatrain.data import BatchArithmetic, EvaluationLoader, Slot, Source, TrainLoader
from ds_dynatrain.engine import agreement, feasible
from ds_dynatrain.engine.agreement import Proposal, Wish
from ds_dynatrain.engine.control import Control
from ds_dynatrain.engine.liveness import Heartbeat, Watch, post_end
from ds_dynatrain.engine.pending import PendingSwitch, SwitchEstimate
from ds_dynatrain.engine.preparation import Preparation
from ds_dynatrain.engine.summary import event_of
from ds_dynatrain.engine.transaction import Transaction
from ds_dynatrain.errors import ConfigError, DataError, SwitchRefused
from ds_dynatrain.plan import assign_slots, estimate, plan_switch
from ds_dynatrain.report import EventWriter, SwitchEvent, log_event
from ds_dynatrain.space import Layout, VirtualParameterSpace

BOUNDARY = "engine.boundary"
IDLE_POLL_SECONDS = 0.02
ASSUMED_BYTES_PER_SECOND = 1e9
"""Speed that `plan` reckons with before a switch has been measured."""

OnIdle = Callable[["DynatrainEngine"], object]
OnSwitch = Callable[[SwitchEvent], object]


class DynatrainEngine(HostEngine):
    """A DeepSpeed engine whose world and ZeRO stage change between two steps. Built by `ds_dynatrain.initialize`."""

    def __init__(
        self,
        *,
        settings: DynatrainConfig,
        user_config: dict[str, Any],
        batch_sizes: BatchSizes,
        layout: Layout,
        members: tuple[int, ...],
        launch: LaunchWorld,
        control: Control,
        claims: Control,
        nodes: dict[int, str],
        job_seed: int,
        world: World | None,
        on_idle: OnIdle | None,
        **arguments: Any,
    ) -> None:
        own: dict[str, Any] = {
            "settings": settings,
            "user_config": user_config,
            "batch_sizes": batch_sizes,
            "layout": layout,
            "members": members,
            "launch": launch,
            "control": control,
            "claims": claims,
            "nodes": nodes,
            "job_seed": job_seed,
            "world": world,
            "job_epoch": 0,
            "switches_asked": 0,
            "train_loaders": {},
            "carried": {},
            "last_switch": None,
        }
        self.__dict__.update(own)  # DeepSpeed's constructor calls methods that read them
        self.__dict__.update(_on_idle=on_idle, _listeners=[], _configs={}, _pending=None, _preparation=None)
        self.__dict__.update(_attempt=world.generation if world else 1, _dealt=False, _speed=0.0)
        self.__dict__.update(_window_samples=None, _watch=Watch(control), _heartbeat=Heartbeat(control))
        super().__init__(attached=world is not None, **arguments)

    # ---- what a user reads ---------------------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """Whether this member holds no state now and waits for work."""
        return self.world is None

    @property
    def generation(self) -> int:
        """Number of the present world, from 1."""
        return self.world.generation if self.world is not None else self._attempt

    @property
    def rank(self) -> int:
        """This member's place on the data axis (-1 on an idle member)."""
        return self.world.rank if self.world is not None else -1

    @property
    def data(self) -> int:
        """Size of the data axis."""
        return self.layout.data

    @property
    def batch(self) -> BatchArithmetic:
        """How a global batch is dealt in the present world."""
        return self._batch_for(self.layout)

    @property
    def vps(self) -> VirtualParameterSpace:
        """The Virtual Parameter Space of the model under the present layout and members."""
        return self._space.with_layout(self.layout, self.members)

    # ---- asking --------------------------------------------------------------------------------------------------

    def switch(self, layout: Layout | None = None, *, at: int | None = None, **changes: int) -> PendingSwitch:
        """Ask for another layout; call it on every working member, with the same arguments and at the same step.

        layout, or changes to the present one: `switch(data=4)`. at: take effect after that many optimizer steps
        (`engine.global_steps` for the very next boundary); without it at the first boundary at which all members are
        prepared. Returns at once. SwitchRefused, on all members alike, says why not and what would be possible; nothing has
        changed then. A roll-back later on does not raise: see `last_switch`.
        """
        if self.idle:
            raise SwitchRefused("this member is idle and holds no shard", "call it on the working members")
        wish, proposal = self._wish(layout, at, changes)
        self.switches_asked += 1
        agreed = agreement.agree(self.control, self.switches_asked, wish, self.members, proposal)
        self._prepare(agreed)
        self._pending = PendingSwitch(agreed.layout, agreed.generation, agreed.at)
        return self._pending

    def plan(self, layout: Layout | None = None, **changes: int) -> SwitchEstimate:
        """What a switch would cost, or why it would be refused; asks nobody and changes nothing."""
        try:
            target = self._checked(layout, changes)
        except SwitchRefused as refusal:
            wanted = layout if layout is not None else self.layout
            return SwitchEstimate(wanted, refusal=refusal.reason, way_out=refusal.way_out)
        members = self._slots(target)
        speed = self._speed or ASSUMED_BYTES_PER_SECOND
        cost = estimate(plan_switch(self.vps, target, members), self.settings.memory_budget_bytes, speed)
        return SwitchEstimate(target, members, cost.bytes_sent, cost.highest_peak_bytes, cost.seconds, speed)

    def on_switch(self, function: OnSwitch) -> OnSwitch:
        """Call `function(event)` on this member after every committed switch; usable as a decorator."""
        self._listeners.append(function)
        return function

    def carry(self, name: str, value: Any) -> Any:
        """Carry an object with `state_dict` and `load_state_dict`: a member that starts to work takes rank 0's state.

        Call it on every process, idle ones too, before the first switch. Returns the object. ConfigError for an object
        without the two methods or a name that is taken.
        """
        missing = [method for method in ("state_dict", "load_state_dict") if not callable(getattr(value, method, None))]
        if missing:
            raise ConfigError(f"carry({name!r}): a {type(value).__name__} has no {' and no '.join(missing)}")
        if name in self.carried:
            raise ConfigError(f"carry({name!r}): the name is taken; take another one")
        self.carried[name] = value
        return value

    def _wish(self, layout: Layout | None, at: int | None, changes: dict[str, int]) -> tuple[Wish, Proposal]:
        """This member's record, with its refusal if it has one, and the proposal that follows from it."""
        refusal = None
        try:
            target = self._checked(layout, changes)
            if self._pending is not None and not self._pending.done:
                raise SwitchRefused(f"a switch to {self._pending.layout} is pending", "wait until it is done")
            if at is not None and at < self.global_steps:
                raise SwitchRefused(f"step {at} has passed: this is step {self.global_steps}", "give a later step")
            members = self._slots(target)
            feasible.check_memory(self, self._needs(target, members), self.nodes)
        except SwitchRefused as error:
            refusal, target, members = (error.reason, error.way_out), layout or self.layout, self.members
        wish = Wish(target.to_dict(), at, self.global_steps, refusal)
        return wish, Proposal(self._attempt + 1, self.layout, self.members, target, members, at, self.global_steps)

    def _checked(self, layout: Layout | None, changes: dict[str, int]) -> Layout:
        target = feasible.target_layout(self.layout, layout, changes)
        feasible.check_size(target, self.launch.size)
        feasible.check_batch(target, self._batch_for(target), self.module)
        return target

    def _slots(self, target: Layout) -> tuple[int, ...]:
        return assign_slots(self.vps, target, range(self.launch.size), self.nodes)

    def _needs(self, target: Layout, members: tuple[int, ...]) -> dict[int, int]:
        """Bytes that each member would allocate, at most: the target's buffers and staging."""
        kinds = self._types(target)
        state = sum(size * kinds[kind].itemsize for (kind, _), size in sizes(self.vps, target).items())
        return dict.fromkeys(members, state + min(self.settings.memory_budget_bytes, state))

    # ---- the boundary --------------------------------------------------------------------------------------------

    def boundary(self) -> None:
        """For a loop without one of our loaders: call it at the top of the loop; a pending change takes effect here.

        On an idle member it returns when the member works again, and raises SystemExit(0) when the job has ended.
        """
        self._stand_at(BOUNDARY)

    def before_batch(self, loader: TrainLoader) -> None:
        """Called by a train loader before a global batch is dealt."""
        self._stand_at(loader.name)
        self.tput_timer.start()

    def _stand_at(self, place: str) -> None:
        if self.idle:
            self._wait_for_work(place)
            return
        if self._pending is None or self._pending.done or self._dealt or self._preparation is None:
            return
        if self.micro_steps % int(self.gradient_accumulation_steps()):
            return
        proposal = self._preparation.proposal
        meet = agreement.meeting_step(self.control, proposal, self.rank, self.global_steps)
        if meet is not None and self.global_steps >= meet:
            self._transact(place)
            if self.idle:
                self._wait_for_work(place)

    def _wait_for_work(self, place: str) -> None:
        """Poll the notice board until this member works; run the user's `on_idle` in between."""
        for loader in self.train_loaders.values():
            loader.close()  # its processes must not outlive the world that they fetched for
        while self.idle:
            if self._preparation is not None:
                if agreement.wait_for_rank_0(self.control, self._preparation.proposal):
                    self._transact(place)
                    continue
            else:
                self._look_for_proposal()
            if self._preparation is None and self._watch.look(self.members):
                self.control.post(f"left/{self.control.member}", True)
                raise SystemExit(0)
            self._watch_over_preparation()
            if self._on_idle is not None:
                self._on_idle(self)
            else:
                time.sleep(IDLE_POLL_SECONDS)

    def _look_for_proposal(self) -> None:
        record = self.control.read(f"proposal/{self._attempt + 1}")
        if record is None:
            return
        proposal = Proposal.from_json(record)
        if self.control.member in proposal.union:
            self._prepare(proposal)
            return
        outcome = self.control.read(f"record/{proposal.generation}")
        if outcome is not None:
            self._attempt = proposal.generation
            if outcome["commit"]:
                self.layout, self.members = proposal.layout, proposal.members

    def _watch_over_preparation(self) -> None:
        """A switch that was given up before the meeting, or whose members ended before it, is let go of."""
        if self._preparation is None:
            return
        generation = self._preparation.proposal.generation
        record = self.control.read(f"record/{generation}")
        ended = self._watch.look(self.members)
        if record is not None and not record["commit"] or ended:
            self._preparation.abandon()
            self._preparation, self._attempt = None, generation

    def _prepare(self, proposal: Proposal) -> None:
        live = {} if self.idle else self.state_buffers()[0]
        types = self._types(proposal.layout)
        self._preparation = Preparation(proposal, self.control, self.vps, live, types)
        self._attempt = proposal.generation
        self._preparation.start()

    def _transact(self, place: str) -> None:
        begin = time.perf_counter()
        preparation = self._preparation
        if preparation is None:
            return
        was = self.layout, self.members
        outcome = Transaction(self, preparation, place).run()
        self._preparation = None
        pause = 1e3 * (time.perf_counter() - begin)
        event = event_of(self, preparation, outcome, was, pause)
        self.last_switch = event
        if self._pending is not None:
            self._pending.event, self._pending = event, None
        if event.outcome == "committed" and outcome.phases_ms.get("move"):
            self._speed = max(event.bytes_sent / (1e-3 * outcome.phases_ms["move"]), 1.0)
        if self.rank == 0:
            log_event(event)
            if self.settings.report.jsonl is not None:
                EventWriter(Path(self.settings.report.jsonl)).write(event)
        if event.outcome == "committed":
            for listener in self._listeners:
                listener(event)

    def enter(self, proposal: Proposal, world: World | None) -> None:
        """Become part of a committed world, or idle; called by the transaction."""
        self.world, self.layout, self.members = world, proposal.layout, proposal.members
        self._attempt = proposal.generation

    def restore_carry(self, shared: dict[str, Any]) -> None:
        """Put hyper-parameters, counters and the scheduler back to what they were before a switch that failed."""
        for name, value in shared["counters"].items():
            setattr(self, name, value)
        self.micro_steps = shared["windows"] * int(self.gradient_accumulation_steps())
        for group, values in zip(self.basic_optimizer.param_groups, shared["groups"], strict=True):
            group.update(values)
        if self.lr_scheduler is not None:
            self.lr_scheduler.load_state_dict(shared["scheduler"])

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

        dataset: map-style, or a torch DataLoader over one, which is taken apart. A train loader has a position and is where
        a change takes effect; an evaluation loader (`evaluation=True`, not shuffled unless asked) has neither.
        """
        drop_last = None if evaluation or not self._drop_last else True
        source = Source.build(
            dataset,
            collate_fn=collate_fn,
            num_workers=num_workers,
            shuffle=(False if shuffle is None else shuffle) if evaluation else shuffle,
            reshuffle=self.settings.data.reshuffle or None,
            drop_last=drop_last,
        )
        if evaluation:
            return EvaluationLoader(source, self, batch_size)
        name = name or f"train{len(self.train_loaders) or ''}"
        if name in self.train_loaders:
            raise ConfigError(f"loader {name!r} exists; give another name")
        self.train_loaders[name] = TrainLoader(source, self, name)
        return self.train_loaders[name]

    @property
    def _drop_last(self) -> bool:
        return bool(self.user_config.get("dataloader_drop_last"))

    def deal(self, slot: Slot, first: bool, last: bool) -> None:
        """Called by a train loader with the slot of the micro-batch that it is about to return."""
        self.slot_weight = slot.weight
        self.slot_is_borrowed = slot.samples == 0
        self._dealt = True
        if slot.weight:
            self._window_samples = round(slot.samples * self.batch.slots / slot.weight)

    def epochs(self, count: int) -> Iterator[int]:
        """The numbers, from 0, of the epochs that remain of `count` for the job, on whichever member."""
        while self.job_epoch < count:
            yield self.job_epoch
            self.job_epoch += 1

    def mean(self, value: torch.Tensor | float, samples: int) -> torch.Tensor:
        """The mean of `value` over the data axis, weighted by each rank's `samples`; a collective of the working members."""
        plain = value.detach() if isinstance(value, torch.Tensor) else torch.tensor(value)
        pair = torch.stack([plain.double().reshape(()) * samples, torch.tensor(float(samples), dtype=torch.float64)])
        if samples == 0:
            pair[0] = 0.0
        if self.data > 1:
            td.all_reduce(pair, group=self.data_parallel_group)
        if not pair[1]:
            raise DataError("mean over no samples: every rank gave samples=0")
        return (pair[0] / pair[1]).to(torch.float32)

    # ---- DeepSpeed's calls ---------------------------------------------------------------------------------------

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """DeepSpeed's; a micro-batch without a sample of its own leaves no trace in the module's buffers."""
        if not (self.slot_is_borrowed and self.module.training):
            return super().forward(*inputs, **kwargs)
        before = [(held, held.detach().clone()) for held in self.module.buffers()]
        output = super().forward(*inputs, **kwargs)
        with torch.no_grad():
            for held, value in before:
                held.copy_(value)
        return output

    def step(self, lr_kwargs: Any = None) -> None:
        """DeepSpeed's; a complete window opens the way to the next boundary."""
        super().step(lr_kwargs)
        if self.micro_steps % int(self.gradient_accumulation_steps()) == 0:
            if self._window_samples is not None:
                self.global_samples += self._window_samples - self.batch.train_batch_size
            self.__dict__.update(_dealt=False, _window_samples=None, window_tokens=None)
            self.__dict__.update(slot_weight=1.0, slot_is_borrowed=False)

    def destroy(self) -> None:
        """DeepSpeed's, and the end of this engine's job: members that wait for work in it are let go."""
        self._end_job()
        super().destroy()
        for hook in ("module_forward_pre_hook", "module_forward_post_hook"):  # DeepSpeed leaves them on the module
            if hook in self.__dict__:
                self.__dict__.pop(hook).remove()

    def close(self) -> None:
        """End of the script: tell the others, and take the process groups down while they can still answer."""
        if self._end_job() and self.launch.member == 0:
            self._see_idle_members_off()
        if td.is_initialized():
            td.destroy_process_group()

    def _end_job(self) -> bool:
        """Leave the world and stand in the launch group again; False if that was done before."""
        if not self.__dict__.pop("_is_open", False):
            return False
        try:
            post_end(self.control)
            self._heartbeat.stop()
            if self._preparation is not None:
                self._preparation.abandon()
                self._preparation = None
            for loader in self.train_loaders.values():
                loader.close()
            self.claims.erase(f"open/{self.control.member}")
        except RuntimeError:  # the store is gone: there is nobody left to tell
            pass
        if self.world is not None:
            drop(self.world)
            self.world = None
        self.launch.install()
        return True

    def _see_idle_members_off(self) -> None:
        """The store may live in this process: idle members read their release from it before it goes."""
        waiting = [member for member in range(self.launch.size) if member not in self.members]
        deadline = time.monotonic() + 5.0
        while waiting and time.monotonic() < deadline:
            waiting = [member for member in waiting if not self.control.all_posted("left", [member])]
            time.sleep(0.02)

    # ---- small things --------------------------------------------------------------------------------------------

    def open_for_work(self, space: VirtualParameterSpace) -> None:
        """Last step of `initialize`: the space is registered, the heartbeat beats."""
        self.__dict__["_space"] = space
        self.__dict__["_is_open"] = True
        self._heartbeat.start()

    def config_for(self, layout: Layout) -> tuple[dict[str, Any], Any]:
        """DeepSpeed's configuration of a layout; made once."""
        if layout not in self._configs:
            batch = self._batch_for(layout)
            micro = -(-batch.train_batch_size // batch.slots)
            sizes = (batch.train_batch_size, micro, batch.accumulation)
            self._configs[layout] = layout_config(self.user_config, layout, *sizes)
        return self._configs[layout]  # type: ignore[no-any-return]

    def set_global_grad_norm(self, norm: float | None) -> None:
        """The norm of the last step, on a member that was not there."""
        self._global_grad_norm = norm

    def _batch_for(self, layout: Layout) -> BatchArithmetic:
        sizes = self.batch_sizes
        return BatchArithmetic(sizes.train_batch_size, sizes.micro_batch_size, layout.data)

    def _types(self, layout: Layout) -> dict[str, torch.dtype]:
        return dtypes(self.model_map.dtype, self._space.present_kinds(layout))
