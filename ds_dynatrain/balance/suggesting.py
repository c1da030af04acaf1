"""Which layouts would be fastest by a profile: those that a switch would not refuse, the best first."""

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
from ds_dynatrain.engine.parts import EngineParts
from ds_dynatrain.engine.process import PROCESS
from ds_dynatrain.errors import LayoutError, ProfileError, SwitchRefused
from ds_dynatrain.space import Layout


def suggest(
    engine: EngineParts, profile: Profile | str | Path | None, members: int | None, horizon_steps: float | None
) -> tuple[Choice, ...]:
    """Answer `engine.suggest`, which see; the job may have no `balance` block."""
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
        return engine.switcher.dry_run(layout, {}).seconds

    return fastest(engine, known, count, _limit_of(engine) or PLENTY, horizon_steps, seconds)


def best(engine: EngineParts, profile: Profile, members: int) -> Iterator[Layout]:
    """Yield the layouts of `dynatrain.layouts: "best"`; SwitchRefused with the reason if nothing fits.

    A member has the bytes that are configured, or those of its device, or its part of the host, which the members of a
    node share.
    """
    nodes = engine.candidates.nodes
    here = sum(node == nodes[engine.candidates.mine] for node in nodes.values())
    room = _limit_of(engine) or total_bytes() // (1 if is_accelerated() else here)
    try:
        yield from (choice.layout for choice in fastest(engine, profile, members, room))
    except LayoutError as error:
        raise SwitchRefused(str(error), "start more members") from error


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


def fastest(
    engine: EngineParts,
    profile: Profile,
    members: int,
    memory_bytes: int,
    horizon_steps: float | None = None,
    switch_seconds: Callable[[Layout], float] = lambda layout: 0.0,
) -> tuple[Choice, ...]:
    """Return the best layouts for so many members, best first; LayoutError if there is none.

    The members that work now are as fast as the profile says, if it has a speed for each; others are all alike. They
    are taken in the order of their ranks, as a switch places them. memory_bytes: of each. horizon_steps: over how many
    a switch is spread; without it that counts for nothing. The ZeRO stage stays as it is: what tells stages apart is
    what links take, and no profile knows that.
    """
    search = Search(
        zero_stages=(engine.layout.zero_stage,),
        pipeline=engine.job.has_stages,
        horizon_steps=horizon_steps,
        accumulation=lambda layout: engine.batch_for(layout).accumulation,
    )

    def refused(layout: Layout, deal: Deal) -> bool:
        try:
            engine.targets.check(layout, members)
        except SwitchRefused:
            return True
        return False

    return choose(
        profile,
        engine.layout,
        Members(_speeds(engine, profile, members), memory_bytes, are_placed=True),
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
    """Return the speed of each rank: that of the present ones, if they are as many and the profile has all of them.

    Else all are alike: who would work is not known then.
    """
    is_known = len(profile.speeds) == len(engine.members) == members
    return profile.speeds if is_known else (1.0,) * members


def _limit_of(engine: EngineCore) -> int | None:
    """Return the bytes of a member that are configured."""
    return None if engine.settings.balance is None else engine.settings.balance.memory_limit_bytes
