"""Implementation of `engine.save`: all working members write one checkpoint together. If one of them fails, no
checkpoint remains.

Rank 0 creates a hidden folder and announces it. Each member writes its share and reports. Rank 0 writes the manifest
and the record, renames the folder, and announces its final name. The state in the engine is not changed, so training
can continue even if the save fails. During a background save, training waits only for a copy into host memory, and a
thread does the writing.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from operator import or_
from pathlib import Path
from typing import Any

from ds_dynatrain.adapters.deepspeed.support_checks import refuse_at_boundary
from ds_dynatrain.adapters.groups.device import start_thread
from ds_dynatrain.adapters.zero.regroup import refuse_changes
from ds_dynatrain.adapters.zero.state import Buffers
from ds_dynatrain.checkpoint import folder, record
from ds_dynatrain.checkpoint.files import dumped
from ds_dynatrain.checkpoint.manifest import Manifest
from ds_dynatrain.checkpoint.record import TrainingRecord
from ds_dynatrain.checkpoint.writing import HostMemory, Share, shares_of, write_shares
from ds_dynatrain.elastic.main_thread import OWN_WAITS
from ds_dynatrain.engine.checkpoints.extra_state import packed
from ds_dynatrain.errors import CertificateError, CheckpointError, DynatrainError, SwitchRefused
from ds_dynatrain.membership.control import Control
from ds_dynatrain.membership.session import Session, ask_for_different_things
from ds_dynatrain.report import logger
from ds_dynatrain.reshard import streams
from ds_dynatrain.reshard.carry import rest_carry, shared_carry
from ds_dynatrain.reshard.certificate import SideDigests, differing, side_digests
from ds_dynatrain.reshard.core import EngineCore
from ds_dynatrain.reshard.encoding import encode, fingerprint
from ds_dynatrain.reshard.registration import registration_of
from ds_dynatrain.reshard.swap import check_census
from ds_dynatrain.space import Layout, VirtualParameterSpace

SAVING = "saving"
"""What a member's status says that the member is doing during a save."""


def ask(session: Session, engine: EngineCore, path: Path, tag: str | None, in_the_way: str) -> None:
    """Agree with all members to save or load a checkpoint (`session.what` says which).

    in_the_way: the reason why this member cannot take part now; "" if it can.

    Raises CheckpointError on all members if one of them refuses, makes a different request, or makes none.
    """

    def refused(reason: str, way_out: str) -> CheckpointError:
        return CheckpointError(f"{session.what}: {reason}; {way_out}" if way_out else f"{session.what}: {reason}")

    refusal = (in_the_way, "") if in_the_way else None
    try:
        if refusal is None:
            if tag is not None:
                folder.check_tag(tag)
            refuse_at_boundary(engine.host)
            refuse_changes(engine.host)
    except DynatrainError as error:
        refusal = (error.reason, error.way_out) if isinstance(error, SwitchRefused) else (str(error), "")
    asked = {"folder": str(path), "tag": tag, "step": engine.global_steps}
    session.agree(asked, refused, ask_for_different_things, refusal)


class PendingSave:
    """A save of a checkpoint that runs in the background.

    step: the number of optimizer steps done when the state was copied.
    """

    def __init__(self, step: int) -> None:
        self.step = step
        self._saved: Future[Path] = Future()

    @property
    def done(self) -> bool:
        """Whether the save has ended, successfully or not. Polls without contacting other members."""
        return self._saved.done()

    def wait(self) -> Path:
        """Wait until the checkpoint is saved, and return its folder. Raises CheckpointError on all members if saving
        failed."""
        with OWN_WAITS.waiting(SAVING):
            return self._saved.result()

    def run(self, save: Callable[[], Path]) -> None:
        """Run a save, and keep its result for `wait`. Called in the saving thread.

        save: saves the checkpoint and returns its folder.
        """
        try:
            self._saved.set_result(save())
        except Exception as error:
            self._saved.set_exception(error)
        except BaseException:
            self._saved.set_exception(CheckpointError("the thread that saves was stopped"))
            raise


