"""One switch on one member: meet, drain, rebuild, move, verify, commit, or roll back.

Up to the commit record every failure ends in a roll-back on all members, after it in none: the record is written
once, by whoever comes first, and each member reads what was written before it acts. Source buffers are held until
every member has acknowledged the record.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import torch
import torch.distributed as td

from ds_dynatrain.adapters.host import Replaced
from ds_dynatrain.adapters.memory import provide, reusable, zeros
from ds_dynatrain.adapters.state import Buffers, Scalars
from ds_dynatrain.adapters.support import refuse_at_boundary, refuse_changes
from ds_dynatrain.adapters.worlds import drop, install
from ds_dynatrain.engine import streams
from ds_dynatrain.engine.carry import (
    pack,
    put_back,
    rest_carry,
    scalars_of,
    settle_counters,
    shared_carry,
    take_buffers,
    take_over,
    unpack,
)
from ds_dynatrain.engine.census import check_census
from ds_dynatrain.engine.certificate import Digests, SideDigests, drifts, side_digests, verdict
from ds_dynatrain.engine.core import EngineCore
from ds_dynatrain.engine.encoding import blank_tensors, decode, encode, fingerprint
from ds_dynatrain.engine.meeting import Meeting, Outcome
from ds_dynatrain.engine.preparation import Preparation
from ds_dynatrain.engine.process import PROCESS
from ds_dynatrain.engine.replicas import Settlement, settle
from ds_dynatrain.engine.replicas import judge as judge_replicas
from ds_dynatrain.errors import CensusError, CertificateError, OutcomeUnknown, SwitchFailed
from ds_dynatrain.plan import MemberPlan, SwitchPlan
from ds_dynatrain.transfer import ReadyPlan, TransferStats, Transport, execute

CARRY_TAG = 2


class Transaction(Meeting):
    """See the module; `run` is called once, by every member of either world, at a boundary.

    record: where the decision is written, a notice board and a key; that of another transaction, where both happen or
    none. Then all vote, one asks for the decision, and all conclude it.
    """

    def __init__(self, engine: EngineCore, preparation: Preparation, place: str) -> None:
        super().__init__(engine, preparation, place)
        self.source: Buffers = {}
        self.target: Buffers = {}
        self.scalars = Scalars()
        self.before: dict[str, Any] = {}
        self.shared: dict[str, Any] = {}
        self.rest: dict[str, Any] = {}
        self.rest_record: Any = None
        self.kinds: tuple[str, ...] = ()
        self.own_streams = streams.capture()
        self.new_streams: streams.Streams | None = None
        self.source_digests: SideDigests | None = None
        self.kept_share: dict[str, Digests] = {}
        self.old_config = engine.host.present_config
        self.before_reshape: Replaced | None = None
        self.settlement = Settlement()
        self.own_buffers: set[str] = set()
        self.is_detached = self.is_installed = self.is_attached = self.has_reported = False
        self.record = self.control, f"record/{self.proposal.generation}"
        self.decision: dict[str, Any] | None = None
        self.interrupt: BaseException | None = None

    # ---- the protocol --------------------------------------------------------------------------------------------

    def run(self) -> Outcome:
        """Take part in the switch; returns on every member with the same `committed`."""
        self.vote()
        return self.conclude(self.decide())

    def vote(self) -> bool:
        """All that can fail, on the way to the record, which says no then; whether all went well here."""
        try:
            with self.phase("meet"):
                self.meet(self._stop_if_decided)
            with self.phase("drain"):
                self._drain()
                self._receive_carry()
            with self.phase("digest"):
                self._digest_source()
                self._settle_replicas()
            with self.phase("rebuild"):
                self._rebuild()
            with self.phase("move"):
                self._move()
            with self.phase("carry"):
                self._carry()
            with self.phase("verify"):
                self.outcome.digest = self._verify()
        except BaseException as error:
            self.interrupt = None if isinstance(error, Exception) else error
            self.decision = self._decide(False, f"{type(error).__name__}: {error}")
        return self.decision is None

    def decide(self) -> dict[str, Any]:
        """After a vote: the record, whoever wrote it."""
        return self._decide(True) if self.decision is None else self.decision

    def conclude(self, decision: dict[str, Any]) -> Outcome:
        """Do what the record says; with or without a vote, where another transaction has decided before that."""
        self.outcome.committed, self.outcome.reason = decision["commit"], decision["reason"]
        with self.phase("commit" if decision["commit"] else "roll back"):
            self._commit() if decision["commit"] else self._roll_back()
        if self.interrupt is not None:
            raise self.interrupt
        return self.outcome

    def _decide(self, wish: bool, reason: str = "") -> dict[str, Any]:
        """The record that counts, whoever wrote it."""
        try:
            if not wish:
                self._report({"failed": f"member {self.control.member}: {reason}"})
            board, key = self.record
            record: dict[str, Any] = board.decide(key, {"commit": wish, "reason": reason})
        except td.DistError as error:  # others may have read a commit
            reason = f"{reason or 'the notice board is gone'} ({error})"
            self.outcome.is_uncertain = True
            if board.watch is None:  # where members come and go, whoever can tell finds out
                board.lost = OutcomeUnknown(f"switch to {self.proposal.layout}", board.timeout_seconds, reason)
                self.interrupt = self.interrupt or board.lost
            return {"commit": False, "reason": reason}
        return record

    def _stop_if_decided(self) -> None:
        """While waiting for others: leave as soon as one of them has given up, or is dead."""
        self.preparation.stop()
        board, key = self.record
        record = board.read(key)
        if record is not None and not record["commit"]:
            raise SwitchFailed(record["reason"])

    def _report(self, record: dict[str, Any]) -> None:
        if not self.has_reported:
            self.has_reported = True
            self.control.post(f"report/{self.proposal.generation}/{self.control.member}", record)

    # ---- before the commit ---------------------------------------------------------------------------------------

    def _drain(self) -> None:
        """No collective is under way and no window is open; what there is to give away is named and posted."""
        engine, generation = self.engine, self.proposal.generation
        if self.source_rank is not None:
            refuse_at_boundary(engine.host)
            refuse_changes(engine.host)
            engine.host.settle_parameters()
            self.source, self.scalars = engine.host.state_buffers()
            check_census(engine.host, engine.vps, self.source_rank, self.source, "before the moves")
            self.warn_of_last_gradients()
            self.before = shared_carry(engine, self.scalars)
            self.control.post(f"stream/{generation}/{self.source_rank}", self.own_streams)
            self._offer_buffers(self.source_rank)
        if self.source_rank == 0:
            self.rest = rest_carry(engine)
            kinds = [kind for kind in engine.vps.present_kinds() if any(kind == held for held, _ in self.source)]
            tensors: list[torch.Tensor] = []
            record = {"shared": encode(self.before, tensors), "rest": encode(self.rest, []), "kinds": kinds}
            if tensors:  # they would have to travel apart from the record
                raise SwitchFailed(
                    "a hyper-parameter or the scheduler's state is a tensor or a numpy value: use numbers"
                )
            self.control.post(f"carry/{generation}/{self.proposal.source_members[0]}", record)

    @property
    def _layers_move(self) -> bool:
        """Whether layers, with their buffers, may go from one pipeline stage to another."""
        return self.proposal.source_layout.pipe > 1 or self.proposal.layout.pipe > 1

    def _offer_buffers(self, rank: int) -> None:
        """Post the buffers that training has changed, once for each stage."""
        place = self.proposal.source_layout.coordinate(rank)
        self.own_buffers = {name for name, _ in self.engine.host.module.named_buffers()}
        if self._layers_move and place == {**dict.fromkeys(place, 0), "pipe": place["pipe"]}:
            changed = encode(pack(self.engine.host.changed_buffers()), [])
            self.control.post(f"buffers/{self.proposal.generation}/{place['pipe']}", changed)

    def _take_buffers(self) -> None:
        """What other stages had changed in the buffers of layers that are new here."""
        if not self._layers_move:
            return
        stages = tuple(range(self.proposal.source_layout.pipe))
        records = self._await(f"buffers/{self.proposal.generation}", stages, "the buffers of a stage")
        for record in records.values():
            take_buffers(self.engine, unpack(decode(record, [])), self.own_buffers)

    def _receive_carry(self) -> None:
        first = self.proposal.source_members[0]
        record = self._await(f"carry/{self.proposal.generation}", (first,), "the carry of rank 0")[first]
        self.shared, self.rest_record = decode(record["shared"], []), record["rest"]
        self.kinds = self.outcome.kinds = tuple(record["kinds"])
        self._settle_target()

    def _digest_source(self) -> None:
        if self.source_rank is not None:
            self.source_digests, self.kept_share = side_digests(
                self.engine.vps,
                self.proposal.source_layout,
                self.source_rank,
                self.source,
                self.kinds,
                self.preparation.kept,
            )

    def _settle_replicas(self) -> None:
        """Before anything is read: tensors that several stages or tensor ranks hold are those of their owners."""
        layout, members = self.proposal.source_layout, self.proposal.source_members
        if layout.pipe * layout.tensor == 1 or self.source_rank is None or self.source_digests is None:
            return
        generation, vps, mine = self.proposal.generation, self.engine.vps, self.control.member
        self.control.post(f"digests/{generation}/{mine}", self.source_digests.to_json())
        drifting = drifts(vps, layout, members, self._await(f"digests/{generation}", members, "the source's digests"))
        if not drifting:
            return
        seconds = self.control.timeout_seconds
        self.settlement = settle(vps, self.source_rank, self.source, drifting, self.preparation.transport(), seconds)
        self.control.post(f"settled/{generation}/{mine}", self.settlement.distances)
        distances = self._await(f"settled/{generation}", members, "the values of replicas").values()
        types = self.engine.host.element_types
        said = judge_replicas(
            distances, self.engine.settings.replica_tolerance, {kind: types.of(kind) for kind in drifting}
        )
        self.outcome.warnings.append(said)
        self._digest_source()

    def _settle_target(self) -> None:
        """The prepared buffers, anew where the live ones are no longer those that were to be kept."""
        preparation = self.preparation
        if self.target_rank is None:
            return
        layout, vps = self.proposal.layout, preparation.vps
        stale = [
            key
            for key in preparation.kept
            if key not in self.source or self.source[key].data_ptr() != preparation.buffers[key].data_ptr()
        ]
        if stale:
            preparation.kept = reusable(vps, self.source_rank, layout, self.target_rank, self.source)
            local = vps.local(layout, self.target_rank)
            preparation.buffers = provide(local, preparation.types, preparation.kept, self.source, zeros)
        absent = set(vps.present_kinds(self.proposal.source_layout)) - set(self.kinds)
        self.target = {key: held for key, held in preparation.buffers.items() if key[0] not in absent}

    def _rebuild(self) -> None:
        """Old optimizer off, new groups in, new optimizer on, over the memory that was made ready."""
        if self.source_rank is not None:
            self.is_detached = self.outcome.is_rebuilt = True
            self.engine.host.detach()
        if self.target_rank is not None and self.preparation.world is not None:
            self.is_installed = self.outcome.is_rebuilt = True
            install(self.preparation.world)
            scalars = self.scalars if self.source_rank is not None else scalars_of(self.shared)
            config = self.engine.config_for(self.proposal.layout)
            made, self.preparation.made = self.preparation.made, None
            self.before_reshape = self.engine.take_shape(
                self.preparation.vps, self.proposal.layout, self.target_rank, made
            )
            self.is_attached = True
            self.engine.host.attach(self.proposal.layout, self.preparation.world, config, self.target, scalars)

    def _move(self) -> None:
        plan, transport = self._plans()[1], self.preparation.transport()
        self.outcome.stats = self._execute(plan, transport)
        self._send_rest(transport)

    def _execute(self, plan: MemberPlan | ReadyPlan, transport: Transport) -> TransferStats:
        engine = self.engine
        return execute(
            plan, self.source, self.target, transport, self.control.timeout_seconds, engine.settings.memory_budget_bytes
        )

    def _send_rest(self, transport: Transport) -> None:
        """Tensors of the carry (module buffers, the user's objects) from rank 0 to the members that start to work."""
        deadline = time.monotonic() + self.control.timeout_seconds
        if self.source_rank == 0:
            tensors: list[torch.Tensor] = []
            encode(self.rest, tensors)
            flat = [tensor.contiguous().view(-1) for tensor in tensors if tensor.numel()]
            for handle in [transport.send(part, member, CARRY_TAG) for member in self.newcomers for part in flat]:
                handle.wait(deadline)
        elif self.control.member in self.newcomers:
            tensors = blank_tensors(self.rest_record)
            flat = [tensor.view(-1) for tensor in tensors if tensor.numel()]
            for handle in [transport.receive(part, self.proposal.source_members[0], CARRY_TAG) for part in flat]:
                handle.wait(deadline)
            self.rest = decode(self.rest_record, tensors)

    def _carry(self) -> None:
        if self.target_rank is None:
            return
        if self.source_rank is None:
            take_over(self.engine, self.shared, self.rest)
        else:
            settle_counters(self.engine, self.shared)
        self._take_buffers()
        self.new_streams = self._streams_of(self.target_rank)
        streams.restore(self.new_streams)

    def _streams_of(self, rank: int) -> streams.Streams:
        """The random streams of a rank of the next world."""
        source, target = self.proposal.source_layout, self.proposal.layout
        generation, seed, place = self.proposal.generation, self.engine.job.job_seed, target.coordinate(rank)
        origin = streams.origin(source, target, rank)
        if origin is None:
            return streams.seeded(seed, place, generation)
        found: streams.Streams = self._await(f"stream/{generation}", (origin,), "the random streams of a rank")[origin]
        return streams.forked(found, seed, place, generation) if streams.is_forked(source, target, rank) else found

    def _verify(self) -> str:
        """Report, read all reports, and judge them; the digest of the whole state if all is well."""
        record: dict[str, Any] = {}
        if self.source_rank is not None and self.source_digests is not None:
            record["source"] = self.source_digests.to_json()
            record["carry_before"] = _fingerprints(self.before)
            record["stream_before"] = fingerprint(self.own_streams)
            record["shared_stream_before"] = fingerprint(streams.shared(self.own_streams))
        if self.newcomers and (self.source_rank == 0 or self.control.member in self.newcomers):
            record["rest"] = fingerprint(self.rest)
        begin = time.perf_counter()
        if self.target_rank is not None:
            record.update(self._report_target(self.target_rank))
        self.outcome.certificate_ms = self.outcome.phases_ms["digest"] + 1e3 * (time.perf_counter() - begin)
        self._report(record)
        reports = self._await(f"report/{self.proposal.generation}", self.proposal.union, "the certificate")
        failed = [report["failed"] for report in reports.values() if "failed" in report]
        if failed:
            raise SwitchFailed(failed[0])
        vps = self.preparation.vps
        layouts = self.proposal.source_layout, self.proposal.layout
        return verdict(vps, *layouts, reports, self.proposal.source_members, self.proposal.members)

    def _report_target(self, rank: int) -> dict[str, Any]:
        layout = self.proposal.layout
        vps = self.preparation.vps.with_layout(layout, self.proposal.members)
        held, scalars = self.engine.host.state_buffers()
        check_census(self.engine.host, vps, rank, held, "after the moves")
        kinds = tuple(kind for kind in self.kinds if kind in vps.present_kinds())
        gone = [key for key in self.target if key[0] in kinds and key not in held]
        if gone:
            raise CensusError(f"rank {rank}: {gone[0][0]} of {gone[0][1]} is not in the rebuilt optimizer")
        digests, _ = side_digests(vps, layout, rank, held, kinds, self.preparation.kept, self.kept_share)
        if streams.capture() != self.new_streams:
            raise CertificateError(f"random streams of rank {rank} are not those that its place in the layout has")
        return {
            "target": digests.to_json(),
            "carry_after": _fingerprints(shared_carry(self.engine, scalars)),
            "stream_after": fingerprint(self.new_streams),
            "shared_stream_after": fingerprint(streams.shared(self.new_streams)),
        }

    # ---- at and after the commit ---------------------------------------------------------------------------------

    def _commit(self) -> None:
        """All have the record; let go of the old world once all have said so."""
        engine, proposal = self.engine, self.proposal
        engine.enter(proposal, self.preparation.world if self.target_rank is not None else None)
        if PROCESS.is_shared and self.target_rank is not None:
            engine.speak()  # since the vote it was another engine's turn
        self.preparation.committed()
        self._measure()
        self.acknowledge(self._measurements())
        if self.target_rank is not None:
            engine.host.forget_steps()
        self.preparation.end_neighbors()
        self._release_source()
        if self.old_world is not None:
            self.control.bury(drop(self.old_world))
        if self.target_rank is None:
            engine.host.leave_world()
            engine.launch.install()
            if self.preparation.world is not None:
                self.control.bury(drop(self.preparation.world))
        elif self.preparation.world is not None:
            self.control.bury(self.preparation.world.retire_transfer())

    def _release_source(self) -> None:
        """Give the old memory back, in a thread: unmapping it takes 0.2 s a gigabyte,
        and training can go on meanwhile.
        """
        old, self.source, self.target, self.preparation.buffers = self.source, {}, {}, {}
        self.before_reshape = None
        thread = threading.Thread(target=old.clear, name="dynatrain-release", daemon=True)
        del old  # the thread holds the last reference
        thread.start()
        self.control.bury(thread)

    def _roll_back(self) -> None:
        """As if nobody had asked: the old optimizer over the old memory, the old groups, the old streams."""
        engine, world = self.engine, self.old_world
        if self.is_attached:
            engine.host.detach()
        if self.before_reshape is not None:
            engine.host.undo_reshape(self.before_reshape)
        self.settlement.undo()
        if self.is_detached and world is not None:
            install(world)
            engine.host.attach(self.proposal.source_layout, world, self.old_config, self.source, self.scalars)
            put_back(engine, self.before)
        elif self.is_installed:
            engine.host.leave_world()
            engine.launch.install()
        streams.restore(self.own_streams)
        self._measure()
        self.source = {}
        self.target = {}
        self.preparation.abandon()

    # ---- small things --------------------------------------------------------------------------------------------

    def _plans(self) -> tuple[SwitchPlan, ReadyPlan]:
        return self.preparation.plan(self.kinds)

    @property
    def newcomers(self) -> list[int]:
        """Members that start to work with this switch."""
        return [member for member in self.proposal.members if member not in self.proposal.source_members]

    def _await(self, key: str, members: tuple[int, ...], what: str) -> dict[int, Any]:
        return self.control.gather(key, members, what, stop=self._stop_if_decided)

    def _measure(self) -> None:
        """State held at once on this member: source, what the target adds to it, and staging."""
        held = {_memory(buffer) for buffer in (*self.source.values(), *self.target.values())}
        staging = self.outcome.stats.staging_peak if self.outcome.stats else 0
        self.outcome.peak_memory = _union_bytes(held) + staging

    def _measurements(self) -> dict[str, Any]:
        stats = self.outcome.stats
        return {
            "kept": stats.bytes_in_place if stats else 0,
            "local": stats.bytes_local if stats else 0,
            "sent": stats.bytes_sent if stats else 0,
            "certificate_ms": self.outcome.certificate_ms,
            "peak_memory": self.outcome.peak_memory,
        }


def _fingerprints(shared: dict[str, Any]) -> dict[str, str]:
    return {part: fingerprint(value) for part, value in shared.items()}


def _memory(buffer: torch.Tensor) -> tuple[int, int]:
    return buffer.data_ptr(), buffer.data_ptr() + buffer.numel() * buffer.element_size()


def _union_bytes(runs: set[tuple[int, int]]) -> int:
    """Bytes covered by address runs that may overlap."""
    total, end = 0, 0
    for start, stop in sorted(runs):
        total += max(0, stop - max(start, end))
        end = max(end, stop)
    return total
