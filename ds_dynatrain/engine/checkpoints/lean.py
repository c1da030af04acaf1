"""A switch that holds no more than the larger side: through a checkpoint of this very step ("safety": "lean").

The working members save a checkpoint, as `engine.save` does, and read it back to check it. One record then says whether
to go on: until it is written every failure leaves all as it was. After it the source is freed, before anything of the
target is allocated; the members of the target restore from the checkpoint, in the new world, under the same proofs as
`engine.load`. If that fails, those of the source restore from it in the old world, whose groups are kept until then. So
the memory held at once is at most max(source, target), and the staging of reads and writes.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from ds_dynatrain.adapters.communicators import Connections
from ds_dynatrain.adapters.state import Buffers
from ds_dynatrain.adapters.worlds import drop
from ds_dynatrain.checkpoint import Reader, Saved
from ds_dynatrain.engine.checkpoints.restore import restored
from ds_dynatrain.engine.checkpoints.saving import Saver
from ds_dynatrain.errors import CheckpointError, OutcomeUnknown
from ds_dynatrain.membership.session import Decision, Session
from ds_dynatrain.reshard.core import EngineCore
from ds_dynatrain.reshard.meeting import Outcome, connect, drain, meet
from ds_dynatrain.reshard.preparation import Preparation
from ds_dynatrain.reshard.restoration import Goal, let_go


class LeanTransaction:
    """One switch on one member: every member of either world calls `vote` at a boundary, and then `conclude`."""

    def __init__(self, engine: EngineCore, preparation: Preparation, place: str, saver: Saver) -> None:
        self.begin, self.was = time.perf_counter(), (engine.layout, engine.members)
        self.engine, self.preparation, self.place, self._saver = engine, preparation, place, saver
        self.proposal, self.control = preparation.proposal, preparation.board
        self.old_world, self.outcome = engine.world, Outcome()
        self.key, what = self.proposal.key, f"switch to {self.proposal.layout}"
        members, stop = self.proposal.union, preparation.stop
        self.session = Session(self.control, self.key, members, what, is_patient=True, stop=stop)
        self.interrupt: BaseException | None = None

    def vote(self) -> Decision:
        """Save a checkpoint, and return the decision of all members whether to go on from it.

        Raise OutcomeUnknown if it cannot be read whether others have let go.
        """
        try:
            decision = self.session.vote(self._save_soundly)
        except OutcomeUnknown:
            self.preparation.abandon()
            raise
        self.interrupt = decision.interrupt
        if self.session.is_first and not decision.commit:  # for members that have no part in it
            record = {"commit": False, "reason": decision.reason}
            self.control.decide(f"record/{self.proposal.generation}", record)
        return decision

    def conclude(self, decision: Decision) -> None:
        """Do what was decided, with the same outcome on every member.

        Raise CheckpointError, on all members alike, if neither side could be restored: the engine then holds nothing,
        and the checkpoint that the error names has the state.
        """
        self.outcome.reason = decision.reason
        if decision.commit:
            self._cross(self._path())
        else:
            self.preparation.abandon()

    def _cross(self, path: str) -> None:
        """Go from the source to the target, or back; in between only the checkpoint has the state."""
        outcome = self.outcome
        with outcome.phase("free"):
            if self.old_world is not None:
                let_go(self.engine)
        with outcome.phase("restore"):
            failed = self._restore(path)
        outcome.committed, outcome.reason, outcome.is_rebuilt = not failed, failed, True
        with outcome.phase("roll back" if failed else "commit"):
            self._roll_back(path) if failed else self._commit()

    # ---- until the source is freed -----------------------------------------------------------------------------------

    def _save_soundly(self) -> None:
        with self.outcome.phase("meet"):
            meet(self.session, self.engine, self.preparation, self.place)
        with self.outcome.phase("save"):
            path = self._written()
        with self.outcome.phase("verify"):
            self._read_back(path)
            connect(self.preparation, self.old_world, self.session)
            self.outcome.connections = self.preparation.connections or Connections()

    def _written(self) -> str:
        """Save; return the folder, which all members of either world learn."""
        engine, settings = self.engine, self.engine.settings.fallback
        if self.old_world is not None and settings is not None:
            held = drain(engine, self.proposal, self.preparation.source_rank or 0, self.outcome).buffers
            self.outcome.peak_memory = _bytes(held)
            path = self._saver.save(settings.path, None, f"{self.key}/save", "", settings.keep)
            if self.preparation.source_rank == 0:
                self.session.say("path", str(path))
        return self._path()

    def _path(self) -> str:
        return str(self.session.said_by(self.proposal.source_members[0], "path", "saving a checkpoint"))

    def _read_back(self, path: str) -> None:
        """Check the checkpoint, each member that holds the state a part of it; CheckpointError if it differs.

        Called before any member lets go of its state.
        """
        rank, size = self.preparation.source_rank, len(self.proposal.source_members)
        damaged: list[str] = []
        if self.old_world is not None:
            saved = Saved.open(Path(path))
            rows = [row for row in saved.manifest if row.file][rank or 0 :: size]
            with Reader(saved.path, saved.manifest, self.engine.settings.memory_budget_bytes) as reader:
                damaged = [str(row) for row in rows if not reader.is_sound(row)]
        if damaged:
            raise CheckpointError(
                f"{path}: {damaged[0]}: not what was written ({len(damaged)} such places); check the disk, or set "
                'dynatrain.safety to "rollback"'
            )

    # ---- from there on: the checkpoint has the state -----------------------------------------------------------------

    def _restore(self, path: str) -> str:
        """Restore in the new world; return why it failed, the same on all members, or an empty text."""
        engine, proposal, world = self.engine, self.proposal, self.preparation.world
        over: dict[str, Any] = {"failed": "", "digest": "", "kinds": []}
        if self.preparation.target_rank is not None and world is not None:
            self.preparation.world = None  # it is the engine's now, or dropped below
            record = f"record/{proposal.generation}"
            try:
                goal = Goal(proposal.layout, proposal.members, world, f"{record}/restore", record, begins_anew=False)
                found = restored(engine, goal, Path(path))
            except OutcomeUnknown:  # others may have restored
                raise
            except BaseException as error:
                self.interrupt = self.interrupt or (None if isinstance(error, Exception) else error)
                over["failed"] = str(error) or type(error).__name__
                self.control.track_teardown(drop(world, is_broken=True))
            else:
                over |= {"digest": found.digest, "kinds": list(found.kinds)}
                self.outcome.peak_memory = max(self.outcome.peak_memory, _bytes(engine.host.state_buffers()[0]))
                self.control.track_teardown(world.retire_transfer())
            if self.preparation.target_rank == 0:
                self.session.say("over", over)
        over = self.session.said_by(proposal.members[0], "over", "restoring the state")
        self.outcome.digest, self.outcome.kinds = str(over["digest"]), tuple(over["kinds"])
        return str(over["failed"])

    def _roll_back(self, path: str) -> None:
        """Restore the members that had the state, in the world that they had it in."""
        engine, proposal, record = self.engine, self.proposal, f"{self.key}/back"
        if self.old_world is None:
            engine.launch.install()
        else:
            side = proposal.source_layout, proposal.source_members, self.old_world
            restored(engine, Goal(*side, f"{record}/restore", record, begins_anew=False), Path(path))
        self.preparation.abandon()

    def _commit(self) -> None:
        engine = self.engine
        if self.preparation.target_rank is None:
            engine.enter(self.proposal, None)
            engine.launch.install()
            if self.preparation.world is not None:
                self.control.track_teardown(drop(self.preparation.world))
        if self.old_world is not None:
            self.control.track_teardown(drop(self.old_world))
        self.outcome.acknowledge(self.session)


def _bytes(held: Buffers) -> int:
    return sum(part.numel() * part.element_size() for part in held.values())
