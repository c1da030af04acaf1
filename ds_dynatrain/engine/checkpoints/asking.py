"""Agreement before saving or loading a checkpoint: all working members ask for the same, and nothing is in the way."""

from __future__ import annotations

from ds_dynatrain.adapters.regroup import refuse_changes
from ds_dynatrain.adapters.support import refuse_at_boundary
from ds_dynatrain.checkpoint import folder
from ds_dynatrain.errors import CheckpointError, DynatrainError, SwitchRefused
from ds_dynatrain.membership.session import Request, Session, ask_for_different_things
from ds_dynatrain.reshard.core import EngineCore


def ask(session: Session, request: Request) -> None:
    """Raise CheckpointError, on all members alike, if one refuses, asks for something else, or does not ask at all."""

    def refused(reason: str, way_out: str) -> CheckpointError:
        return CheckpointError(f"{session.what}: {reason}; {way_out}" if way_out else f"{session.what}: {reason}")

    session.agree(request, None, refused, ask_for_different_things)


def refusal_of(engine: EngineCore, in_the_way: str, tag: str | None) -> tuple[str, str] | None:
    """Return reason and way out if this member cannot take part now. in_the_way: a reason that is known already."""
    try:
        if in_the_way:
            return in_the_way, ""
        if tag is not None:
            folder.check_tag(tag)
        refuse_at_boundary(engine.host)
        refuse_changes(engine.host)
    except SwitchRefused as refused:
        return refused.reason, refused.way_out
    except DynatrainError as error:
        return str(error), ""
    return None
