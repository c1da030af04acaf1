"""Survival of the state after a death: whether the survivors together hold the whole state of one step.

Without ZeRO every data index holds the whole state, in a *replica* of ranks (one for each position on the other axes;
experts need as many adjacent replicas as their axis is long). One complete replica whose members have finished the same
step has the whole state. With ZeRO each element has one owner, so the state is whole only if no member has died, for
example if only a collective has failed. Otherwise there may be whole copies of an earlier step (`whole`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ds_dynatrain.membership.whole import Frozen, Had, Mark, WholeCopies, missing, newest_whole
from ds_dynatrain.space.layout import Layout, whole_replicas


@dataclass(frozen=True)
class Survivor:
    """One member's report of the state that it holds of one engine.

    number: the member's number.
    rank: its rank in `layout`; None if it holds no state.
    generation: the number of the engine's world; members of different generations of the job may have the same number.
    step: the number of optimizer steps done.
    clean: whether no optimizer step was in progress.
    is_aborted: whether a member of that world is dead, or a collective in it has failed.
    copies: the copies that the member has, of its own state and of other members' state.
    frozen: the layout and rank in which the member had the frozen weights that are in no copy; None if there are none.
    registered: how often parameters were registered again (`update_param_groups`).
    since: the `Mark.stretch` of the newest load of a state, such as a checkpoint. Older copies do not count. None if
        the member cannot know this value, because it was idle and the coordinator was replaced.
    entered: the last generation of the job that the member entered.
    """

    number: int
    rank: int | None
    generation: int
    step: int
    clean: bool
    is_aborted: bool
    layout: Layout
    copies: tuple[Had, ...] = ()
    frozen: tuple[Layout, int] | None = None
    registered: int = 0
    since: tuple[int, ...] | None = ()
    entered: int = 0


@dataclass(frozen=True)
class WholeState:
    """Description of a whole state: its layout, the member at each rank, and the step that all of these members have
    reached."""

    layout: Layout
    members: tuple[int, ...]
    step: int


def whole_state(survivors: Mapping[str, Survivor]) -> WholeState | None:
    """Return the whole state that the survivors hold, the newest one and with as many ranks as possible; None if they
    hold none.

    Ranks of different layouts are not combined. Survivors may be in different layouts, because after several losses in
    a row only some of them may already have entered the smaller one.
    """
    holders = [one for one in survivors.values() if one.rank is not None and one.clean]
    if not holders:
        return None
    newest = max((one.entered, one.generation) for one in holders)
    holders = [one for one in holders if (one.entered, one.generation) == newest]
    alive: dict[tuple[int, Layout], dict[int, int]] = {}
    for one in holders:
        if one.rank is not None:
            alive.setdefault((one.step, one.layout), {})[one.rank] = one.number
    complete = [
        WholeState(*found, step) for (step, layout), ranks in alive.items() if (found := _complete(layout, ranks))
    ]
    return max(complete, key=lambda state: (state.step, len(state.members)), default=None)


def _complete(layout: Layout, alive: Mapping[int, int]) -> tuple[Layout, tuple[int, ...]] | None:
    """Return the layout that consists of the complete replicas only, and the member at each of its ranks; None if no
    replica is complete.

    alive: the surviving member at each rank of `layout`.
    """
    replicas = whole_replicas(layout, alive)
    if not replicas:
        return None
    smaller = layout.replace(data=len(replicas))
    places = [smaller.coordinate(rank) for rank in range(smaller.world_size)]
    return smaller, tuple(alive[layout.rank(**{**place, "data": replicas[place["data"]]})] for place in places)


def replaced_before(survivors: Iterable[Survivor]) -> tuple[int, ...] | None:
    """Return when a state, such as a checkpoint, was last loaded, as a `Mark.stretch`; None if no survivor can know
    it."""
    known = [tuple(one.since) for one in survivors if one.since is not None]
    return max(known) if known else None


def whole_copies(engines: Sequence[Mapping[str, Survivor]]) -> tuple[WholeCopies, ...]:
    """Return, for each engine, the newest set of copies from which its whole state can be restored. All engines' sets
    are of the same point in training; () if there are no such sets.

    engines: for each engine, a map from member id to the survivor's report.
    """
    found = newest_whole([_valid_copies(survivors) for survivors in engines])
    complete = [_with_frozen(whole, survivors) for whole, survivors in zip(found, engines, strict=False)]
    known = [whole for whole in complete if whole is not None]
    return tuple(known) if len(known) == len(engines) else ()


def _with_frozen(whole: WholeCopies, survivors: Mapping[str, Survivor]) -> WholeCopies | None:
    """Return the set of copies, extended by the members that hold the frozen weights which these copies lack; None if
    some of these weights are lost."""
    frozen = dict[Layout, dict[int, int]]()
    for one in survivors.values():
        if one.frozen is not None:
            layout, rank = one.frozen
            frozen.setdefault(layout.replace(zero_stage=0), {})[rank] = one.number
    had = [copy for copies in _valid_copies(survivors).values() for copy in copies if copy.mark == whole.mark]
    is_lacking = bool(frozen) or any(copy.lacks_frozen for copy in had)
    layout = whole.mark.layout
    if not is_lacking or layout.zero_stage == 3 or layout.world_size == 1:  # the copies have all frozen weights
        return whole
    complete = [each for each in (_complete(layout, alive) for layout, alive in frozen.items()) if each is not None]
    return replace(whole, frozen=Frozen(*complete[0])) if complete else None


def without(
    survivors: Mapping[str, Survivor], mark: Mark, damaged: Mapping[int, Collection[int]]
) -> dict[str, Survivor]:
    """Return the survivors' reports without the damaged copies of one point in training.

    mark: the point in training at which the copies were taken.
    damaged: a map from each member to the ranks of its damaged copies.
    """
    return {
        name: replace(
            one,
            copies=tuple(
                each for each in one.copies if each.mark != mark or each.rank not in damaged.get(one.number, ())
            ),
        )
        for name, one in survivors.items()
    }


def joint_loss(
    engines: Sequence[Mapping[str, Survivor]], name: Callable[[int, Mark, int], str] = lambda engine, mark, rank: ""
) -> str:
    """Return a description of the copies that were lost because every member that had them died; "" if there never were
    copies.

    If several engines lack copies, the description covers only the first of them.

    engines: for each engine, a map from member id to the survivor's report.
    name: returns the id of the member that had a rank when the copy was taken, or "" if it is unknown. The arguments
        are the index of the engine, the mark of the copy, and the rank.
    """
    found = [(each, *gone) for each, one in enumerate(engines) if (gone := missing(_valid_copies(one))) is not None]
    if not found:
        return _replaced(engines)
    engine, mark, ranks = next((one for one in found if one[2]), found[0])
    if not ranks:
        return f"some frozen weights of step {mark.step} are lost: all members that had them died together"
    named = [f"{rank} ({who})" if (who := name(engine, mark, rank)) else str(rank) for rank in ranks]
    said = f"rank {named[0]}" if len(ranks) == 1 else f"ranks {', '.join(named)}"
    return f"no sound copy of {said} at step {mark.step} is left: all members that had one died together"


def _replaced(engines: Sequence[Mapping[str, Survivor]]) -> str:
    """Return the reason why the existing copies cannot be used; "" if there are no copies."""
    there = [one for of_engine in engines for one in of_engine.values() if one.copies]
    if not there:
        return ""
    if all(replaced_before(of_engine.values()) is None for of_engine in engines):
        return "the coordinator was replaced, so it is unknown whether a checkpoint was loaded after the last copies"
    return "all copies were taken before a checkpoint was loaded, or before parameters were registered again"


def _valid_copies(survivors: Mapping[str, Survivor]) -> dict[int, list[Had]]:
    """Return a map from each member to its valid copies: those taken since the last load of a state and since
    parameters were last registered."""
    since = replaced_before(survivors.values())
    registered = max((one.registered for one in survivors.values()), default=0)
    if since is None:
        return {}
    return {
        one.number: [each for each in one.copies if each.mark.stretch >= since and each.mark.registered == registered]
        for one in survivors.values()
    }
