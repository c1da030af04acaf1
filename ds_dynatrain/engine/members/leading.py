"""What rank 0 of those that train does about a change of members: the job's record, and the layout to go to."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ds_dynatrain.engine.agreement import Proposal
from ds_dynatrain.engine.members.change import Change
from ds_dynatrain.engine.members.elastic import Elastic
from ds_dynatrain.engine.members.policy import choose
from ds_dynatrain.plan import assign_slots
from ds_dynatrain.report import logger
from ds_dynatrain.space import Layout

if TYPE_CHECKING:
    from ds_dynatrain.engine.engine import DynatrainEngine
    from ds_dynatrain.engine.switcher import Switcher

WITH_NEWCOMERS = 2
"""A change is tried so often with those who come; after that only with those who hold the state already."""


class Leader:
    """Every member has one, since anybody may come to lead."""

    def __init__(self, engine: DynatrainEngine, elastic: Elastic, switcher: Switcher) -> None:
        self.engine = engine
        self.elastic = elastic
        self.switcher = switcher
        self._said = ""

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
        """Post the record; once all newcomers have built their engines, and nothing is tried, propose a layout."""
        if not change.has_led:
            change.board.post("job", self._job_record(change))
            change.has_led = True
        if change.proposal is not None:
            return
        roll = change.known
        newcomers = [roll.numbers[one] for one in change.world.members if one not in self.elastic.roll.numbers]
        if newcomers and not change.board.all_posted("built", newcomers):
            return
        target = self._target(change)
        if target is None:
            return
        engine = self.engine
        before = engine.layout, () if change.restores else engine.members
        step, torn = int(engine.global_steps), self.elastic.is_torn
        proposal = Proposal(self.switcher.attempt + 1, *before, *target, None, step, forms_anew=torn)
        change.board.post(f"change/{change.tries + 1}", proposal.to_json())

    def _target(self, change: Change) -> tuple[Layout, tuple[int, ...]] | None:
        """Where to go: (layout, members); the present ones if nothing has to move, None if there is no way."""
        engine, pool = self.engine, change.candidates
        present = engine.layout, engine.members
        if change.restores:
            return self._target_of_restoring(change)
        stay = [member for member in engine.members if member in pool.nodes]
        all_stay = len(stay) == len(engine.members)
        with_newcomers = change.tries < WITH_NEWCOMERS
        if not with_newcomers and all_stay:
            return present
        able = pool.members if with_newcomers else tuple(stay)
        choice = choose(
            self.elastic.rule,
            len(able),
            engine.layout,
            lambda layout: self.switcher.check(layout, processes=len(able)),
        )
        if choice.layout is not None and len(able) > choice.layout.world_size:
            why = f" ({choice.refusals[0]})" if choice.refusals else ""
            self.say_once(
                f"{choice.layout}: {len(able) - choice.layout.world_size} of {len(able)} members wait{why}; see "
                "dynatrain.layouts"
            )
        if all_stay and choice.layout in (None, engine.layout):
            return present
        if choice.layout is None:
            self.say_once(
                f"generation {change.world.generation}: no layout for {len(able)} members "
                f"({'; '.join(choice.refusals) or 'dynatrain.layouts names none'}); members that were told to leave "
                "cannot hand over their state"
            )
            return None
        return choice.layout, assign_slots(engine.vps, choice.layout, able, pool.nodes)

    def _target_of_restoring(self, change: Change) -> tuple[Layout, tuple[int, ...]] | None:
        roll, members = change.known, change.world.members
        choice = choose(
            self.elastic.rule,
            len(members),
            self.engine.layout,
            lambda layout: self.switcher.check(layout, processes=len(members)),
        )
        if choice.layout is None:
            self.say_once(f"no layout for {len(members)} members ({'; '.join(choice.refusals)}): waiting for others")
            return None
        return choice.layout, tuple(roll.numbers[one] for one in members[: choice.layout.world_size])

    def _job_record(self, change: Change) -> dict[str, Any]:
        """All that a newcomer has to know; plain JSON."""
        engine, job = self.engine, self.engine.job
        return {
            "attempt": self.switcher.attempt,
            "layout": engine.layout.to_dict(),
            "members": engine.members,
            "roll": change.known.to_json(),
            "described": job.described,
            "rows": job.rows,
            "batch_sizes": asdict(job.batch_sizes),
            "seed": job.job_seed,
            "registered": engine.registered,
            "loaded": self.elastic.loaded,
        }
