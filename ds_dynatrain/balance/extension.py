"""The extension that times layers and members, and proposes or makes moves to faster layouts.

It also answers `engine.suggest`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from ds_dynatrain.adapters.groups.device import is_accelerated, total_bytes
from ds_dynatrain.adapters.model.pipeline_layers import PROFILE, Cut
from ds_dynatrain.adapters.model.stage_module import PipelineShaper
from ds_dynatrain.balance.balancer import Balancer
from ds_dynatrain.balance.choose import FittingLayout, Members, Search, choose
from ds_dynatrain.balance.config import BalanceConfig
from ds_dynatrain.balance.deal import Deal
from ds_dynatrain.balance.partition import PLENTY, Problem, partition
from ds_dynatrain.balance.profile import Profile
from ds_dynatrain.balance.step_time import step_time
from ds_dynatrain.config import DynatrainConfig
from ds_dynatrain.engine.parts import EngineParts
from ds_dynatrain.errors import ConfigError, LayoutError, ProfileError, SwitchRefused
from ds_dynatrain.extension import Extension
from ds_dynatrain.reshard.core import EngineCore
from ds_dynatrain.reshard.process import PROCESS
from ds_dynatrain.space import Layout


def suggest(
    engine: EngineParts, profile: Profile | str | Path | None, members: int | None, horizon_steps: float | None
) -> tuple[FittingLayout, ...]:
    """Return the layouts with the shortest predicted steps: the answer of `engine.suggest`.

    Arguments are those of `engine.suggest`. A `balance` block is not required.
    """
    own = engine.extension("balance")
    if profile is not None:
        known = profile_for(engine, profile)
    elif own is None or own.profile is None:
        raise ProfileError(
            "engine.suggest: nothing was measured yet; give profile=, or name its file in dynatrain.balance.profile"
        )
    else:
        known = own.profile
    count = len(PROCESS.membership.able(engine)) if members is None else members

    def seconds(layout: Layout) -> float:
        return engine.estimate(layout, {}).seconds

    limit = None if engine.settings.balance is None else engine.settings.balance.memory_limit_bytes
    return fastest(engine, known, count, limit or PLENTY, horizon_steps, seconds)


def profile_for(engine: EngineCore, profile: Profile | str | Path) -> Profile:
    """Return a profile that fits this job; a path is read first.

    The profile's micro-batches may differ in size from the job's: seconds are scaled by the number of samples. Raises
    ProfileError unless the profile has this job's global batch size and number of layers.
    """
    found = profile if isinstance(profile, Profile) else Profile.load(Path(profile))
    size, shaper = engine.job.batch_sizes.train_batch_size, engine.host.shaper
    if found.train_batch_size != size:
        raise ProfileError(
            f"the profile is of a train_batch_size of {found.train_batch_size}, and this job has {size}; write "
            "another one with engine.balancer.profile.save(FILE)"
        )
    if isinstance(shaper, PipelineShaper) and len(found.layers) != len(shaper.template.layers):
        raise ProfileError(
            f"the profile is of another model: it has {len(found.layers)} layers, and this one has "
            f"{len(shaper.template.layers)}; write one of this model with engine.balancer.profile.save(FILE)"
        )
    return found


def fastest(
    engine: EngineParts,
    profile: Profile,
    members: int,
    memory_bytes: int,
    horizon_steps: float | None = None,
    switch_seconds: Callable[[Layout], float] = lambda layout: 0.0,
    at_most_slower: float | None = None,
) -> tuple[FittingLayout, ...]:
    """Return the best layouts for this many members, best first. Raises LayoutError if there is none.

    memory_bytes: the memory of each member, in bytes.
    horizon_steps: the number of steps over which the cost of a switch is spread; None to ignore that cost.
    switch_seconds: function from a layout to the seconds of a switch to it.
    at_most_slower: see `Search`.

    The profile's speeds count if the members are the current ones and the profile has a speed for each of them.
    Otherwise all members are assumed equally fast. Ranks follow the order of the members, as in a switch. The ZeRO
    stage is kept, because stages differ in communication, which no profile contains.
    """
    search = Search(
        zero_stages=(engine.layout.zero_stage,),
        pipeline=engine.job.has_stages,
        horizon_steps=horizon_steps,
        accumulation=lambda layout: engine.batch_for(layout).accumulation,
        at_most_slower=at_most_slower,
    )

    def refused(layout: Layout) -> bool:
        try:
            engine.targets.check(layout, members)
        except SwitchRefused:
            return True
        return False

    is_known = len(profile.speeds) == len(engine.members) == members
    among = Members(profile.speeds if is_known else (1.0,) * members, memory_bytes, are_placed=True)
    return choose(profile, engine.layout, among, search, refused, switch_seconds)


KEY = "dynatrain.balance.profile"


class Balance(Extension):
    """The extension for the `balance` block of a job.

    balancer: the value of `engine.balancer`; None in mode "off".
    """

    name = "balance"
    balancer: Balancer | None = None

    def __init__(self, settings: DynatrainConfig) -> None:
        self._settings: BalanceConfig = settings.balance
        self._configured: Profile | None = None
        self._described: dict[str, str] = {}

    @property
    def profile(self) -> Profile | None:
        """The measured profile, or the configured one if nothing has been measured."""
        measured = None if self.balancer is None else self.balancer.profile
        return measured or self._configured

    # ---- when an engine is made --------------------------------------------------------------------------------------

    def stage_cut(self, config: Mapping[str, Any], exchange: Callable[[str, Any], Mapping[int, Any]]) -> Cut | None:
        """Return a function that divides the layers into stages according to the configured profile.

        Returns None unless `pipeline.partition` is "profile", a setting for which DeepSpeed itself raises an error.
        Raises ConfigError if the profile cannot be read, or is not the same on all processes.
        """
        file = self._settings.profile
        if file is None or str((config.get("pipeline") or {}).get("partition", "")).lower() != PROFILE:
            return None
        try:
            profile = Profile.load(Path(file))
        except (OSError, ProfileError) as error:
            raise ConfigError(f"{KEY}: {error}") from error
        seconds = profile.passes
        digest = hashlib.blake2b(seconds.tobytes(), digest_size=16).hexdigest()
        self._described = {f"{KEY}: digest of its layers": digest}
        for member, other in sorted(exchange("partition", digest).items()):
            if other != digest:
                raise ConfigError(
                    f"{KEY}: {file} has other layers here than on member {member}; give all processes the same file"
                )

        def cut(layers: int, stages: int) -> tuple[int, ...]:
            if layers != len(seconds):
                raise LayoutError(
                    f"{KEY}: {file} is of another model: it has {len(seconds)} layers, and this one has {layers}; "
                    "write one of this model with engine.balancer.profile.save(FILE)"
                )
            return partition(Problem.of(seconds, stages)).boundaries

        return cut

    def described(self, config: Mapping[str, Any]) -> dict[str, str]:
        """Return the digest of the profile that cuts layers into stages, keyed by its setting; {} without one."""
        return self._described

    def attach(self, engine: Any) -> None:
        """Read the configured profile now, because its file may later disappear, and start measuring."""
        super().attach(engine)
        parts: EngineParts = engine._parts
        if self._settings.profile is not None:
            try:
                self._configured = profile_for(parts, self._settings.profile)
            except (OSError, ProfileError) as error:
                raise ConfigError(f"{KEY}: {error}") from error
        if self._settings.experts and parts.host.shaper.autoep is None:
            raise ConfigError(
                "dynatrain.balance.experts: this model has no layers of AutoEP, whose time depends on where experts "
                "are; deepspeed.moe pads each expert's tokens to the largest count, so no swap makes a layer faster; "
                "leave the key out"
            )
        if self._settings.measures:
            self.balancer = Balancer(parts, self._settings)

    def check_launch(self, is_elastic: bool) -> None:
        """Raise ConfigError if `members` is "release" in a launch of fixed size, which no node can leave."""
        if self._settings.members == "release" and not is_elastic:
            raise ConfigError(
                'dynatrain.balance.members is "release", and no node can leave a launch of fixed size; start torchrun '
                'with --nnodes=MIN:MAX --rdzv-backend=dynatrain, or give "idle"'
            )

    # ---- which layout ------------------------------------------------------------------------------------------------

    def step_ms(self, layout: Layout, members: Sequence[int]) -> dict[str, float]:
        """Return the predicted milliseconds of a step, keyed by term, and their `total`; {} without a profile."""
        engine, profile = self.engine._parts, self.profile
        if profile is None:
            return {}
        if isinstance(engine.host.shaper, PipelineShaper):
            layout = layout.replace(boundaries=engine.host.shaper.template.boundaries(layout))
        is_known = len(profile.speeds) == len(engine.members)
        known = dict(zip(engine.members, profile.speeds, strict=True)) if is_known else {}
        speeds = [known.get(member, 1.0) for member in members]
        deal = Deal.of(profile, layout, engine.batch_for(layout).accumulation, engine.job.has_stages)
        return step_time(profile, layout, deal, speeds).step_ms

    def best_layouts(self, members: int) -> list[Layout] | None:
        """Return the fastest layouts according to the profile; None if there is no profile yet.

        A member's memory is the configured limit or, if there is none, the memory of its device. On CPUs it is an equal
        part of the host's memory, which the members on a node share. Raises SwitchRefused, with the reason, if nothing
        fits.
        """
        engine, profile = self.engine._parts, self.profile
        if profile is None:
            return None
        nodes = engine.candidates.nodes
        here = sum(node == nodes[engine.candidates.mine] for node in nodes.values())
        settings = self._settings
        room = settings.memory_limit_bytes or total_bytes() // (1 if is_accelerated() else here)
        slower = None if settings.members == "keep" else settings.at_most_slower
        try:
            return [choice.layout for choice in fastest(engine, profile, members, room, at_most_slower=slower)]
        except LayoutError as error:
            raise SwitchRefused(str(error), "start more members") from error

    # ---- in a step ---------------------------------------------------------------------------------------------------

    def around_forward(self) -> AbstractContextManager[None]:
        """Return a context manager that times a forward pass of training if a timing window is open."""
        return self._around_pass(is_backward=False)

    def around_backward(self) -> AbstractContextManager[None]:
        """Return a context manager that times a backward pass if a timing window is open."""
        return self._around_pass(is_backward=True)

    def _around_pass(self, is_backward: bool) -> AbstractContextManager[None]:
        if self.balancer is None or not self.engine.module.training:
            return nullcontext()
        return self.balancer.timed_pass(is_backward)

    def around_batch(self) -> AbstractContextManager[None]:
        """Return a context manager that times the layers of a stage if a timing window is open."""
        return nullcontext() if self.balancer is None else self.balancer.timed_step()

    def around_update(self) -> AbstractContextManager[None]:
        """Return a context manager that times the optimizer's step if a timing window is open."""
        return nullcontext() if self.balancer is None else self.balancer.timed_update()

    def saved_member_seconds(self) -> float:
        """Return the total time for which the balancer's moves have kept members free, summed over members."""
        return 0.0 if self.balancer is None else self.balancer.saved_member_seconds

    def after_step(self) -> None:
        """End the timing window if this step was its last one. Members communicate at the end of a window."""
        if self.balancer is not None:
            self.balancer.finish_step()
