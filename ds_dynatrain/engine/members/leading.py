"""What rank 0 of those that train does about a change of members: the job's record, and the layout to go to."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from ds_dynatrain.engine.agreement import Proposal
from ds_dynatrain.engine.members.change import Change
from ds_dynatrain.engine.members.elastic import Elastic
from ds_dynatrain.engine.members.policy import Choice, choose
from ds_dynatrain.engine.parts import EngineParts
from ds_dynatrain.plan import assign_slots
from ds_dynatrain.report import logger
from ds_dynatrain.space import Layout

Destination = tuple[Layout, tuple[int, ...]]
"""A layout, and the member at each of its ranks."""

WITH_NEWCOMERS = 2
"""A change is tried so often with those who come; after that only with those who hold the state already."""


class Leader:
    """Every member has one, since anybody may come to lead."""

    def __init__(self, elastic: Elastic, engines: list[EngineParts]) -> None:
        self.elastic = elastic
        self.engines = engines
        self._said = ""

    @property
    def engine(self) -> EngineParts:
        """The first one."""
        return self.engines[0]

    def leads(self, change: Change) -> bool:
        """Whether this member does: rank 0 of those that hold the state; if nobody does, the first survivor."""
        if change.restores:
            return self.elastic.member.id == change.world.members[0]
        return not self.engine.idle and self.engine.control.member == self.engine.members[0]

    def say_once(self, what: str) -> None:
        """A warning that is the same at every boundary."""
        if what != self._said:
            self._said = what
            logger.warning("%s", what)

    def lead(self, change: Change) -> None:
        """Post the records; once all newcomers have built their engines, and nothing is tried, propose layouts.

        A switch that was asked for meanwhile comes first: members find what is proposed at different times, and one of
        them may be in it.
        """
        if not change.has_led:
            for engine in self.engines:
                change.boards_of(engine.job.number)[0].post("job", self._job_record(change, engine))
            change.has_led = True
        if change.proposals or any(engine.is_switching for engine in self.engines):
            return
        roll = change.known
        newcomers = [roll.numbers[one] for one in change.world.members if one not in self.elastic.roll.numbers]
        if newcomers and not change.board.all_posted("built", newcomers):
            return
        targets = self._targets(change)
        if targets is None:
            return
        proposals = []
        for engine, target in zip(self.engines, targets, strict=True):
            before = engine.layout, () if change.restores else engine.members
            attempt = engine.attempt + 1
            proposals.append(Proposal(attempt, *before, *target, None, forms_anew=self.elastic.is_torn))
        change.board.post(f"change/{change.tries + 1}", [proposal.to_json() for proposal in proposals])

    def _targets(self, change: Change) -> list[Destination] | None:
        """Where each engine is to go; the present places if nothing has to move, None if there is no way."""
        engines, pool = self.engines, change.candidates
        present = [(engine.layout, engine.members) for engine in engines]
        if not change.world.members:  # all go: they meet as they are, to save and end at one step
            return present
        if change.restores:
            return self._targets_of_restoring(change)
        holders = {member for engine in engines for member in engine.members}
        all_stay = holders <= set(pool.members) and all(set(engine.members) == holders for engine in engines)
        with_newcomers = change.tries < WITH_NEWCOMERS
        if not with_newcomers and all_stay:
            return present
        able = pool.members if with_newcomers else tuple(one for one in pool.members if one in holders)
        choices = self._choices(len(able))
        layouts = [choice.layout for choice in choices if choice.layout is not None]
        refusals = [refusal for choice in choices for refusal in choice.refusals]
        if layouts and len(able) > layouts[0].world_size:
            why = f" ({refusals[0]})" if refusals else ""
            self.say_once(
                f"{layouts[0]}: {len(able) - layouts[0].world_size} of {len(able)} members wait{why}; see "
                "dynatrain.layouts"
            )
        is_none = len(layouts) < len(engines)
        if all_stay and (is_none or layouts == [engine.layout for engine in engines]):
            return present
        if is_none:
            self.say_once(
                f"generation {change.world.generation}: no layout for {len(able)} members "
                f"({'; '.join(refusals) or 'dynatrain.layouts names none'}); members that were told to leave "
                "cannot hand over their state"
            )
            return None
        targets: list[Destination] = []
        for engine, layout in zip(engines, layouts, strict=True):
            able = assign_slots(engine.vps, layout, able, pool.nodes)  # the members of the first are those of all
            targets.append((layout, able))
        return targets

    def _targets_of_restoring(self, change: Change) -> list[Destination] | None:
        roll, members = change.known, change.world.members
        choices = self._choices(len(members))
        targets: list[Destination] = [
            (choice.layout, tuple(roll.numbers[one] for one in members[: choice.layout.world_size]))
            for choice in choices
            if choice.layout is not None
        ]
        if len(targets) < len(choices):
            refusals = [refusal for choice in choices for refusal in choice.refusals]
            self.say_once(f"no layout for {len(members)} members ({'; '.join(refusals)}): waiting for others")
            return None
        return targets

    def _choices(self, members: int) -> list[Choice]:
        """Each engine's layout for so many members, or for fewer, but of all engines for the same number."""
        while True:
            choices = [self._choice(engine, members) for engine in self.engines]
            sizes = {0 if choice.layout is None else choice.layout.world_size for choice in choices}
            if len(sizes) == 1 or 0 in sizes:
                return choices
            members = min(sizes)

    def _choice(self, engine: EngineParts, members: int) -> Choice:
        targets = engine.targets
        with engine.turn():
            return choose(targets.rule, members, engine.layout, lambda layout: targets.check(layout, processes=members))

    def _job_record(self, change: Change, engine: EngineParts) -> dict[str, Any]:
        """All that a newcomer has to know to make one of the engines; plain JSON."""
        job = engine.job
        return {
            "engines": len(self.engines),
            "attempt": engine.attempt,
            "layout": engine.layout.to_dict(),
            "members": engine.members,
            "roll": change.known.to_json(),
            "described": job.described,
            "rows": job.rows,
            "batch_sizes": asdict(job.batch_sizes),
            "seed": job.job_seed,
            "registered": engine.registered,
            "loaded": self.elastic.loaded.get(job.number),
        }
