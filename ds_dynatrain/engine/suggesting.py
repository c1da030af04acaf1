"""Which layouts would be fastest, from a profile: of those that a switch would not refuse, the best first.

`balance` is imported by this file alone, and this file by those who ask.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from ds_dynatrain.adapters.device import is_accelerated, total_bytes
from ds_dynatrain.adapters.pipeline import is_pipeline
from ds_dynatrain.adapters.settings import BatchSizes
from ds_dynatrain.adapters.stage_module import PipelineShaper
from ds_dynatrain.balance.choose import Choice, Members, Search, choose
from ds_dynatrain.balance.cost import step_time
from ds_dynatrain.balance.deal import Deal
from ds_dynatrain.balance.partition import PLENTY
from ds_dynatrain.balance.profile import Profile
from ds_dynatrain.engine.core import EngineCore
from ds_dynatrain.errors import ConfigError, LayoutError, ProfileError, SwitchRefused
from ds_dynatrain.space import Layout

COUNT = 10
"""Of layouts."""
Check = Callable[[Layout, int], None]


def profile_for(sizes: BatchSizes, profile: Profile | str | Path) -> Profile:
    """A profile, read if it is the name of a file; ProfileError unless it was timed with this job's batches."""
    found = profile if isinstance(profile, Profile) else Profile.load(Path(profile))
    timed, here = (found.train_batch_size, found.micro_batch_size), (sizes.train_batch_size, sizes.micro_batch_size)
    if timed != here:
        raise ProfileError(
            f"the profile is of batches of {timed[0]} samples in micro-batches of {timed[1]}, and this job has "
            f"{here[0]} and {here[1]}: profile again, or give it these batch sizes"
        )
    return found


def configured(engine: EngineCore, file: str) -> Profile:
    """The profile of `dynatrain.balance.profile`; ConfigError unless it is of this job's batches and layers."""
    try:
        found, shaper = profile_for(engine.job.batch_sizes, file), engine.host.shaper
    except (OSError, ProfileError) as error:
        raise ConfigError(f"dynatrain.balance.profile: {error}") from error
    if isinstance(shaper, PipelineShaper) and len(found.layers) != len(shaper.template.layers):
        raise ConfigError(
            f"dynatrain.balance.profile: {file} is of another model: it has {len(found.layers)} layers, and this one "
            f"has {len(shaper.template.layers)}"
        )
    return found


def suggest(
    engine: EngineCore,
    check: Check,
    profile: Profile,
    members: int,
    horizon_steps: float | None = None,
    switch_seconds: Callable[[Layout], float] = lambda layout: 0.0,
    memory_bytes: int | None = None,
    count: int = COUNT,
) -> tuple[Choice, ...]:
    """At most `count` layouts for so many members, best first; LayoutError if there is none.

    check: raises SwitchRefused for a layout in which so many cannot train this model. Members are as fast as the
    profile says, if it has a speed for each present rank, and else all alike; they are taken in the order of their
    ranks, as a switch places them. memory_bytes: of each; what is configured without it. The ZeRO stage stays as it is:
    what tells stages apart is what links take, and no profile knows that.
    """
    room = limit_of(engine) or PLENTY if memory_bytes is None else memory_bytes
    stages, is_pipe = (engine.layout.zero_stage,), is_pipeline(engine.host.module)
    search = Search(zero_stages=stages, pipeline=is_pipe, horizon_steps=horizon_steps, count=count)

    def refused(layout: Layout, deal: Deal) -> bool:
        try:
            check(layout, members)
        except SwitchRefused:
            return True
        return False

    return choose(
        profile,
        engine.layout,
        Members(_speeds(engine, profile, members), room, are_placed=True),
        search,
        refused,
        switch_seconds,
    )


def step_ms(engine: EngineCore, profile: Profile, layout: Layout) -> dict[str, float]:
    """Predicted milliseconds of a step of a layout, term by term, and their `total`.

    ProfileError for a profile of another number of layers.
    """
    shaper = engine.host.shaper
    if isinstance(shaper, PipelineShaper):
        layout = layout.replace(boundaries=shaper.template.boundaries(layout))
    try:
        return step_time(profile, layout, Deal.of(profile, layout), _speeds(engine, profile, layout.world_size)).step_ms
    except LayoutError as error:
        raise ProfileError(f"the profile is of another model: {error}") from error


def _speeds(engine: EngineCore, profile: Profile, members: int) -> tuple[float, ...]:
    """Of so many by rank: the present ranks', if the profile has one for each; else all are alike."""
    known = profile.speeds if len(profile.speeds) == len(engine.members) else ()
    return (*known, *(1.0,) * members)[:members]


def best(engine: EngineCore, check: Check, profile: Profile, members: int) -> Iterator[Layout]:
    """`dynatrain.layouts: "best"`, as a rule of `policy`; SwitchRefused with the reason if nothing fits."""
    try:
        yield from (
            choice.layout for choice in suggest(engine, check, profile, members, memory_bytes=_memory_of(engine))
        )
    except LayoutError as error:
        raise SwitchRefused(str(error), "start more members") from error


def limit_of(engine: EngineCore) -> int | None:
    """Bytes of a member as configured."""
    return None if engine.settings.balance is None else engine.settings.balance.memory_limit_bytes


def _memory_of(engine: EngineCore) -> int:
    """Bytes of a member: as configured, or of its device, or its part of the host, which members of a node share."""
    nodes = engine.candidates.nodes
    here = sum(node == nodes[engine.candidates.mine] for node in nodes.values())
    return limit_of(engine) or total_bytes() // (1 if is_accelerated() else here)