class Saver:
    """Saver of an engine's checkpoints. It runs one save at a time."""

    def __init__(self, engine: EngineCore) -> None:
        self.engine = engine
        self._memory = HostMemory()
        self._boards: tuple[Control, Control] | None = None
        self._running: tuple[PendingSave, threading.Thread] | None = None

    def save(
        self,
        path: str | os.PathLike[str],
        tag: str | None,
        key: str,
        is_open: str,
        keep: int | None,
        background: bool = False,
    ) -> PendingSave:
        """Save a checkpoint. Returns once it is on disk or, in the background, once the values are copied.

        key: a key that is unique in the job's key-value store.
        is_open: the reason why this member cannot save now; "" if it can.
        keep: how many of the newest checkpoints to keep; None to keep all of them.
        """
        self.settle()
        pending, board = PendingSave(self.engine.global_steps), self.engine.control
        if background:  # in the background, over a connection of its own
            if self._boards is None or self._boards[0] is not board:
                board.read("save/board")  # fails at once if the board is lost; a new connection would wait
                self._boards = board, board.clone()
            board = self._boards[1]
        saving = _Saving(self.engine, board, Path(path).absolute(), tag, key, keep)
        run = partial(pending.run, saving.carry_out)
        with OWN_WAITS.waiting(SAVING):
            saving.take(is_open, self._memory if background else None)
            if background:
                self._running = pending, start_thread(run, "dynatrain-save")
            else:
                run()
                pending.wait()
        return pending

    def settle(self, seconds: float | None = None) -> bool:
        """Wait for a background save, and log its result once. An error is only logged here; `PendingSave.wait` raises
        it.

        seconds: the longest time to wait; None for no limit, 0 to return at once.

        Returns whether no save is running any longer.
        """
        if self._running is None:
            return True
        pending, thread = self._running
        with OWN_WAITS.waiting(SAVING):
            thread.join(seconds)
        if thread.is_alive():
            return False
        self._running = None
        try:
            path = pending.wait()
        except Exception as error:
            if self.engine.rank <= 0:
                logger.error("no checkpoint of step %d: %s", pending.step, error)
        else:
            if self.engine.rank == 0:
                logger.info("saved a checkpoint of step %d: %s", pending.step, path)
        return True


class _Saving:
    """One save of a checkpoint on one working member. It reads the engine's state only during `take`, unless the values
    are not copied.

    shares: the values to write.
    own: the content of the member's own small file.
    replicas: computes the digests of elements that other members also hold; None if the values were copied, because the
        originals may change during the save.
    """

    def __init__(
        self, engine: EngineCore, control: Control, path: Path, tag: str | None, key: str, keep: int | None
    ) -> None:
        self.engine, self.control, self.path, self.tag, self.keep = engine, control, path, tag, keep
        self.members, self.rank = engine.members, engine.rank
        self.session = Session(control, key, self.members, "engine.save", is_patient=True)
        self.shares: list[Share] = []
        self.own = dict[str, Any]()
        self.replicas: Callable[[], SideDigests] | None = None
        self.sums: dict[str, str] | None = None
        self.error: BaseException | None = None

    # ---- while training stands still ---------------------------------------------------------------------------------

    def take(self, is_open: str, memory: HostMemory | None) -> None:
        """Agree with the other members to save, and collect the values that this member writes.

        is_open: the reason why this member cannot save now; "" if it can.
        memory: memory for a copy of the values; if None, the values must not change until they are written.

        Raises CheckpointError on all members if one of them refuses or makes a different request. A later failure is
        kept and reported by `carry_out`, where all members learn of it.
        """
        ask(self.session, self.engine, self.path, self.tag, is_open and f"{is_open}: save after engine.step()")
        try:
            self.engine.agree()
            self.record = self._taken()
            if memory is not None:
                self.shares, self.replicas = memory.copies(self.shares), None
        except BaseException as error:
            self.error = error
            self.session.give_up(error)

    def _taken(self) -> TrainingRecord:
        """Collect the values to write; return the training record, still without the checksums of the files.

        Raises CheckpointError if extra state that must be equal differs between members, CensusError if DeepSpeed's
        state is not where it is expected, ConfigError for an object that cannot be saved.
        """
        engine, rank = self.engine, self.rank
        engine.host.settle_parameters()
        buffers, scalars = engine.host.state_buffers()
        check_census(engine.host, engine.vps, rank, buffers, "before saving")
        shared, rest = shared_carry(engine, scalars), rest_carry(engine)
        held = {kind for kind, _ in buffers}
        mine = {"shared": fingerprint(shared), "rest": fingerprint(rest), "kinds": sorted(held)}
        rests, kinds = _compared(engine, self.session.all("carry", mine))
        self.shares = [*shares_of(engine.vps, engine.layout, rank, buffers, tuple(k for k in kinds if k in held))]
        self.own = {"streams": streams.capture(), "rest": None}
        if rests[rank] == rank:
            self.own["rest"], tensors = packed(rank, rest)
            self.shares += tensors
        self.replicas = partial(_copied, engine.vps, engine.layout, rank, buffers)
        return TrainingRecord(
            step=engine.global_steps,
            layout=engine.layout.to_dict(),
            generation=engine.generation,
            seed=engine.job.job_seed,
            kinds=kinds,
            tensors=[(each.name, list(each.shape), each.group, each.expert) for each in engine.vps.tensors],
            carry=encode({**shared, "registration": registration_of(engine).to_json()}, None),
            rests=rests,
            sums={},
            sizes={},
            written_by=record.WRITER,
        )

    # ---- while training continues ------------------------------------------------------------------------------------

    def carry_out(self) -> Path:
        """Write the checkpoint together with the other members, and return its folder. Raises CheckpointError on all
        members if one of them fails."""
        try:
            with ExitStack() as stack:
                hidden = self._written(stack)
                return Path(self.session.first("saved", lambda: str(self._finish(hidden)), "saving a checkpoint"))
        except CheckpointError as error:
            raise CheckpointError(f"engine.save: {error}; nothing was saved, and training can go on") from error
        finally:
            self.shares, self.replicas = [], None

    def _written(self, stack: ExitStack) -> Path:
        """Write this member's files into the hidden folder, and report their checksum. Returns the hidden folder.

        stack: releases the locks and files that this opens.
        """
        try:
            if self.error is not None:
                raise self.error
            hidden = Path(self.session.first("open", lambda: str(self._open(stack)), "saving a checkpoint"))
            if not hidden.is_dir():
                raise CheckpointError(
                    f"member {self.control.member} does not see {hidden}, which rank 0 has made; give a folder in a "
                    "file system that all members share"
                )
            self.sums = self.session.gather("sums", {str(self.control.member): self._write(hidden)}, or_)
        except BaseException as error:
            decision = self.session.give_up(error)
            decision.raise_interrupt()
            raise CheckpointError(decision.reason) from error
        return hidden

    def _open(self, stack: ExitStack) -> Path:
        """Create the hidden folder while holding the lock of the checkpoint folder. Called on rank 0."""
        stack.enter_context(folder.locked(self.path))
        if self.tag is None:
            self.tag = folder.free_tag(self.path, f"step{self.record.step}")
        return folder.begin(self.path, self.tag)

    def _write(self, hidden: Path) -> str:
        """Write this member's files, and meanwhile compare replicas between members. Return the checksum of the
        member's small file."""
        with ThreadPoolExecutor(1, "dynatrain-replicas") as beside:
            replicas = None if self.replicas is None else beside.submit(self.replicas)
            rows = write_shares(hidden, self.rank, self.shares)
        folder.write(hidden / _part(self.rank), Manifest.of(rows).to_bytes())
        data = dumped(self.own)
        folder.write(hidden / record.rank_file(self.rank), data)
        if replicas is not None:
            self._compare_replicas(replicas.result())
        return record.sum_of(data)

    def _finish(self, hidden: Path) -> Path:
        """Write the manifest and the record, and give the folder its final name. Called on rank 0 once all members have
        written their files."""
        found = self.sums or {}
        parts = [hidden / _part(rank) for rank in range(len(self.members))]
        rows = [row for part in parts for row in Manifest.from_bytes(part.read_bytes())]
        for part in parts:
            part.unlink()
        sums = {record.rank_file(rank): found[str(member)] for rank, member in enumerate(self.members)}
        folder.seal(hidden, self.record, rows, sums)
        return folder.finish(hidden, str(self.tag), self.keep)

    def _compare_replicas(self, own: SideDigests) -> None:
        """Raise CheckpointError if replicas of the state along the data axis are not equal. The error names tensors and
        members.

        Values that several stages or tensor ranks each compute for themselves may have drifted apart. As in a switch,
        the owner's values are then used, and a warning is logged.

        own: this member's digests.
        """
        engine = self.engine
        try:
            drifting = differing(self.session, "replicas", engine.vps, engine.layout, engine.rank, own, "source")
        except CertificateError as error:
            raise CheckpointError(
                f"copies of one state are not equal ({error}): it is unknown which one is right; load the last "
                "checkpoint"
            ) from None
        names = {engine.vps.tensors[number].name for numbers in drifting.values() for number in numbers}
        if names and self.session.is_first:
            logger.warning(
                "engine.save: copies of %s have drifted apart at step %d, which stages and tensor ranks may; the "
                "checkpoint has the owner's",
                *(", ".join(sorted(names)), engine.global_steps),
            )


