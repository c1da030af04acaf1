"""What befalls a member in the middle of a switch or of a step, put there from outside by `$FAULT`.

"ROLE PHASE ACT", or "ROLE PHASE ACT ENGINE": a member with a role does something in a phase of the switch in which a
third one comes, of the first engine or of the one with that number. "ROLE window CALL ACT": at the begin of that call
of the engine, or of the transaction, in the window of a late switch; whatever its role, if that is "any". "step FILE
ACT": whoever is told so does it inside of an optimizer step, that one whose number stands in `$OUT/FILE`. "any restore
ACT": when it comes to a checkpoint from which all state is restored. "INSTANT FILE ACT": at one of INSTANTS of that
step; "INSTANT of the other FILE ACT": where it is one of the second engine of the process, in that step of the first.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero import stage3, stage_1_and_2

from ds_dynatrain.adapters.deepspeed.pipeline_host import PipelineHostEngine
from ds_dynatrain.adapters.groups.managed_process_group import MESSAGES, ManagedWork
from ds_dynatrain.buddies.extension import Buddies
from ds_dynatrain.buddies.shipping import Round
from ds_dynatrain.engine import driver, initialize
from ds_dynatrain.engine.checkpoints import restore, saving
from ds_dynatrain.engine.copies.from_copies import FromCopies
from ds_dynatrain.engine.dynatrain_engine import DynatrainEngine
from ds_dynatrain.engine.elastic import Elastic
from ds_dynatrain.engine.parts import parts_of
from ds_dynatrain.engine.restoring import StateRecovery
from ds_dynatrain.exact.adapters import exact_sums as sums
from ds_dynatrain.exact.adapters.exact_sums import LeafSums
from ds_dynatrain.membership.proposal import Proposal
from ds_dynatrain.reshard.preparation import Preparation
from ds_dynatrain.reshard.process import PROCESS
from ds_dynatrain.reshard.switch import Transaction
from tests.engine.models import Sequences

PLACES: dict[str, tuple[type, str]] = {
    "prepare": (Preparation, "_build"),
    "meet": (Transaction, "_meet"),
    "drain": (Transaction, "_drain"),
    "connect": (Transaction, "connect"),
    "rebuild": (Transaction, "_rebuild"),
    "move": (Transaction, "_move"),
    "verify": (Transaction, "_verify"),
    "commit": (Transaction, "_commit"),
}
"""At the begin of which method a phase begins; that of the commit: after the record was written."""
LINGER_SECONDS = 6.0
PAUSE_SECONDS = float(os.environ.get("PAUSE_SECONDS", "8"))
ROLES = ("first", "other", "joiner", "leaver")
"""Rank 0 of those that hold the state, another one of them, one that comes, one of them that goes."""


def kill() -> None:
    """The node loses power: its agent and its workers are gone."""
    os.kill(os.getppid(), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def together() -> None:
    """The node loses power at once with others: all processes whose numbers stand in `$OUT/together` are gone."""
    for process in Path(os.environ["OUT"], "together").read_text().split():
        if int(process) != os.getpid():
            with suppress(ProcessLookupError):
                os.kill(int(process), signal.SIGKILL)
    kill()


def term() -> None:
    """The node is told to go."""
    os.kill(os.getppid(), signal.SIGTERM)


def end() -> None:
    """All nodes are told to go, as when a whole zone is taken: the agents whose numbers stand in `$OUT/agents`."""
    folder = Path(os.environ["OUT"])
    (folder / "ended").touch()
    for agent in (folder / "agents").read_text().split():
        with suppress(ProcessLookupError):
            os.kill(int(agent), signal.SIGTERM)


def linger() -> None:
    """The same, in a call that comes back much later: a compiler, a slow disk."""
    end()
    time.sleep(LINGER_SECONDS)


def leave() -> None:
    """The script ends by itself, with a code that is not 0."""
    sys.exit(1)


def finish() -> None:
    """The script ends by itself, and all is well: it has trained enough."""
    sys.exit(0)


def complain() -> None:
    """It ends with a text on the standard error, and so with code 1."""
    raise SystemExit("told to end")


def vanish() -> None:
    """The process ends without a word, and says that all is well."""
    os._exit(0)


def fail() -> None:
    """Something of this switch fails here, and nothing else."""
    raise RuntimeError("told to fail")


def unable() -> None:
    """It fails here every time: this member's own limits do not allow it."""
    raise OSError(errno.EMFILE, "told to have no descriptors left")


