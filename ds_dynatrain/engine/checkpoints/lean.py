"""A switch through a checkpoint, for jobs whose memory cannot hold the old and the new state at once ("safety":
"lean").

There are two votes. Before the first vote the working members save a checkpoint, the way `engine.save` does, and read
it back to check it. Until all agree, any failure leaves everything unchanged. After the first vote the old state is
freed before memory for the new one is allocated. Before the second vote the members of the new world restore the state
from the checkpoint, by the same `Restoration` and with the same proofs as `engine.load`. The second vote decides
whether the switch is committed. If it is not, the swap is undone: the members of the old world restore the state from
the checkpoint in that world, whose groups are kept until this point. The memory held at once is therefore at most
max(source, target) plus the staging memory for reads and writes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from ds_dynatrain.adapters.groups.world import World
from ds_dynatrain.adapters.groups.worlds import drop
from ds_dynatrain.adapters.zero.state import Buffers
from ds_dynatrain.checkpoint.reading import Reader
from ds_dynatrain.checkpoint.record import Saved
from ds_dynatrain.engine.checkpoints.restore import restored
from ds_dynatrain.engine.checkpoints.saving import Saver
from ds_dynatrain.errors import CheckpointError, OutcomeUnknown
from ds_dynatrain.extension import backups_of
from ds_dynatrain.membership.session import VoteResult
from ds_dynatrain.reshard.core import EngineCore, OldState
from ds_dynatrain.reshard.preparation import Preparation
from ds_dynatrain.reshard.restoration import Goal, let_go
from ds_dynatrain.reshard.switch import Transaction, connect, drain, meet
from ds_dynatrain.space import Layout


class LeanTransaction(Transaction):
    """One switch through a checkpoint on one member. Every member of the old or new world calls `vote` between two
    steps, and then `conclude`."""

    def __init__(self, engine: EngineCore, preparation: Preparation, place: str, saver: Saver) -> None:
        super().__init__(engine, preparation, place)
        self._saver, self.key = saver, self.proposal.key
        self.session = self._session(self.key, is_patient=True)

    def vote(self, work: Callable[[], dict[str, Any]] | None = None) -> VoteResult:
        """Save a checkpoint and vote; return the decision of all members on whether to continue from the checkpoint.

        Raises OutcomeUnknown if this member cannot read whether the others have freed their state.
        """
        try:
            saved = self.session.vote(work or self._save, _joined, _committed)
        except OutcomeUnknown:
            self.preparation.abandon()
            raise
        self.interrupt = saved.interrupt
        if self.session.is_first and not saved.commit:  # for members without a part in the switch
            self.control.decide(self.proposal.record_key, {"commit": False, "reason": saved.reason})
        return saved

    def conclude(self, decision: VoteResult) -> None:
        """Carry out the decision, which is the same on every member: continue from the checkpoint, or stay in the old
        world.

        Raises CheckpointError on all members if the state could be restored neither in the new world nor in the old
        one. In this case the engine holds no state; the error names the checkpoint that has it. Raises OutcomeUnknown
        if this member cannot read whether the others have restored the state.
        """
        outcome = self.outcome
        if not decision.commit:
            outcome.reason = decision.reason
            self.preparation.abandon()
            return
        path = Path(decision.said["path"])
        with outcome.phase("free"):
            self._free(path)
        with outcome.phase("restore"):
            session = self._session(f"{self.key}/restored", self.proposal.record_key, is_patient=True)
            again = session.vote(partial(self._restore, path), _joined, _committed)
        self.interrupt = self.interrupt or again.interrupt
        outcome.committed, outcome.reason, outcome.is_rebuilt = again.commit, again.reason, True
        with outcome.phase("commit" if again.commit else "roll back"):
            if again.commit:
                outcome.digest, outcome.kinds = again.said["digest"], tuple(again.said["kinds"])
                self._commit()
            else:
                self.swap.undo()
                self.preparation.abandon()

    def _save(self) -> dict[str, Any]:
        """Save a checkpoint and check it. Returns its path as a report, or {} on members without state in the old
        layout."""
        engine, rank, found = self.engine, self.source_rank, dict[str, Any]()
        backups = backups_of(engine.job.extensions)
        with self.outcome.phase("meet"):
            meet(self.session, engine, self.preparation, self.place)
        with self.outcome.phase("save"):
            if rank is not None and backups is not None:
                self.outcome.peak_memory = _bytes(drain(engine, self.proposal, rank, self.outcome).buffers)
                found["path"] = str(self._saver.save(backups.path, None, f"{self.key}/save", "", backups.keep).wait())
        with self.outcome.phase("verify"):
            if rank is not None and found:
                self._read_back(found["path"], rank)
            connect(self.preparation, self.old_world, self.session)
            self.outcome.connections = self.preparation.connections or self.outcome.connections
        return found

    def _read_back(self, path: str, rank: int) -> None:
        """Read this member's share of the checkpoint back and check it, before any member frees its state.

        Raises CheckpointError if the share differs from what was written.
        """
        saved = Saved.open(Path(path))
        rows = [row for row in saved.manifest if row.file][rank :: len(self.proposal.source_members)]
        with Reader(saved.path, saved.manifest, self.engine.settings.memory_budget_bytes) as reader:
            damaged = [str(row) for row in rows if not reader.is_sound(row)]
        if damaged:
            raise CheckpointError(
                f"{path}: {damaged[0]}: not what was written ({len(damaged)} such places); check the disk, or set "
                'dynatrain.safety to "rollback"'
            )

    def _free(self, path: Path) -> None:
        """Free the old state. From now on only the checkpoint has the state."""
        proposal, world = self.proposal, self.old_world
        if world is None:
            self.swap.on_undo(self.engine.launch.install)
        else:
            source = proposal.source_layout, proposal.source_members, world
            self.swap.on_undo(restored, self.engine, self._goal("back", *source), path)
            let_go(self.engine)

    def _restore(self, path: Path) -> dict[str, Any]:
        """Restore the state in the new world. Returns its digest and state kinds as a report, or {} on members without
        a rank in the new layout."""
        engine, proposal, world = self.engine, self.proposal, self.preparation.world
        if self.target_rank is None or world is None:
            return {}
        self.swap.on_undo(let_go, engine)
        found = restored(engine, self._goal("restore", proposal.layout, proposal.members, world), path)
        self.outcome.peak_memory = max(self.outcome.peak_memory, _bytes(engine.host.state_buffers()[0]))
        return {"digest": found.digest, "kinds": list(found.kinds)}

    def _goal(self, step: str, layout: Layout, members: tuple[int, ...], world: World) -> Goal:
        """Return the layout, world and keys for a restoration that is one step of this switch.

        step: a name for the step.
        """
        key = f"{self.key}/{step}"
        return Goal(layout, members, world, key, f"{key}/record", begins_anew=False)

    def _commit(self) -> None:
        """Complete the switch. The old world is released once all members have read the decision."""
        engine, world = self.engine, self.preparation.world
        self.swap.keep()
        works = self.target_rank is not None
        if not works:
            engine.enter(self.proposal, None)
            engine.launch.install()
        if world is not None:
            self.control.teardowns.add(world.retire_transfer() if works else drop(world))
        engine.old_state = OldState(self.session, {}, self.old_world, self.preparation.ways)
        if self.outcome.acknowledge(self.session):
            engine.release_old_state()


def _joined(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Combine the reports of two members: return one that is not empty. All non-empty reports are equal."""
    return one or other


def _committed(report: dict[str, Any]) -> VoteResult:
    """Return the decision to commit. Called only if no member has failed."""
    return VoteResult(True, said=report)


def _bytes(held: Buffers) -> int:
    return sum(part.nbytes for part in held.values())
