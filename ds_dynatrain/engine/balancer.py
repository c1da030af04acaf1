"""Layers are timed in windows, all members get one profile of them, and boundaries are proposed from it.

All members come by the same steps and open windows at the same ones. What each has timed goes to the first member of
the world, which puts it together with the windows before; its answer is everybody's, also that of members which have
just come.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import numpy as np

from ds_dynatrain.adapters.pipeline import PipelineTemplate, layer_of
from ds_dynatrain.adapters.stage_module import PipelineShaper
from ds_dynatrain.adapters.stage_timer import StageTimer, StageTimes
from ds_dynatrain.balance.advice import Advice, Move, Situation, advise
from ds_dynatrain.balance.decision import History, Rules
from ds_dynatrain.balance.partition import PLENTY
from ds_dynatrain.balance.pause import Pause
from ds_dynatrain.balance.profile import Floats, Profile
from ds_dynatrain.balance.window import Averaged, Known, Window, rows_of
from ds_dynatrain.config import BalanceConfig
from ds_dynatrain.engine.attempts import Attempts
from ds_dynatrain.engine.core import EngineCore
from ds_dynatrain.engine.pending import SwitchEstimate
from ds_dynatrain.engine.transaction.session import Request, Session, ask_for_different_things
from ds_dynatrain.errors import ConfigError, MemberMissing, ProfileError, WorldChanged
from ds_dynatrain.report import SwitchEvent, logger
from ds_dynatrain.space import Layout, LogicalTensor
from ds_dynatrain.space.kind import WEIGHT

SETTLING = 2
"""Steps after the members or the layout have changed, or another state was loaded: memory is touched anew in them."""
ASSUMED_PAUSE_SECONDS = 0.5
"""Of a switch, beside its bytes, until one was made."""


class Balancer:
    """`engine.balancer`, where the `dynatrain` block has a `balance` block.

    profile: what the windows so far have found, the same on all working members; None before the first one has ended.
    """

    profile: Profile | None = None

    def __init__(
        self, engine: EngineCore, settings: BalanceConfig, dry_run: Callable[[Layout], SwitchEstimate], made: Attempts
    ) -> None:
        """dry_run: what a switch to a layout would cost, or why it is refused."""
        self._engine, self._settings, self._dry_run, self._made = engine, settings, dry_run, made
        self._rules = Rules(settings.least_gain, settings.horizon_steps, settings.safety)
        self._switches: list[tuple[int, float]] = []
        self._averaged: Averaged | None = None
        self._pause = Pause(ASSUMED_PAUSE_SECONDS, 0.0)
        self._timer: StageTimer | None = None
        self._shared: Session | None = None
        """The last one in which rows were shared."""
        self._left = 0
        """Steps of the window that is open."""
        self._at: tuple[str, int] = ("", 0)
        """Segment of training, and how often what is trained has changed."""
        self._settled = self._next = 0
        """The steps from which one may be timed, and at which the next window is due."""
        self._is_noted = False
        self._noted: tuple[str, int] = ("", 0)
        """Where `note` was called last, and how often there."""
        made.listeners.append(self._note_switch)

    # ---- what a user calls -------------------------------------------------------------------------------------------

    def note(self, text: str) -> None:
        """Costs have changed just now: the next step is timed, and what was measured before counts no more.

        Call it on every working member at the same step. ConfigError, on all that have called it, naming the members
        that have not within half of `timeout_seconds`: those are in the next step, and wait no longer for these. text:
        for the log.
        """
        engine = self._engine
        if engine.idle:
            raise ConfigError("balancer.note: this member is idle and times nothing; call it on the working members")
        place = f"{engine.segment}/{engine.micro_steps}"
        self._noted = place, self._noted[1] + 1 if self._noted[0] == place else 1
        key = f"note/{place}/{self._noted[1]}"
        what, begin = f"balancer.note({text!r})", time.monotonic()

        def stop() -> None:
            if (waited := time.monotonic() - begin) > engine.settings.timeout_seconds / 2:
                raise MemberMissing(what, (), waited)

        session = Session(engine.control, key, engine.members, what, stop=stop)
        session.agree(Request({"step": engine.global_steps}), True, _cannot_note, ask_for_different_things)
        self._is_noted, self._next, self._timer = True, engine.global_steps, None
        if engine.rank == 0:
            logger.info("balance: %s: layers are timed at the next step", text)

    def advise(self) -> Advice:
        """The best boundaries of the present stages, and whether it would pay to move; asks nobody, changes nothing.

        The same on all working members. ProfileError before a window has ended in a world of these sizes; LayoutError
        if nothing fits into `memory_limit_bytes`.
        """
        engine, profile = self._engine, self.profile
        if engine.idle or profile is None or self._averaged is None:
            why = "this member is idle" if engine.idle else f"the first window begins at step {self._due}"
            raise ProfileError(f"balancer.advise: nothing was measured yet: {why}")
        if len(profile.speeds) != engine.layout.world_size:
            raise ProfileError(
                f"balancer.advise: the profile is of {len(profile.speeds)} members, and {engine.layout.world_size} "
                f"work now; the next window begins at step {self._due}"
            )
        rules, settings = self._rules, self._settings
        history = History(rules.cooldown_steps, self._averaged.since)
        memory = settings.memory_limit_bytes or PLENTY
        at = Situation(self._present, engine.accumulation, engine.global_steps, history, rules, memory)
        return advise(profile, at, self._move, lambda layout, deal: bool(self._dry_run(layout).refusal))

    def _move(self, layout: Layout) -> Move:
        nbytes = self._dry_run(layout).bytes_sent
        return Move(nbytes, self._pause.seconds(nbytes))

    @property
    def _present(self) -> Layout:
        layout = self._engine.layout
        return layout.replace(boundaries=self._template.boundaries(layout))

    @property
    def _due(self) -> int:
        return max(self._next, self._settled)

    @property
    def _template(self) -> PipelineTemplate:
        return cast("PipelineShaper", self._engine.host.shaper).template

    def _note_switch(self, event: SwitchEvent) -> None:
        if event.bytes_sent:
            self._switches.append((event.bytes_sent, 1e-3 * event.pause_ms))

    # ---- windows -----------------------------------------------------------------------------------------------------

    def timed_step(self) -> AbstractContextManager[None]:
        """Around a step of DeepSpeed's; it is timed if it is of a window."""
        engine = self._engine
        now, step = (engine.segment, len(engine.registered)), engine.global_steps
        if now != self._at:
            self._at, self._timer = now, None
            self._settled = self._next = step + SETTLING
        if self._timer is None and step >= self._due:
            self._timer = StageTimer(engine.deepspeed, engine.host.basic_optimizer)
            self._left, self._next = self._settings.window_steps, step + self._settings.every_steps
        return nullcontext() if self._timer is None else self._timer.timing()

    def finish_step(self) -> None:
        """After a step. MemberMissing, naming them, if others do not come to the end of a window."""
        if self._timer is None:
            return
        self._left -= 1
        if self._left > 0:
            return
        timer, self._timer = self._timer, None
        try:
            self._share(timer.times())
        except WorldChanged as error:  # training finds it, too
            logger.debug("balance: the window of step %d is lost: %s", self._engine.global_steps, error)

    def _share(self, times: StageTimes) -> None:
        """Let all have the profile of all."""
        engine, layers = self._engine, self._layers()
        rows = self._rows(times)
        key = f"profile/{engine.segment}/{engine.global_steps}"
        session = Session(engine.control, key, engine.members, "balance: the end of a window")
        said = session.reduce("rows", {str(engine.rank): rows.tolist()}, _merged, self._joined)
        session.forget("rows")
        if self._shared is not None and self._shared.board is session.board:
            self._shared.forget_answer("rows")
        self._shared = session
        self._averaged, self._pause = Averaged.from_json(said["averaged"]), Pause(*said["pause"])
        self._is_noted = False
        steps = engine.global_steps
        source = f"measured at step {steps} on {engine.layout}, windows: {self._averaged.windows}"
        self.profile = self._averaged.profile(layers, source)

    def _joined(self, said: dict[str, Any]) -> dict[str, Any]:
        """On the first member: its own history goes on with what all ranks say."""
        engine = self._engine
        by_rank = {int(rank): np.array(rows, dtype=np.float64) for rank, rows in said.items()}
        window = Window.of(by_rank, engine.layout, self._present.boundaries or ())
        batch = engine.host.global_batch_size, int(engine.deepspeed.train_micro_batch_size_per_gpu())
        step, least = engine.global_steps, self._settings.least_gain
        averaged = Averaged.after(self._averaged, window, batch, step, least, self._is_noted)
        pause = Pause(ASSUMED_PAUSE_SECONDS, 1 / self._made.bytes_per_second).fitted(self._switches)
        return {"averaged": averaged.to_json(), "pause": [pause.fixed_seconds, pause.seconds_per_byte]}

    def _rows(self, times: StageTimes) -> Floats:
        """Of this rank's stage. The optimizer's seconds are shared out by the elements that it steps."""
        engine = self._engine
        start = (self._present.boundaries or ())[engine.place("pipe")]
        elements = np.array(self._trained()[start : start + times.forward.shape[1]], dtype=np.float64)
        rate = times.step_seconds / times.stepped if times.stepped else 0.0
        return rows_of(times.forward, times.backward, rate * elements[None], times.kept_bytes, times.output_bytes)

    # ---- the model ---------------------------------------------------------------------------------------------------

    def _trained(self) -> list[int]:
        """Elements of each layer that are trained; a tied layer has them at each of its places."""
        return [sum(tensor.numel for tensor in held if tensor.trainable) for held in self._tensors()]

    def _layers(self) -> list[Known]:
        """Of the whole model, in the present registration."""
        template, vps = self._template, self._engine.vps
        kinds = [vps.kind(name) for name in vps.present_kinds()]
        found = []
        for number, (name, held) in enumerate(zip(template.names, self._tensors(), strict=True)):
            sizes = {
                kind.name: sum(
                    tensor.numel * kind.itemsize
                    for tensor in held
                    if kind.name == WEIGHT or (tensor.trainable and kind.is_of(tensor.group))
                )
                for kind in kinds
            }
            known = {kind: size for kind, size in sizes.items() if size or kind == WEIGHT}
            found.append(Known(f"{number}.{name or 'function'}", known, any(tensor.trainable for tensor in held)))
        return found

    def _tensors(self) -> list[list[LogicalTensor]]:
        """Of each layer, the logical tensors."""
        by_prefix: dict[str, list[LogicalTensor]] = {prefix: [] for prefix in self._template.prefixes()}
        for tensor in self._engine.vps.tensors:
            by_prefix[layer_of(tensor.name)].append(tensor)
        return [by_prefix[prefix] for prefix in self._template.prefixes()]


def _cannot_note(reason: str, way_out: str) -> ConfigError:
    return ConfigError(f"{reason}; {way_out}")


def _merged(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    return {**one, **other}