def flip() -> None:
    """One bit of each copy of the newest moment that this process has, of the engine that was made last."""
    kept = parts_of(PROCESS.engines[-1]).kept
    copies = [] if kept is None else kept.copies()
    for copy in copies:
        if copy.mark == copies[0].mark:
            next(iter(copy.buffers.values())).view(torch.uint8)[0] ^= 1


def deaf() -> None:
    """Messages between two members do not hear that a connection has ended, as gloo may not: they wait on."""
    own = ManagedWork.wait

    def wait(self: ManagedWork, *most: timedelta) -> Any:
        try:
            return own(self, *most)
        except RuntimeError:
            if most and self._name in MESSAGES:
                time.sleep(most[0].total_seconds())
            raise

    setattr(ManagedWork, "wait", wait)  # noqa: B010 - mypy takes no assignment to a method


def pause() -> None:
    """It stands still for a while, and lives."""
    time.sleep(PAUSE_SECONDS)


ACTS: dict[str, Callable[[], None]] = {
    "complain": complain,
    "deaf": deaf,
    "end": end,
    "fail": fail,
    "finish": finish,
    "flip": flip,
    "kill": kill,
    "leave": leave,
    "linger": linger,
    "pause": pause,
    "term": term,
    "together": together,
    "unable": unable,
    "vanish": vanish,
}

INSTANTS: dict[str, tuple[Any, str, bool]] = {
    "forward": (torch.nn.functional, "cross_entropy", False),
    "backward": (torch.Tensor, "backward", True),
    "update": (torch.optim.AdamW, "step", True),
    "boundary": (Buddies, "at_boundary", False),
    "norm": (stage_1_and_2.DeepSpeedZeroOptimizer, "scaled_global_norm", True),
    "norm of stage 3": (stage3.DeepSpeedZeroOptimizer_Stage3, "_get_norm_groups", True),
    "gather": (stage_1_and_2, "all_gather_dp_groups", False),
    "ship": (Round, "_header", False),
    "arrival": (Round, "_take_in", False),
    "layer": (torch.nn.functional, "layer_norm", True),
    "backward of a stage": (torch.autograd, "backward", True),
    "reduction": (DeepSpeedEngine, "allreduce_gradients", False),
    "loss": (PipelineHostEngine, "_share_loss", False),
    "slice": (LeafSums, "_send_next", True),
    "sum": (LeafSums, "_close", False),
    "norm of leaves": (sums, "global_norm", True),
    "answer": (FromCopies, "give", False),
    "proof": (FromCopies, "report", False),
    "forming": (StateRecovery, "_world_of", False),
    "survived": (driver, "_copies", False),
    "starting": (initialize, "build_world", False),
    "broadcast": (DeepSpeedEngine, "_broadcast_model", False),
    "loader": (Sequences, "__getitem__", False),
    "save": (saving._Saving, "_write", False),
    "prepare": (Preparation, "_build", False),
    "move": (Transaction, "_move", False),
    "commit": (Transaction, "_commit", False),
    "after the step": (DynatrainEngine, "step", True),
}
"""In which function: before it does anything, or once it is through. After the update own masters have changed, and
nobody has the others' weights; while a copy is shipped it is on its way, and at the arrival all of it has come (an idle
member knows of no later step than that at which it became so); the answer is to give copies to others, in a
world that was formed before, and the proof is of what they came to; who has survived says which ones it has. The first
world is built where no step is known yet: -1 is its step. In an exact job slices of the first leaves were sent and
added up, or all of them were, and nobody has the sum."""
OF_THE_OTHER = " of the other"


def install(fault: str) -> None:
    """Let it happen once in this process."""
    instant, *told = fault.rsplit(maxsplit=2)
    engine = 1 if instant.endswith(OF_THE_OTHER) else 0
    instant = instant.removesuffix(OF_THE_OTHER)
    if instant in INSTANTS:
        _at_instant(*INSTANTS[instant], Path(os.environ["OUT"], told[0]), ACTS[told[1]], engine)
        return
    who, where, act, *more = fault.split()
    if where == "window":
        _in_window(who, act, ACTS[more[0]])
    elif where == "restore":
        _in_restoring(ACTS[act])
    elif who == "step":
        _in_step(Path(os.environ["OUT"], where), act)
    else:
        _in_switch(who, where, ACTS[act], int(more[0]) if more else 1)


