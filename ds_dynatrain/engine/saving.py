"""`engine.save_universal`: all working members write one checkpoint at a boundary, or none is there afterwards.

Rank 0 opens a hidden folder and says where; each member writes its share and reports; rank 0 puts the manifest and the
record together, gives the folder its name, and says so. Nothing of the training is touched: whatever fails, it goes on.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ds_dynatrain.adapters.support import refuse_at_boundary, refuse_changes
from ds_dynatrain.checkpoint import Manifest, Record, folder, record, shares_of, write_shares
from ds_dynatrain.engine import streams
from ds_dynatrain.engine.accord import agree, gather_living
from ds_dynatrain.engine.carry import rest_carry, shared_carry
from ds_dynatrain.engine.census import check_census
from ds_dynatrain.engine.encoding import encode, fingerprint
from ds_dynatrain.engine.rests import packed
from ds_dynatrain.errors import CheckpointError, DynatrainError, SwitchRefused

if TYPE_CHECKING:
    from ds_dynatrain.engine.engine import DynatrainEngine


def save(engine: DynatrainEngine, path: str | os.PathLike[str], tag: str | None, place: str, is_open: str) -> Path:
    """See `DynatrainEngine.save_universal`. place, is_open: as for `registration.register`."""
    return _Saving(engine, Path(path).absolute(), tag, f"save/{place}", None).run(is_open)


def save_periodic(engine: DynatrainEngine, path: str, key: str, keep: int) -> Path:
    """A save that all working members know to be due. key: of nothing else; keep: so many of the newest stay."""
    return _Saving(engine, Path(path).absolute(), None, key, keep).run("")


class _Saving:
    """One save on one working member."""

    def __init__(self, engine: DynatrainEngine, path: Path, tag: str | None, key: str, keep: int | None) -> None:
        self.engine, self.path, self.tag, self.key, self.keep = engine, path, tag, key, keep
        self.control, self.members = engine.control, engine.members
        self.first = self.members[0]
        self.rests: list[int] = []
        self.kinds: tuple[str, ...] = ()
        self.has_reported = False

    @property
    def _leads(self) -> bool:
        return bool(self.control.member == self.first)

    def run(self, is_open: str) -> Path:
        """The folder of the checkpoint; CheckpointError, on all members, if there is none."""
        asked = {"folder": str(self.path), "tag": self.tag, "step": int(self.engine.global_steps)}
        agree(self.control, self.key, self.members, "save_universal", {"refusal": self._refusal(is_open), **asked})
        interrupt: BaseException | None = None
        with ExitStack() as stack:
            try:
                hidden = self._open(stack)
                self._report(self._write(hidden))
                if self._leads:
                    saved = self._finish(hidden)
                    self._say({"saved": str(saved)})
            except BaseException as error:
                interrupt = None if isinstance(error, Exception) else error
                reason = f"member {self.control.member}: {type(error).__name__}: {error}"
                self._report({"failed": reason})
                if self._leads:
                    self._say({"failed": str(error) if isinstance(error, CheckpointError) else reason})
        if interrupt is not None:
            raise interrupt
        outcome = gather_living(self.control, f"{self.key}/record", (self.first,), "saving a checkpoint")[self.first]
        if "failed" in outcome:
            raise CheckpointError(f"save_universal: {outcome['failed']}; nothing was saved, and training can go on")
        return Path(outcome["saved"])

    def _refusal(self, is_open: str) -> str:
        try:
            if is_open:
                return f"{is_open}: save after engine.step(), with no switch pending"
            if self.tag is not None:
                folder.check_tag(self.tag)
            refuse_at_boundary(self.engine)
            refuse_changes(self.engine)
        except SwitchRefused as refused:
            return f"{refused.reason}; {refused.way_out}"
        except DynatrainError as error:
            return str(error)
        return ""

    def _say(self, outcome: Mapping[str, Any]) -> None:
        self.control.post(f"{self.key}/record/{self.first}", outcome)

    def _report(self, mine: Mapping[str, Any]) -> None:
        if not self.has_reported:
            self.has_reported = True
            self.control.post(f"{self.key}/report/{self.control.member}", mine)

    def _stop(self) -> None:
        """While waiting: leave when rank 0 has given up."""
        outcome = self.control.read(f"{self.key}/record/{self.first}")
        if outcome is not None and "failed" in outcome:
            raise CheckpointError(outcome["failed"])

    def _gather(self, what: str, members: tuple[int, ...]) -> dict[int, Any]:
        return gather_living(self.control, f"{self.key}/{what}", members, "saving a checkpoint", self._stop)

    # ---- steps -------------------------------------------------------------------------------------------------------

    def _open(self, stack: ExitStack) -> Path:
        """The hidden folder, which all members see."""
        if self._leads:
            stack.enter_context(folder.locked(self.path))
            if self.tag is None:
                self.tag = folder.free_tag(self.path, f"step{self.engine.global_steps}")
            hidden = folder.begin(self.path, self.tag)
            self.control.post(f"{self.key}/open/{self.first}", str(hidden))
        hidden = Path(self._gather("open", (self.first,))[self.first])
        if not hidden.is_dir():
            raise CheckpointError(
                f"member {self.control.member} does not see {hidden}, which rank 0 has made: all members have to save "
                "into one file system"
            )
        return hidden

    def _write(self, hidden: Path) -> dict[str, Any]:
        """This member's files; what it reports."""
        engine, rank = self.engine, self.engine.rank
        engine.settle_parameters()
        buffers, scalars = engine.state_buffers()
        check_census(engine, engine.vps, rank, buffers, "before saving")
        shared, tensors = shared_carry(engine, scalars), list[torch.Tensor]()
        encoded = encode(shared, tensors)
        if tensors:
            raise CheckpointError(
                "a hyper-parameter or the scheduler's state is a tensor or a numpy value: use numbers"
            )
        rest = rest_carry(engine)
        self._compare(shared, rest, sorted({kind for kind, _ in buffers}))
        held = tuple(kind for kind in self.kinds if any(kind == name for name, _ in buffers))
        shares = list(shares_of(engine.vps, engine.layout, rank, buffers, held))
        own = {"streams": streams.capture(), "rest": None}
        if self.rests[rank] == rank:
            own["rest"], tensors_of_it = packed(rank, rest)
            shares += tensors_of_it
        rows = write_shares(hidden, rank, shares)
        folder.write(hidden / _part(rank), Manifest.of(rows).to_bytes())
        data = record.dumped(own)
        folder.write(hidden / record.rank_file(rank), data)
        return {"sum": record.sum_of(data), **({"shared": encoded} if self._leads else {})}

    def _compare(self, shared: dict[str, Any], rest: dict[str, Any], kinds: list[str]) -> None:
        """What all have alike is saved once; CheckpointError if the carry differs between members."""
        mine = {"shared": fingerprint(shared), "rest": fingerprint(rest), "kinds": kinds}
        self.control.post(f"{self.key}/carry/{self.control.member}", mine)
        found = self._gather("carry", self.members)
        for member in self.members:
            if found[member]["shared"] != found[self.first]["shared"]:
                raise CheckpointError(
                    f"hyper-parameters, counters, the scheduler or a loader's position of member {member} are not "
                    f"those of member {self.first}: change them on all members alike"
                )
        prints = [found[member]["rest"] for member in self.members]
        self.rests = [prints.index(each) for each in prints]
        held = {kind for each in found.values() for kind in each["kinds"]}
        self.kinds = tuple(kind for kind in self.engine.vps.present_kinds() if kind in held)

    def _finish(self, hidden: Path) -> Path:
        """On rank 0: all have written; manifest and record, and the name."""
        engine, reports = self.engine, self._gather("report", self.members)
        failed = [report["failed"] for report in reports.values() if "failed" in report]
        if failed:
            raise CheckpointError(failed[0])
        parts = [hidden / _part(rank) for rank in range(len(self.members))]
        manifest = Manifest.of(row for part in parts for row in Manifest.from_bytes(part.read_bytes()))
        manifest.check(hidden)
        for tensor, kind in manifest.rows:
            manifest.runs(tensor, kind)
        data = manifest.to_bytes()
        folder.write(hidden / record.MANIFEST, data)
        sums = {record.rank_file(rank): reports[member]["sum"] for rank, member in enumerate(self.members)}
        for part in parts:
            part.unlink()
        made = Record(
            step=int(engine.global_steps),
            layout=engine.layout.to_dict(),
            generation=engine.generation,
            seed=engine.job.job_seed,
            kinds=list(self.kinds),
            tensors=[[each.name, list(each.shape), each.group, each.expert] for each in engine.vps.tensors],
            carry=reports[self.first]["shared"],
            rests=self.rests,
            sums={**sums, record.MANIFEST: record.sum_of(data)},
            sizes=record.sizes_of(hidden),
            written_by=record.writer(),
        )
        folder.write(hidden / record.RECORD, record.to_bytes(made))
        return folder.finish(hidden, str(self.tag), self.keep)


def _part(rank: int) -> str:
    return f"{rank:05d}.rows"
