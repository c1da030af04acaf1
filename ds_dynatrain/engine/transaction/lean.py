"""A switch that holds no more than the larger side: through a checkpoint of this very step ("safety": "lean").

The working members save a checkpoint, as `engine.save` does, and read back that it is sound. One record then
says whether to go on: until it every failure leaves all as it was. After it the source is freed, before anything of the
target is taken; the members of the target restore from the checkpoint, in the new world, under the same proofs as
`engine.load`. If that fails, those of the source restore from it in the old world, whose groups are kept
until then. So what is held at once is at most max(source, target) and what reads and writes are staged in.
"""

from __future__ import annotations

from pathlib import Path

from ds_dynatrain.adapters.state import Buffers
from ds_dynatrain.adapters.support import refuse_at_boundary, refuse_changes
from ds_dynatrain.adapters.worlds import drop
from ds_dynatrain.checkpoint import Reader, Saved
from ds_dynatrain.engine.census import check_census
from ds_dynatrain.engine.checkpoints import restore
from ds_dynatrain.engine.checkpoints.saving import Saver
from ds_dynatrain.engine.core import EngineCore
from ds_dynatrain.engine.preparation import Preparation
from ds_dynatrain.engine.transaction.meeting import Meeting, Outcome
from ds_dynatrain.engine.transaction.session import Session
from ds_dynatrain.errors import CheckpointError, OutcomeUnknown


class LeanTransaction(Meeting):
    """One switch on one member; `run` is called once, by every member of either world, at a boundary."""

    def __init__(self, engine: EngineCore, preparation: Preparation, place: str, saver: Saver) -> None:
        super().__init__(engine, preparation, place)
        self._saver = saver
        self.key = self.proposal.key
        self.record = f"record/{self.proposal.generation}"
        self.session = Session(
            self.control,
            self.key,
            self.proposal.union,
            f"switch to {self.proposal.layout}",
            is_patient=True,
            stop=preparation.stop,
        )
        self.interrupt: BaseException | None = None

    def run(self) -> Outcome:
        """Take part in the switch; returns on every member with the same `committed`.

        CheckpointError, on all members alike, if neither side could be restored: the engine then holds nothing, and the
        checkpoint that it names has the state. OutcomeUnknown where it cannot be read whether others have let go.
        """
        path = self._save()
        if path is None:
            self.preparation.abandon()
        else:
            self._cross(path)
        if self.interrupt is not None:
            raise self.interrupt
        return self.outcome

    def _cross(self, path: str) -> None:
        """From the source to the target, or back; in between the checkpoint alone has the state."""
        with self.phase("free"):
            if self.old_world is not None:
                restore.let_go(self.engine)
        with self.phase("restore"):
            failed = self._restore(path)
        self.outcome.committed, self.outcome.reason = not failed, failed
        self.outcome.is_rebuilt = True
        with self.phase("roll back" if failed else "commit"):
            self._roll_back(path) if failed else self._commit()

    # ---- until the source is freed -----------------------------------------------------------------------------------

    def _save(self) -> str | None:
        """Where the checkpoint is, or None if training goes on as it is."""
        try:
            decision = self.session.vote(self._save_soundly)
        except OutcomeUnknown:
            self.preparation.abandon()
            raise
        self.interrupt, self.outcome.reason = decision.interrupt, decision.reason
        if decision.commit:
            return self._path()
        if self.session.is_first:  # for members that have no part in it
            self.control.decide(self.record, {"commit": False, "reason": decision.reason})
        return None

    def _save_soundly(self) -> None:
        with self.phase("meet"):
            self.meet(self.session)
        with self.phase("save"):
            path = self._written()
        with self.phase("verify"):
            self._read_back(path)
            self.connect(self.session)

    def _written(self) -> str:
        """Save; the folder, known to all members of either world."""
        engine, first, settings = self.engine, self.proposal.source_members[0], self.engine.settings.fallback
        if self.old_world is not None and settings is not None:
            refuse_at_boundary(engine.host)
            refuse_changes(engine.host)
            engine.host.settle_parameters()
            held, _ = engine.host.state_buffers()
            check_census(engine.host, engine.vps, self.source_rank or 0, held, "before the switch")
            self.warn_of_last_gradients()
            self.outcome.peak_memory = _bytes(held)
            path = self._saver.save(settings.path, None, f"{self.key}/save", "", settings.keep)
            if self.control.member == first:
                self.session.say("path", str(path))
        return self._path()

    def _path(self) -> str:
        return str(self.session.said_by(self.proposal.source_members[0], "path", "saving a checkpoint"))

    def _read_back(self, path: str) -> None:
        """By those that hold the state, each a part of it, before any lets go; CheckpointError if it differs."""
        members, mine = self.proposal.source_members, self.control.member
        damaged: list[str] = []
        if self.old_world is not None:
            saved = Saved.open(Path(path))
            rows = [row for row in saved.manifest if row.file][members.index(mine) :: len(members)]
            with Reader(saved.path, saved.manifest, self.engine.settings.memory_budget_bytes) as reader:
                damaged = [str(row) for row in rows if not reader.is_sound(row)]
        if damaged:
            raise CheckpointError(
                f"{path}: {damaged[0]}: not what was written ({len(damaged)} such places); check the disk, or set "
                'dynatrain.safety to "rollback"'
            )

    # ---- from there on: the checkpoint has the state -----------------------------------------------------------------

    def _restore(self, path: str) -> str:
        """In the new world; why not, the same on all members, or nothing."""
        engine, proposal, world = self.engine, self.proposal, self.preparation.world
        first, over = proposal.members[0], {"failed": "", "digest": "", "kinds": []}
        if self.target_rank is not None and world is not None:
            self.preparation.world = None  # it is the engine's now, or goes below
            sides = proposal.layout, proposal.members, world
            try:
                found = restore.take_back(engine, *sides, path, self.record, lambda: engine.enter(proposal, world))
            except OutcomeUnknown:  # others may be over there
                raise
            except BaseException as error:
                self.interrupt = self.interrupt or (None if isinstance(error, Exception) else error)
                over["failed"] = str(error) or type(error).__name__
                self.control.track_teardown(drop(world, is_broken=True))
            else:
                over |= {"digest": found.digest, "kinds": list(found.kinds)}
                self.outcome.peak_memory = max(self.outcome.peak_memory, _bytes(engine.host.state_buffers()[0]))
                self.control.track_teardown(world.retire_transfer())
            if self.control.member == first:
                self.session.say("over", over)
        over = self.session.said_by(first, "over", "restoring the state")
        self.outcome.digest, self.outcome.kinds = str(over["digest"]), tuple(over["kinds"])
        return str(over["failed"])

    def _roll_back(self, path: str) -> None:
        """Those that had the state take it back, in the world that they had it in."""
        engine, world, proposal = self.engine, self.old_world, self.proposal
        if world is None:
            engine.launch.install()
        else:
            layout, members, old = proposal.source_layout, proposal.source_members, world

            def enter() -> None:
                engine.world, engine.layout, engine.members = old, layout, members

            restore.take_back(engine, layout, members, old, path, f"{self.key}/back", enter)
        self.preparation.abandon()

    def _commit(self) -> None:
        engine = self.engine
        if self.target_rank is None:
            engine.enter(self.proposal, None)
            engine.launch.install()
            if self.preparation.world is not None:
                self.control.track_teardown(drop(self.preparation.world))
        if self.old_world is not None:
            self.control.track_teardown(drop(self.old_world))
        self.acknowledge(self.session)


def _bytes(held: Buffers) -> int:
    return sum(part.numel() * part.element_size() for part in held.values())