def role(proposal: Proposal, member: int) -> str:
    """One of ROLES."""
    if member not in proposal.source_members:
        return "joiner"
    if member not in proposal.members:
        return "leaver"
    return "other" if proposal.source_members.index(member) else "first"


def _grows(proposal: Proposal) -> bool:
    """Whether somebody comes to several that train, and nothing else happens."""
    before = len(proposal.source_members)
    return not proposal.forms_anew and 1 < before < len(proposal.members)


def _in_switch(who: str, phase: str, act: Callable[[], None], engine: int) -> None:
    owner, method = PLACES[phase]
    own, left = getattr(owner, method), [act]

    def wrapped(self: Any, *arguments: Any) -> Any:
        number = self.number if owner is Preparation else self.engine.job.number
        is_it = number == engine and _grows(self.proposal) and role(self.proposal, self.control.member) == who
        if is_it and act is unable:
            unable()
        if left and is_it:
            left.pop()()
        return own(self, *arguments)

    setattr(owner, method, wrapped)


def _in_window(who: str, call: str, act: Callable[[], None]) -> None:
    """Where three or more have a part in the switch. A leaver makes no call: it serves, from the first vote on."""
    owner: Any = Transaction if hasattr(Transaction, call) else DynatrainEngine
    own, left = getattr(owner, call), [act]

    def wrapped(self: Any, *arguments: Any, **named: Any) -> Any:
        parts = PROCESS.engines[0]
        proposal = None if parts.preparation is None else parts.preparation.proposal
        is_it = proposal is not None and (parts.awaits_late or owner is Transaction) and len(proposal.union) > 2
        if left and is_it and proposal is not None and who in ("any", role(proposal, parts.control.member)):
            left.pop()()
        return own(self, *arguments, **named)

    setattr(owner, call, wrapped)


def _place_of(of: Any) -> int:
    """Of the engine that a round is of, in a thread; of others that whose turn it is."""
    engines = PROCESS.engines
    if isinstance(of, Round):
        return next(place for place, one in enumerate(engines) if parts_of(one).kept is of._kept)
    return next((place for place, one in enumerate(engines) if one is PROCESS._now), 0)


def _at_instant(owner: Any, name: str, is_after: bool, told: Path, act: Callable[[], None], engine: int) -> None:
    own, left = getattr(owner, name), [act]

    def wrapped(*arguments: Any, **named: Any) -> Any:
        steps = max((one.global_steps for one in PROCESS.engines), default=-1)
        is_it = left and told.exists() and steps >= int(told.read_text())
        is_it = is_it and _place_of(arguments[0] if arguments else None) == engine
        if is_it and not is_after:
            left.pop()()
        found = own(*arguments, **named)
        if is_it and is_after:
            left.pop()()
        return found

    setattr(owner, name, wrapped)


def _in_restoring(act: Callable[[], None]) -> None:
    own = restore.restore

    def wrapped(*arguments: Any) -> Any:
        act()
        return own(*arguments)

    restore.restore = wrapped


def _in_step(told: Path, act: str) -> None:
    """kill: after the step has begun. behind, inside: a collective of the step fails, before anything was changed or
    when something may have been."""
    own, left = DynatrainEngine._take_model_step, [told]

    def wrapped(self: DynatrainEngine, *arguments: Any) -> Any:
        if not left or not told.exists() or self.global_steps != int(told.read_text()):
            return own(self, *arguments)
        left.pop()
        if act == "kill":
            self._parts.is_stepping = True
            kill()
        membership = PROCESS.membership
        while isinstance(membership, Elastic) and not membership.is_aborted:
            time.sleep(0.01)
        self._parts.is_stepping = act == "inside"
        raise RuntimeError("gloo: what stands here is what a collective says whose peer has died")

    setattr(DynatrainEngine, "_take_model_step", wrapped)  # noqa: B010 - mypy takes no assignment to a method
