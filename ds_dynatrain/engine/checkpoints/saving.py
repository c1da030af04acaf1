"""`engine.save`: all working members together write one checkpoint at a boundary; if any of them fails, none remains.

Rank 0 creates a hidden folder and announces it. Each member writes its share and reports. Rank 0 writes the manifest
and the record, renames the folder, and announces its final name. Training itself is not affected and can continue even
if the save fails. During a background save, a step waits only for a copy into host memory, and a thread does the
writing.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ds_dynatrain.adapters.groups.device import start_thread
from ds_dynatrain.adapters.zero.state import Buffers
from ds_dynatrain.checkpoint import HostMemory, Manifest, Share, TrainingRecord, folder, record, shares_of, write_shares
from ds_dynatrain.checkpoint.files import dumped
from ds_dynatrain.elastic.main_thread import OWN_WAITS
from ds_dynatrain.engine.checkpoints.asking import ask
from ds_dynatrain.engine.checkpoints.extra_state import packed
from ds_dynatrain.errors import CertificateError, CheckpointError
from ds_dynatrain.membership.control import Control
from ds_dynatrain.membership.session import Session
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
"""Reason for waiting that a member's status shows during a save."""


class PendingSave:
    """A save in the background.

    step: the number of optimizer steps done when the state was copied.
    """

    def __init__(self, step: int) -> None:
        self.step = step
        self._saved: Future[Path] = Future()

    @property
    def done(self) -> bool:
        """Whether the save has ended, successfully or not. Needs no message to other members."""
        return self._saved.done()

    def wait(self) -> Path:
        """Wait for the checkpoint and return its folder. Raises CheckpointError on all members if saving failed."""
        with OWN_WAITS.waiting(SAVING):
            return self._saved.result()

    def run(self, save: Callable[[], Path]) -> None:
        """Save, and keep the result for `wait`. Called in the saving thread."""
        try:
            self._saved.set_result(save())
        except Exception as error:
            self._saved.set_exception(error)
        except BaseException:
            self._saved.set_exception(CheckpointError("the thread that saves was stopped"))
            raise


