"""Messages: they come back as they went, and nothing else is taken."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_dynatrain.elastic.generation import MOST_MEMBERS, Amendment, Generation, member_id, node_of
from ds_dynatrain.elastic.messages import (
    HEADER,
    LARGEST_GREETING,
    LARGEST_MESSAGE,
    Amended,
    Announce,
    Bye,
    Changed,
    Dismiss,
    Dismissed,
    Fence,
    Hello,
    Leave,
    Message,
    Report,
    body_length,
    decode,
    encode,
)
from ds_dynatrain.errors import MessageError

WORLD = Generation(
    term="a1", generation=3, change="planned", members=("n1/0", "n2/0"), leaving=("n0/0",), reason="n2 came"
)
NEXT = Generation(term="a1", generation=4, change="failure", members=("n2/0", "n3/0"), lost=("n1/0",), broken=3)
CHANGE = Amendment.between(WORLD, NEXT)
assert CHANGE is not None
SAMPLES: list[Message] = [
    Hello(nonce="0" * 32, job="run-7"),
    Announce(node="host-1.example-42-0", local_rank=1, local_size=8, pid=17, world=WORLD),
    Report(ready=True, entered=3, step=12, layout="data=2 zero_stage=1", pause_ms=84.5, protected="no"),
    Changed(world=WORLD),
    Amended(change=CHANGE),
    Fence(member="n1/0", pid=5),
    Fence(member="n1/0", pid=None),
    Dismiss(node="n1"),
    Dismissed(members=("n1/0", "n1/1")),
    Leave(),
    Bye(),
]


def read(wire: bytes, limit: int = LARGEST_MESSAGE) -> Message:
    length = body_length(wire[: HEADER.size], limit)
    assert len(wire) == HEADER.size + length
    return decode(wire[HEADER.size :])


@pytest.mark.parametrize("message", SAMPLES, ids=lambda message: message.kind)
def test_round_trip(message: Message) -> None:
    assert read(encode(message)) == message


def test_rank_is_the_place_in_the_list() -> None:
    assert [WORLD.rank(member) for member in ("n1/0", "n2/0", "n0/0")] == [0, 1, None]
    assert node_of(member_id("a-1", 3)) == "a-1"


MEMBERS = st.lists(st.integers(0, 30).map(lambda number: f"n{number // 3}/{number % 3}"), unique=True).map(tuple)


@given(MEMBERS, MEMBERS)
def test_a_change_leads_from_one_generation_to_the_next(before: tuple[str, ...], after: tuple[str, ...]) -> None:
    """And to no other, from no other; members that have changed their order are sent in full."""
    base = Generation(term="a1", generation=3, change="planned", members=before)
    world = Generation(term="a1", generation=4, change="failure", members=after, reason="for a test")
    change = Amendment.between(base, world)
    kept = [member for member in before if member in after]
    assert (change is None) == (list(after[: len(kept)]) != kept)
    if change is None:
        return
    assert change.apply(base) == world and change.apply(base).digest == world.digest
    other = Generation(term="a1", generation=3, change="failure", members=before)
    wrong = change.model_copy(update={"added": (*change.added, "x/0")})
    for changed, at, says in (
        (change, other, "has generation 3"),
        (change, None, "has none"),
        (wrong, base, "another digest"),
        (change.model_copy(update={"added": ("x/0", "x/0")}), base, "is listed twice"),
    ):
        with pytest.raises(MessageError, match=says):
            changed.apply(at)


def test_a_loss_among_thousands_is_a_short_message() -> None:
    members = tuple(f"node-{number // 8}/{number % 8}" for number in range(16_384))
    base = Generation(term="a", generation=1, change="planned", members=members)
    left = (*members[:77], *members[78:])
    world = Generation(term="a", generation=2, change="failure", members=left, survivors=len(left), lost=members[77:78])
    change = Amendment.between(base, world)
    assert change is not None and change.apply(base) == world
    assert 100 * len(encode(Amended(change=change))) < len(encode(Changed(world=world)))


REFUSED: list[tuple[str, bytes, str]] = [
    ("no JSON", b"GET / HTTP/1.1", "Invalid JSON"),
    ("no object", b"[1, 2]", "Input should be an object"),
    ("no kind", b"{}", "Unable to extract tag"),
    ("unknown kind", b'{"kind":"shutdown"}', "shutdown"),
    ("unknown field", b'{"kind":"bye","now":true}', "bye.now"),
    ("wrong type", b'{"kind":"fence","member":"n/0","pid":"7"}', "fence.pid"),
    ("a truth for a number", b'{"kind":"report","step":true}', "report.step"),
    ("a fraction", b'{"kind":"report","step":1.5}', "report.step"),
    ("not finite", b'{"kind":"report","pause_ms":NaN}', "report.pause_ms"),
    ("negative", b'{"kind":"report","entered":-1}', "report.entered"),
    ("a path for a node", b'{"kind":"agent","node":"../../etc"}', "agent.node"),
    ("a line break in an id", b'{"kind":"agent","node":"a\\n"}', "agent.node"),
    ("deep nesting", b'{"kind":' + b"[" * 2000 + b"]" * 2000 + b"}", "message"),
    (
        "one member twice",
        b'{"kind":"changed","world":{"term":"a","generation":1,"change":"planned","members":["n/0","n/0"]}}',
        "is listed twice",
    ),
    ("no UTF-8", b'{"kind":"\xff\xfe"}', "Invalid JSON"),
]


@pytest.mark.parametrize(("body", "says"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED])
def test_what_is_wrong_is_said(body: bytes, says: str) -> None:
    with pytest.raises(MessageError, match=says):
        decode(body)


def test_lengths_are_bounded() -> None:
    header = HEADER.pack(LARGEST_GREETING + 1)
    with pytest.raises(MessageError, match="at most 4096"):
        body_length(header, LARGEST_GREETING)
    assert body_length(header, LARGEST_MESSAGE) == LARGEST_GREETING + 1
    with pytest.raises(MessageError, match="is announced"):  # what a web browser says first
        body_length(b"GET ", LARGEST_MESSAGE)


def test_the_largest_world_fits() -> None:
    members = tuple(f"{'n' * 115}{place:08d}/{place % 8}" for place in range(MOST_MEMBERS))
    world = Generation(term="f" * 32, generation=1, change="planned", members=members)
    assert len(encode(Changed(world=world))) < LARGEST_MESSAGE


def test_what_a_peer_sent_is_not_repeated_at_length() -> None:
    with pytest.raises(MessageError) as caught:
        decode(json.dumps({"kind": "agent", "node": "\x1b[2J" + "x" * 100_000}).encode())
    assert len(str(caught.value)) < 500 and "\x1b" not in str(caught.value)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_an_error(body: bytes) -> None:
    with pytest.raises(MessageError):
        decode(body)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@given(st.sampled_from(SAMPLES), st.data())
def test_a_changed_field_is_taken_or_refused(message: Message, data: st.DataObject) -> None:
    fields: dict[str, Any] = json.loads(message.model_dump_json())
    name = data.draw(st.sampled_from(sorted(fields)))
    fields[name] = data.draw(JSON)
    try:
        decode(json.dumps(fields).encode())
    except MessageError as error:
        assert str(error)