def _part(rank: int) -> str:
    return f"{rank:05d}.rows"


def _copied(vps: VirtualParameterSpace, layout: Layout, rank: int, buffers: Buffers) -> SideDigests:
    """Return the digests of those state kinds whose elements are held by several ranks."""
    several = vps.mesh(layout) is not None
    held = {kind for kind, _ in buffers if several or vps.is_replicated(layout, kind)}
    kinds = vps.present_kinds(layout, held)
    return side_digests(vps, layout, rank, buffers, kinds, set())[0]


def _compared(engine: EngineCore, found: Mapping[int, Any]) -> tuple[list[int], list[str]]:
    """Compare the extra state of all members.

    found: a map from each member to the record that it has posted.

    Returns, for each rank, the first rank that has the same extra state, and the list of all state kinds that any
    member has. Raises CheckpointError if extra state that must be equal on all members differs.
    """
    first, *others = engine.members
    for member in others:
        if found[member]["shared"] != found[first]["shared"]:
            raise CheckpointError(
                f"hyper-parameters, counters, the scheduler or a loader's position of member {member} are not those "
                f"of member {first}; change them on all members alike"
            )
    prints = [found[member]["rest"] for member in engine.members]
    held = {kind for each in found.values() for kind in each["kinds"]}
    return [prints.index(each) for each in prints], list(engine.vps.present_kinds(among=held))
