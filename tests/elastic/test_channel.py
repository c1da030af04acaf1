"""Both ends of a connection prove that they know the token, with every message."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from ds_dynatrain.elastic import member as member_module
from ds_dynatrain.elastic.connection import NO_TAG, Channel, Connection, ask_status, new_nonce
from ds_dynatrain.elastic.environment import WorkerPlace
from ds_dynatrain.elastic.generation import Amendment, Generation
from ds_dynatrain.elastic.member import Ending, Member
from ds_dynatrain.elastic.messages import (
    PROTOCOL,
    Amended,
    Announce,
    Bye,
    Challenge,
    Changed,
    Dismiss,
    Fence,
    Leave,
    Refused,
    Report,
    Welcome,
    encode,
)
from ds_dynatrain.elastic.rendezvous import AgentLine
from ds_dynatrain.errors import CoordinatorUnproved, MessageError, PeerRefused
from tests.elastic.by_hand import End, coordinate, greeted, listening, pretend, raw
from tests.elastic.served import SECONDS, enter, serving, told

TOKEN = "not a very good secret"
WELCOME = Welcome(term="feed", store_port=4711, beat_seconds=0.1, stuck_seconds=0, min_nodes=1, max_nodes=1)
NONCES = (new_nonce(), new_nonce())


def ends(token: str | None = TOKEN) -> tuple[Channel, Channel]:
    return Channel(token, NONCES, "coordinator"), Channel(token, NONCES, "peer")


class TestChannel:
    def test_what_one_end_says_the_other_takes(self) -> None:
        coordinator, peer = ends()
        for number in range(3):
            wire = encode(Report(step=number))
            coordinator.check(wire, peer.seal(wire)[len(wire) :])
            peer.check(wire, coordinator.seal(wire)[len(wire) :])

    def test_nothing_else_is_taken(self) -> None:
        wire = encode(Bye())
        tag = ends()[1].seal(wire)[len(wire) :]
        assert ends()[0].is_next(wire, tag)
        assert not ends()[0].is_next(encode(Leave()), tag), "another message"
        assert not ends()[0].is_next(wire, NO_TAG), "no tag"
        assert not ends()[1].is_next(wire, tag), "one's own words, sent back"
        assert not ends("another token of some length")[0].is_next(wire, tag)
        assert not Channel(TOKEN, (NONCES[0], new_nonce()), "coordinator").is_next(wire, tag), "another connection"
        repeated = ends()[0]
        assert repeated.is_next(wire, tag) and not repeated.is_next(wire, tag), "the same once more"

    def test_the_token_does_not_travel(self) -> None:
        assert TOKEN.encode() not in ends()[1].seal(encode(Bye()))


class TestPretenders:
    """Programs that do not know the token, at the coordinator's address."""

    @pytest.mark.parametrize("token", [None, "another token of some length"])
    def test_they_are_refused(self, token: str | None) -> None:
        with listening(lambda end: pretend(end, token, WELCOME, Leave())) as address:
            for ask in (Connection.open, ask_status):
                with pytest.raises(CoordinatorUnproved, match=f"{address}.*does not know this process's token"):
                    ask(address, TOKEN)

    def test_what_they_say_at_once_is_not_taken_either(self) -> None:
        """Before keys are agreed on."""

        def serve(end: End) -> None:
            for message in (Challenge(version=PROTOCOL, nonce=new_nonce()), WELCOME, Leave()):
                end.send(message)
            end.rest()

        with listening(serve) as address, pytest.raises(CoordinatorUnproved):
            Connection.open(address, TOKEN)

    def test_one_of_another_version_is_named(self) -> None:
        with (
            listening(lambda end: end.send(Challenge(version=PROTOCOL + 1, nonce=new_nonce()))) as address,
            pytest.raises(PeerRefused, match="install the same version of ds-dynatrain on all nodes"),
        ):
            Connection.open(address, TOKEN)

    def test_members_and_agents_wait_for_the_true_one(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Somebody has taken the port while the coordinator is started anew."""
        monkeypatch.setattr(member_module, "end_with_parent", lambda agent: None)
        endings: list[tuple[Ending, str]] = []
        tried: list[str] = []

        def serve(end: End) -> None:
            tried.append("once")
            pretend(end, None, WELCOME, Refused(reason="go away"), Fence(member="a/0", pid=1))

        with serving(token=TOKEN) as served:
            address = served.address
            member = Member(
                WorkerPlace("a", 0, 1, address), TOKEN, on_end=lambda ending, why: endings.append((ending, why))
            )
            member.start(SECONDS)
            line = AgentLine(served.connect(), "a", address, TOKEN, "")
            line.start()
            member.ready()
            member.enter(member.wait_for_world(0, SECONDS))
        with listening(serve, address):
            until(lambda: len(tried) > 3)
        with serving(token=TOKEN, address=address) as served:
            until(lambda: bool(served.status().ranks))
            assert not endings
            line.close()
            member.stop()


class TestChangesOfGenerations:
    """A worker that cannot verify a change acts on nothing, and connects anew, where it is told the whole."""

    WORLDS = tuple(
        Generation(term="a", generation=number, change="planned", members=tuple(f"n{each}/0" for each in range(number)))
        for number in (1, 2, 3)
    )

    def test_one_that_cannot_be_verified_ends_the_connection(self) -> None:
        first, second, _ = self.WORLDS
        change = Amendment.between(first, second)
        assert change is not None
        wrong = Amended(change=change.model_copy(update={"added": ("stranger/0",)}))

        def serve(end: End) -> None:
            coordinate(end, TOKEN, WELCOME, Changed(world=first), wrong)
            end.rest()

        with listening(serve) as address:
            connection = Connection.open(address, TOKEN)
            assert connection.receive(SECONDS) == Changed(world=first)
            with pytest.raises(MessageError, match="another digest"):
                connection.receive(SECONDS)
            connection.close()

    def test_a_coordinator_sends_changes_and_to_a_new_connection_the_whole(self) -> None:
        with serving() as served, greeted(served.address) as a:
            assert isinstance(a.hear(), Welcome)
            said = Announce(node="a", local_rank=0, local_size=1, pid=1, nonce="one")
            a.send(said)
            a.send(Report(ready=True))
            first = a.hear()
            assert isinstance(first, Changed)
            a.send(Report(ready=True, entered=1))
            b = served.join("b")
            change = a.hear()
            assert isinstance(change, Amended) and change.change.apply(first.world) == told(b)
            with greeted(served.address) as again:
                assert isinstance(again.hear(), Welcome)
                again.send(said.model_copy(update={"world": first.world}))
                assert again.hear() == Changed(world=change.change.apply(first.world))


class TestInTheMiddle:
    """Somebody who passes on what both ends say."""

    def test_the_greeting_of_another_lets_nobody_in(self) -> None:
        with serving(token=TOKEN) as served:
            victim = served.join("victim")
            enter(victim, told(victim).generation)
            answers: list[bytes] = []

            def serve(end: End) -> None:
                with raw(served.address) as far:
                    end.link.sendall(far.frame())
                    far.link.sendall(end.frame())
                    end.link.sendall(far.frame())
                    far.link.sendall(encode(Dismiss(node="victim")) + NO_TAG)
                    answers.append(far.rest())

            with listening(serve) as address:
                Connection.open(address, TOKEN).close()
                until(lambda: bool(answers))
            assert b"its tag is wrong" in answers[0] and b"dismissed" not in answers[0]
            with pytest.raises(TimeoutError):
                victim.receive(0.2)

    @pytest.mark.parametrize("change", ["a bit", "the order", "once more"])
    def test_what_was_changed_ends_the_connection(self, change: str) -> None:
        with serving(token=TOKEN) as served, greeted(served.address, TOKEN) as end:
            assert isinstance(end.hear(), Welcome)
            said = [end.sealed(Announce(node="a", local_rank=0, local_size=1, pid=1)), end.sealed(Report(step=1))]
            if change == "a bit":
                said[1] = said[1].replace(b'"step":1', b'"step":2')
            if change == "the order":
                said.reverse()
            if change == "once more":
                said.append(said[1])
            end.link.sendall(b"".join(said))
            assert b"its tag is wrong" in end.rest()
            until(lambda: not served.status().members)

    def test_a_peer_hears_of_it(self) -> None:
        def serve(end: End) -> None:
            pretend(end, TOKEN, WELCOME)
            end.link.sendall(encode(Leave()) + NO_TAG)

        with listening(serve) as address:
            connection = Connection.open(address, TOKEN)
            connection.send(Bye())
            with pytest.raises(MessageError, match="its tag is wrong"):
                connection.receive(SECONDS)
            connection.close()


def until(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + 4 * SECONDS
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.02)
