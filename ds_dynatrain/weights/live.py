"""This rank's buffers, once they can be read: no global batch is open, and each element lies where the layout says."""

from __future__ import annotations

from ds_dynatrain.adapters.zero.state import Buffers
from ds_dynatrain.engine.discarded import DISCARDED
from ds_dynatrain.engine.parts import EngineParts
from ds_dynatrain.errors import CensusError, MemberMissing, WeightsError, WorldChanged
from ds_dynatrain.membership.session import ASK_ALL, Session
from ds_dynatrain.reshard.swap import check_census


def read_buffers(engine: EngineParts, what: str, in_the_way: str) -> Buffers:
    """Return this rank's buffers, without a message; raise WeightsError if they cannot be read now.

    in_the_way: a reason that is already known, or "".
    """
    if in_the_way:
        raise WeightsError(f"{what}: {in_the_way}; call it after engine.step()")
    with engine.turn():
        buffers, _ = engine.host.state_buffers()
        try:
            check_census(engine.host, engine.vps, engine.rank, buffers, what)
        except CensusError as error:
            raise WeightsError(str(error)) from error
    return buffers


def agreed_buffers(engine: EngineParts, what: str, in_the_way: str) -> tuple[Session, Buffers]:
    """Return a session of all ranks and this rank's buffers, once all of them can be read.

    Called on all ranks. Raise WeightsError, on all of them alike, if the buffers of one cannot be read. Raise
    WorldChanged in a discarded global batch, which newcomers do not go through, so they would not answer.
    """
    if engine.is_discarded:
        raise WorldChanged(f"{what}: {'; '.join(DISCARDED)}")
    session = Session(engine.control, f"weights/{engine.place_in_training()}", engine.members, what)
    problem, buffers = "", Buffers()
    try:
        buffers = read_buffers(engine, what, in_the_way)
    except WeightsError as error:
        problem = str(error)
    try:
        said = session.all("ready", problem)
    except MemberMissing as missing:
        raise WeightsError(f"{missing}; {ASK_ALL}") from missing
    raise_first(said, "")
    engine.agree()
    return session, buffers


def raise_first(said: dict[int, str], end: str, cause: Exception | None = None) -> None:
    """Raise WeightsError with the first problem that members report, if any does. end: added to the message."""
    for member, problem in sorted(said.items()):
        if problem:
            raise WeightsError(f"member {member}: {problem}{end}") from cause