class Saver:
    """Saves an engine's checkpoints, one at a time."""

    def __init__(self, engine: EngineCore) -> None:
        self.engine = engine
        self._memory = HostMemory()
        self._boards: tuple[Control, Control] | None = None
        self._running: tuple[PendingSave, threading.Thread] | None = None

    def save(self, path: str | os.PathLike[str], tag: str | None, key: str, is_open: str, keep: int | None) -> Path:
        """Save a checkpoint, and return its folder once the checkpoint is on disk.

        key: a key that is unique in the job's key-value store.
        is_open: the reason why this member cannot save now; "" if it can.
        keep: how many of the newest checkpoints to keep; None for all of them.
        """
        self.settle()
        saving = _Saving(self.engine, self.engine.control, Path(path).absolute(), tag, key, keep)
        with OWN_WAITS.waiting(SAVING):
            saving.take(is_open, None)
            return saving.carry_out()

    def start(
        self, path: str | os.PathLike[str], tag: str | None, key: str, is_open: str, keep: int | None
    ) -> PendingSave:
        """Start a background save, and return once the values are copied. The arguments are those of `save`."""
        self.settle()
        saving = _Saving(self.engine, self._own_board(), Path(path).absolute(), tag, key, keep)
        saving.take(is_open, self._memory)
        pending = PendingSave(self.engine.global_steps)
        self._running = pending, start_thread(partial(pending.run, saving.carry_out), "dynatrain-save")
        return pending

    def _own_board(self) -> Control:
        """Return the saving thread's own connection to the key-value store. It is remade if the engine's board has
        changed."""
        if self._boards is None or self._boards[0] is not self.engine.control:
            self.engine.control.read("save/board")  # fails at once if the board is lost; a new connection would wait
            self._boards = self.engine.control, self.engine.control.clone()
        return self._boards[1]

    def look(self) -> None:
        """Log, once, the error of a background save that has failed. Called at boundaries. Never waits."""
        if self._running is not None and self._running[0].done:
            self.settle()

    def settle(self, seconds: float | None = None) -> bool:
        """Wait for a running save, and log its error if it fails; `PendingSave.wait` raises that error.

        seconds: the longest time to wait; None for no limit.

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
    """One save of a checkpoint on one working member."""

    def __init__(
        self, engine: EngineCore, control: Control, path: Path, tag: str | None, key: str, keep: int | None
    ) -> None:
        self.engine, self.control, self.path, self.tag, self.keep = engine, control, path, tag, keep
        self.members, self.first = engine.members, engine.members[0]
        self.session = Session(control, key, self.members, "engine.save", is_patient=True)
        self.snapshot: Snapshot | None = None
        self.sums: dict[int, str] | None = None
        self.error: BaseException | None = None

    # ---- while training stands still ---------------------------------------------------------------------------------

    def take(self, is_open: str, memory: HostMemory | None) -> None:
        """Agree with the other members to save, and take the snapshot.

        Raises CheckpointError on all members if one of them refuses or makes a different request. A later failure is
        kept for `carry_out`, where all members learn of it.
        """
        in_the_way = is_open and f"{is_open}: save after engine.step()"
        ask(self.session, self.engine, self.path, self.tag, in_the_way)
        try:
            self.engine.agree()
            self.snapshot = Snapshot.take(self.engine, lambda mine: self.session.all("carry", mine), memory)
        except BaseException as error:
            self.error = error
            self.session.give_up(error)

    # ---- while training continues ------------------------------------------------------------------------------------

    def carry_out(self) -> Path:
        """Write the checkpoint and return its folder. Raises CheckpointError on all members if one of them fails."""
        try:
            with ExitStack() as stack:
                snapshot, hidden = self._written(stack)
                return Path(
                    self.session.first("saved", lambda: str(self._finish(snapshot, hidden)), "saving a checkpoint")
                )
        except CheckpointError as error:
            raise CheckpointError(f"engine.save: {error}; nothing was saved, and training can go on") from error
        finally:
            self.snapshot = None

    def _written(self, stack: ExitStack) -> tuple[Snapshot, Path]:
        """Write this member's files into the hidden folder, and report a checksum. Returns (snapshot, hidden
        folder)."""
        try:
            if self.error is not None or self.snapshot is None:
                raise self.error or CheckpointError("there is no copy of this member's state to write: save again")
            hidden = Path(self.session.first("open", lambda: str(self._open(stack)), "saving a checkpoint"))
            if not hidden.is_dir():
                raise CheckpointError(
                    f"member {self.control.member} does not see {hidden}, which rank 0 has made; give a folder in a "
                    "file system that all members share"
                )
            self.sums = self.session.gather("sums", self._write(self.snapshot, hidden))
        except BaseException as error:
            decision = self.session.give_up(error)
            decision.raise_interrupt()
            raise CheckpointError(decision.reason) from error
        return self.snapshot, hidden

    def _open(self, stack: ExitStack) -> Path:
        """Make the hidden folder while holding the lock of the checkpoint folder. Called on rank 0."""
        stack.enter_context(folder.locked(self.path))
        if self.tag is None and self.snapshot is not None:
            self.tag = folder.free_tag(self.path, f"step{self.snapshot.record.step}")
        return folder.begin(self.path, str(self.tag))

    def _write(self, snapshot: Snapshot, hidden: Path) -> str:
        """Write this member's files while comparing replicas, and return the checksum of its small file."""
        with ThreadPoolExecutor(1, "dynatrain-replicas") as beside:
            replicas = None if snapshot.replicas is None else beside.submit(snapshot.replicas)
            rows = write_shares(hidden, snapshot.rank, snapshot.shares)
        folder.write(hidden / _part(snapshot.rank), Manifest.of(rows).to_bytes())
        data = dumped(snapshot.own)
        folder.write(hidden / record.rank_file(snapshot.rank), data)
        if replicas is not None:
            self._compare_replicas(replicas.result())
        return record.sum_of(data)

    def _finish(self, snapshot: Snapshot, hidden: Path) -> Path:
        """Write the manifest and the record, and give the folder its final name. Called on rank 0 once all members have
        written."""
        found = self.sums or {}
        parts = [hidden / _part(rank) for rank in range(len(self.members))]
        rows = [row for part in parts for row in Manifest.from_bytes(part.read_bytes())]
        for part in parts:
            part.unlink()
        sums = {record.rank_file(rank): found[member] for rank, member in enumerate(self.members)}
        folder.seal(hidden, snapshot.record, rows, sums)
        return folder.finish(hidden, str(self.tag), self.keep)

    def _compare_replicas(self, own: SideDigests) -> None:
        """Raise CheckpointError if copies of the state on the data axis are not equal. The error names tensors and
        members.

        Values that several stages or tensor ranks each compute for themselves may have drifted apart, as in a switch.
        In this case the owner's values are saved, with a warning.
        """
        engine = self.engine
        try:
            drifting = differing(self.session, "replicas", engine.vps, engine.layout, engine.rank, own, "source")
        except CertificateError as error:
            raise CheckpointError(
                f"copies of one state are not equal ({error}): which is right is not known; load the last checkpoint"
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


# ---- what is to be written -------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Snapshot:
    """One member's part of a checkpoint. Once it is taken, saving no longer reads the engine's state.

    shares: the values to write.
    own: the content of the member's own small file.
    record: the training record, still without the checksums of the files.
    replicas: computes the digests of elements that other members also hold; None if the values were copied, because the
        originals may change during the save.
    """

    rank: int
    shares: list[Share]
    own: dict[str, Any]
    record: TrainingRecord
    replicas: Callable[[], SideDigests] | None = None

    @staticmethod
    def take(
        engine: EngineCore, exchange: Callable[[dict[str, Any]], Mapping[int, Any]], memory: HostMemory | None
    ) -> Snapshot:
        """Take a snapshot of the engine.

        exchange: posts a record and returns the records of all working members.
        memory: memory for a copy of the values; if None, the values must not change until they are written.

        Raises CheckpointError if the shared extra state differs between members, CensusError if DeepSpeed's state is
        not where it is expected, ConfigError for an object that cannot be saved.
        """
        rank = engine.rank
        engine.host.settle_parameters()
        buffers, scalars = engine.host.state_buffers()
        check_census(engine.host, engine.vps, rank, buffers, "before saving")
        shared, rest = shared_carry(engine, scalars), rest_carry(engine)
        mine = {
            "shared": fingerprint(shared),
            "rest": fingerprint(rest),
            "kinds": sorted({kind for kind, _ in buffers}),
        }
        found = exchange(mine)
        rests, kinds = _compared(engine, found)
        shares = list(
            shares_of(engine.vps, engine.layout, rank, buffers, tuple(k for k in kinds if k in mine["kinds"]))
        )
        own: dict[str, Any] = {"streams": streams.capture(), "rest": None}
        if rests[rank] == rank:
            own["rest"], tensors = packed(rank, rest)
            shares += tensors
        said = TrainingRecord(
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
        if memory is not None:
            return Snapshot(rank, memory.copies(shares), own, said)
        return Snapshot(rank, shares, own, said, partial(_copied, engine.vps, engine.layout, rank, buffers))


def _copied(vps: VirtualParameterSpace, layout: Layout, rank: int, buffers: Buffers) -> SideDigests:
    """Return the digests of those state kinds of which several ranks hold the same elements."""
    several = vps.mesh(layout) is not None
    held = {kind for kind, _ in buffers if several or vps.is_replicated(layout, kind)}
    kinds = vps.present_kinds(layout, held)
    return side_digests(vps, layout, rank, buffers, kinds, set())[0]


def _compared(engine: EngineCore, found: Mapping[int, Any]) -> tuple[list[int], list[str]]:
    """Compare the members' extra state.

    found: a map from each member to the record that it has posted.

    Returns, for each rank, the first rank with equal per-rank state, and the list of all state kinds that any member
    has. Raises CheckpointError if state that all members share differs between them.
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
