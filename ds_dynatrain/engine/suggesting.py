"""Which layouts would be fastest, from a profile: of those that a switch would not refuse, the best first.

`balance` is imported by this file and `balancer`, and these by those who ask, when they do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from ds_dynatrain.adapters.device import is_accelerated, total_bytes
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


def profile_for(engine: EngineCore, profile: Profile | str | Path) -> Profile:
    """A profile, read if it is the name of a file; ProfileError unless it is of this job's global batch and layers.

    Its micro-batches may have another size: a job's have, in some layouts, and seconds go with the samples.
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


def configured(engine: EngineCore, file: str) -> Profile:
    """The profile of `dynatrain.balance.profile`; ConfigError if it cannot be used."""
    try:
        return profile_for(engine, file)
    except (OSError, ProfileError) as error:
        raise ConfigError(f"dynatrain.balance.profile: {error}") from error


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

    check: raises SwitchRefused for a layout in which so many cannot train this model. The members that work now are as
    fast as the profile says, if it has a speed for each; others are all alike. They are taken in the order of their
    ranks, as a switch places them. memory_bytes: of each; what is configured without it. The ZeRO stage stays as it is:
    what tells stages apart is what links take, and no profile knows that.
    """
    room = limit_of(engine) or PLENTY if memory_bytes is None else memory_bytes
    search = Search(
        zero_stages=(engine.layout.zero_stage,),
        pipeline=engine.job.has_stages,
        horizon_steps=horizon_steps,
        count=count,
        accumulation=lambda layout: engine.batch_for(layout).accumulation,
    )

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


def step_ms(engine: EngineCore, profile: Profile, layout: Layout, members: Sequence[int]) -> dict[str, float]:
    """Predicted milliseconds of a step of a layout, term by term, and their `total`. members: by rank."""
    shaper, known = engine.host.shaper, dict(zip(engine.members, profile.speeds, strict=False))
    if isinstance(shaper, PipelineShaper):
        layout = layout.replace(boundaries=shaper.template.boundaries(layout))
    is_known = len(profile.speeds) == len(engine.members)
    speeds = [known.get(member, 1.0) if is_known else 1.0 for member in members]
    deal = Deal.of(profile, layout, engine.batch_for(layout).accumulation, engine.job.has_stages)
    return step_time(profile, layout, deal, speeds).step_ms


def _speeds(engine: EngineCore, profile: Profile, members: int) -> tuple[float, ...]:
    """Of so many by rank: the present ranks', if the profile has one for each and they are as many; else all are alike.

    Of other numbers nobody knows who they are.
    """
    is_known = len(profile.speeds) == len(engine.members) == members
    return profile.speeds if is_known else (1.0,) * members


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
