"""Agreement before a checkpoint is saved or loaded: all working members make the same request, and nothing prevents
it."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from ds_dynatrain.adapters.deepspeed.support_checks import refuse_at_boundary
from ds_dynatrain.adapters.zero.regroup import refuse_changes
from ds_dynatrain.checkpoint import folder
from ds_dynatrain.errors import CheckpointError, DynatrainError, SwitchRefused
from ds_dynatrain.membership.session import MemberRequest, Session, ask_for_different_things
from ds_dynatrain.reshard.core import EngineCore


def ask(session: Session, engine: EngineCore, path: Path, tag: str | None, in_the_way: str) -> None:
    """Agree with all members on a save or a load of a checkpoint, which `session.what` names.

    in_the_way: a known reason to refuse, or "".

    Raises CheckpointError on all members if one of them refuses, makes a different request, or makes none.
    """
    refusal = (in_the_way, "") if in_the_way else None
    try:
        if refusal is None:
            if tag is not None:
                folder.check_tag(tag)
            refuse_at_boundary(engine.host)
            refuse_changes(engine.host)
    except SwitchRefused as refused:
        refusal = refused.reason, refused.way_out
    except DynatrainError as error:
        refusal = str(error), ""
    asked = {"folder": str(path), "tag": tag, "step": engine.global_steps}
    session.agree(MemberRequest(asked, refusal), None, partial(_refused, session.what), ask_for_different_things)


def _refused(what: str, reason: str, way_out: str) -> CheckpointError:
    return CheckpointError(f"{what}: {reason}; {way_out}" if way_out else f"{what}: {reason}")
