"""Mistakes that a protocol like this one had, or could have: the histories find each of them.

Each is a method of the product's that does less, or something else, than it should.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from ds_dynatrain.elastic.membership import Membership
from ds_dynatrain.elastic.messages import Report
from ds_dynatrain.elastic.recovery import Recovery
from ds_dynatrain.elastic.world import World
from ds_dynatrain.engine.members.change import ChangeMachine
from ds_dynatrain.engine.members.elastic import Elastic

Bug = tuple[Any, str, Any]
"""Whose, which method, and what is there instead."""


def _plain_harmless(self: Elastic, world: World) -> bool:
    return world.change == "planned" or self._training <= {*world.members, *world.leaving}


def _deaf_report(self: Membership, member: str, said: Report, now: float) -> None:
    self.roster.update(member, said, now)


def _trusting_bye(self: Membership, member: str, now: float, newest: int) -> None:
    if self.roster.remove(member) is not None:
        self._note(now)


def _oldest(self: Recovery) -> World | None:
    return min(self._told.values(), key=lambda world: world.generation, default=None)


def _no_breach(self: Membership, member: str, why: str, now: float) -> None:
    self._gone[member] = why
    self._note(now)


def _silent_agree(self: ChangeMachine, own: Any, world: World, boards: Any) -> list[Any]:
    return [] if own.is_all_idle else _AGREE(self, own, world, boards)


_AGREE = ChangeMachine._agree

BUGS: dict[str, Bug] = {
    "a planned change hides that a collective has failed": (Elastic, "is_harmless", _plain_harmless),
    "reports are kept, and nothing follows": (Membership, "report", _deaf_report),
    "who leaves is not missed": (Membership, "bye", _trusting_bye),
    "the oldest world counts after a restart": (Recovery, "choose", _oldest),
    "a hand-over that breaks off is no failure": (Membership, "_is_gone", _no_breach),
    "all count as having entered": (Membership, "_is_settled", property(lambda self: True)),
    "nobody counts as having entered": (Membership, "_is_entered", property(lambda self: False)),
    "where all leave, nobody is waited for": (Membership, "_is_handed_over", property(lambda self: self._is_settled)),
    "a coordinator recovers from nothing": (Membership, "_may_recall", lambda self, world, now: False),
    "those that did not come back are not missed": (Membership, "_miss", lambda self, now: []),
    "the silent are never given up": (Membership, "_give_up_silent", lambda self, now: []),
    "idle members say nothing after a failure": (ChangeMachine, "_agree", _silent_agree),
    "a later generation is not looked at on the way": (
        ChangeMachine,
        "_is_later",
        lambda self, own, newest: (
            self.world is None and (own.world is None or newest.generation > own.world.generation)
        ),
    ),
}


@contextmanager
def put_in(name: str) -> Iterator[None]:
    """One of them is in the product."""
    owner, method, instead = BUGS[name]
    with patch.object(owner, method, instead):
        yield
