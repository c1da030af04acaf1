"""Mistakes that a protocol like this one had, or could have: the histories find each of them.

Each is a method of the product's that does less, or something else, than it should.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from ds_dynatrain.elastic.generation import Generation
from ds_dynatrain.elastic.links import HostLinks
from ds_dynatrain.elastic.member import Member
from ds_dynatrain.elastic.membership_machine import MembershipStateMachine
from ds_dynatrain.elastic.messages import Bye, Report
from ds_dynatrain.elastic.roster import Publish, Recovery
from ds_dynatrain.engine.elastic import Elastic
from ds_dynatrain.membership import boundary_machine as change
from ds_dynatrain.membership.boundary_machine import Action, BoundaryMachine, GiveUpPreparation, HeldState, Open, PassBy


@dataclass(frozen=True)
class Bug:
    """owner: whose `method` it is; instead: what is there in its place; seed: of the first history that finds it.

    parts: in these histories hosts lose each other. asks: the script asks for switches.
    """

    owner: Any
    method: str
    instead: Any
    seed: int
    parts: bool = False
    asks: bool = False


def _plain_harmless(self: Elastic, world: Generation) -> bool:
    return world.change == "planned" or self._training <= {*world.members, *world.leaving}


def _deaf_report(self: MembershipStateMachine, member: str, said: Report, now: float) -> None:
    self.roster.report(member, said, now)


def _trusting_bye(self: MembershipStateMachine, member: str, said: Bye, now: float) -> None:
    if self.roster.remove(member) is not None:
        self._note(now)


def _content_bye(self: MembershipStateMachine, member: str, said: Bye, now: float) -> None:
    _BYE(self, member, said.model_copy(update={"has_left": True}), now)


def _oldest(self: Recovery) -> Generation | None:
    return min(self.told.values(), key=lambda world: world.generation, default=None)


def _no_breach(self: MembershipStateMachine, member: str, why: str, now: float) -> None:
    self._gone[member] = why
    self._note(now)


def _silent_agree(self: BoundaryMachine, own: Any, world: Generation, boards: Any) -> list[Any]:
    return [] if own.is_all_idle else _AGREE(self, own, world, boards)


def _as_before(self: BoundaryMachine, reason: str) -> list[Action]:
    return [GiveUpPreparation(reason)] if self.world is None else [GiveUpPreparation(reason), Open(self.world)]


def _said_once(self: Member) -> None:
    if self.newest is not None:
        self.broken(self.newest)


def _forgetful_publish(self: MembershipStateMachine, world: Generation, now: float) -> Publish:
    published = _PUBLISH(self, world, now)
    self._has_begun = False
    return published


def _narrow_publish(self: MembershipStateMachine, world: Generation, now: float) -> Publish:
    _PUBLISH(self, world, now)
    return Publish(world, (*world.members, *world.leaving))


def _own_alone(self: BoundaryMachine, place: int, here: HeldState) -> list[Action]:
    found = _FOLLOW(self, place, here)
    return [] if here.pending is None and any(isinstance(one, PassBy) for one in found) else found


def _for_ever(self: BoundaryMachine, place: int, here: HeldState) -> list[Action]:
    found = _FOLLOW(self, place, here)
    return [] if here.pending is not None and any(isinstance(one, PassBy) for one in found) else found


_AGREE, _BYE, _PUBLISH = BoundaryMachine._agree, MembershipStateMachine.bye, MembershipStateMachine._publish
_MEET, _CONNECT, _FOLLOW = BoundaryMachine._meet_for_switch, BoundaryMachine._connect, BoundaryMachine._follow_switch


def _always(value: Any) -> Callable[..., Any]:
    return lambda *arguments: value


BUGS: dict[str, Bug] = {
    "a planned change hides that a collective has failed": Bug(Elastic, "is_harmless", _plain_harmless, seed=29),
    "a failed collective is said once": Bug(Member, "breach", _said_once, seed=158),
    "reports are kept, and nothing follows": Bug(MembershipStateMachine, "report", _deaf_report, seed=4),
    "who leaves is not missed": Bug(MembershipStateMachine, "bye", _trusting_bye, seed=919),
    "a script that ends by itself has handed over": Bug(MembershipStateMachine, "bye", _content_bye, seed=919),
    "a hand-over that breaks off is no failure": Bug(MembershipStateMachine, "_is_gone", _no_breach, seed=200),
    "where all leave, nobody is waited for": Bug(
        MembershipStateMachine, "_is_handed_over", property(lambda self: self._is_settled), seed=76
    ),
    "the oldest world counts after a restart": Bug(Recovery, "choose", _oldest, seed=1382),
    "a coordinator recovers from nothing": Bug(MembershipStateMachine, "_may_recall", _always(False), seed=45),
    "those that did not come back are not missed": Bug(
        MembershipStateMachine, "_give_up_missing", _always([]), seed=1609
    ),
    "all count as having entered": Bug(MembershipStateMachine, "_is_settled", property(_always(True)), seed=127),
    "nobody counts as having entered": Bug(MembershipStateMachine, "_is_entered", property(_always(False)), seed=7),
    "whoever entered once has entered": Bug(
        MembershipStateMachine,
        "_is_entered",
        property(lambda self: self.world is not None and self._entered > 0),
        seed=9,
    ),
    "that steps were made is forgotten": Bug(MembershipStateMachine, "_publish", _forgetful_publish, seed=9),
    "the silent are never given up": Bug(MembershipStateMachine, "_give_up_silent", _always([]), seed=0),
    "the stuck are never given up": Bug(MembershipStateMachine, "_give_up_stuck", _always([]), seed=25),
    "others wait for late nodes for ever": Bug(MembershipStateMachine, "_is_overdue", _always(False), seed=30),
    "who is passed over is not told": Bug(MembershipStateMachine, "_publish", _narrow_publish, seed=95),
    "hosts that lose each other stay in one world": Bug(
        MembershipStateMachine, "_give_up_unreached", _always([]), seed=15, parts=True
    ),
    "nobody waits until it reaches all": Bug(
        HostLinks, "reaching", lambda self, roster, nodes, stay: list(nodes), seed=29, parts=True
    ),
    "hosts that reach each other again are not asked": Bug(
        HostLinks, "_failed_links", _always({}), seed=170, parts=True
    ),
    "nobody says that it has made its engines": Bug(Member, "built", _always(None), seed=9),
    "all members say what they hold": Bug(change, "who_is_asked", lambda world: world.members, seed=30),
    "idle members say nothing after a failure": Bug(BoundaryMachine, "_agree", _silent_agree, seed=6),
    "what was proposed on a lost board still counts": Bug(BoundaryMachine, "board_is_lost", _as_before, seed=12090),
    "a later generation is not looked at on the way": Bug(
        BoundaryMachine,
        "_is_later",
        lambda self, own, newest: (
            self.world is None and (own.world is None or newest.generation > own.world.generation)
        ),
        seed=0,
    ),
    "a switch waits for one that has left": Bug(
        BoundaryMachine, "_give_up_hopeless", _always([]), seed=1698, asks=True
    ),
    "idle members follow no switch where members come and go": Bug(
        BoundaryMachine, "_follow_switch", _always([]), seed=23, asks=True
    ),
}

IN_A_LAUNCH: dict[str, Bug] = {
    "a switch begins where others have been already": Bug(
        BoundaryMachine,
        "_meet_for_switch",
        lambda self, place, here, asked, ahead: _MEET(self, place, here, asked, ahead=0),
        seed=2,
    ),
    "communicators are made without rank 0": Bug(
        BoundaryMachine,
        "_connect",
        lambda self, place, here, asked: _CONNECT(self, place, here, asked) if here.rank == 0 else [],
        seed=7,
    ),
    "idle members never look": Bug(BoundaryMachine, "_follow_switch", _always([]), seed=0),
    "idle members follow no switch but their own": Bug(BoundaryMachine, "_follow_switch", _own_alone, seed=17),
    "idle members wait for a switch that was given up": Bug(BoundaryMachine, "_follow_switch", _for_ever, seed=0),
}
"""Mistakes that histories of a launch of fixed size find."""


@contextmanager
def put_in(bug: Bug) -> Iterator[None]:
    """It is in the product."""
    with patch.object(bug.owner, bug.method, bug.instead):
        yield
