"""One answer for all working members to a call that each of them makes: everybody's record, judged alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ds_dynatrain.engine.control import Control
from ds_dynatrain.engine.liveness import BEAT_SECONDS, SILENT_BEATS
from ds_dynatrain.errors import CheckpointError, MemberMissing

LONGEST_SECONDS = 1800.0
"""For work on a disk: as long as DeepSpeed waits for a collective."""


def agree(control: Control, key: str, members: tuple[int, ...], what: str, record: Mapping[str, Any]) -> None:
    """CheckpointError, on all members alike, if one refuses (`record["refusal"]`), asks for something else, or does not
    ask at all.
    """
    control.post(f"{key}/{control.member}", dict(record))
    try:
        records = control.gather(key, members, f"{what}: every working member has to call it")
    except MemberMissing as missing:
        verdict = control.decide(f"{key}/verdict", f"{missing}; call it on every working member, at the same step")
    else:
        verdict = control.decide(f"{key}/verdict", _judged(records, what))
    if verdict:
        raise CheckpointError(verdict)


def _judged(records: Mapping[int, Mapping[str, Any]], what: str) -> str:
    for member, record in sorted(records.items()):
        if record["refusal"]:
            return f"{what}: member {member}: {record['refusal']}"
    first = min(records)
    for member, record in sorted(records.items()):
        if record != records[first]:
            return f"{what}: members {first} and {member} ask for different things: {records[first]} and {record}"
    return ""


def gather_living(
    control: Control, key: str, members: Iterable[int], what: str, stop: Callable[[], None] | None = None
) -> dict[int, Any]:
    """`Control.gather` for work whose time nobody knows: it waits as long as the missing members' hearts beat.

    MemberMissing for one whose heartbeat stood still for the time-out, or who beats and does not answer for half an
    hour.
    """
    wanted, begin = tuple(members), time.monotonic()
    if control.watch is not None:  # there are no heartbeats: the board itself knows
        return control.gather(key, wanted, what, begin + LONGEST_SECONDS, stop)
    patience = max(control.timeout_seconds, SILENT_BEATS * BEAT_SECONDS)
    while True:
        beats = {member: control.read(f"alive/{member}") for member in wanted}
        try:
            return control.gather(key, wanted, what, time.monotonic() + patience, stop)
        except MemberMissing as missing:
            now = time.monotonic() - begin
            silent = [member for member in missing.members if control.read(f"alive/{member}") == beats[member]]
            if silent or now > LONGEST_SECONDS:
                raise MemberMissing(what, silent or missing.members, now) from None
