"""One switch on one member: meet, drain, rebuild, move, verify, commit, or roll back.

Up to the commit record every failure ends in a roll-back on all members, after it in none: the record is written
once, by whoever comes first, and each member reads what was written before it acts. Source buffers are held until
every member has acknowledged the record, or the time-out has passed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from operator import or_
from typing import Any

import torch
import torch.distributed as td

from ds_dynatrain.adapters.communicators import end
from ds_dynatrain.adapters.device_link import END_SECONDS
from ds_dynatrain.adapters.memory import provide, release, zeros
from ds_dynatrain.adapters.state import Buffers, Scalars
from ds_dynatrain.adapters.support import refuse_at_boundary, refuse_changes
from ds_dynatrain.adapters.world import World
from ds_dynatrain.adapters.worlds import drop, install
from ds_dynatrain.engine import agreement, streams
from ds_dynatrain.engine.carry import (
    Carried,
    fingerprints,
    put_back,
    rest_carry,
    scalars_of,
    settle_counters,
    shared_carry,
    take_over,
)
from ds_dynatrain.engine.census import check_census
from ds_dynatrain.engine.core import EngineCore
from ds_dynatrain.engine.digests import SideDigests, side_digests
from ds_dynatrain.engine.encoding import blank_tensors, decode, encode, fingerprint
from ds_dynatrain.engine.preparation import Preparation
from ds_dynatrain.engine.process import PROCESS
from ds_dynatrain.engine.replicas import Settlement, furthest
from ds_dynatrain.engine.replicas import judge as judge_replicas
from ds_dynatrain.engine.transaction.certificate import (
    SIDES,
    Doubts,
    certify,
    differing,
    explained,
    joined_sides,
    shares,
)
from ds_dynatrain.engine.transaction.layers import LayerStates
from ds_dynatrain.engine.transaction.meeting import Meeting, Outcome
from ds_dynatrain.engine.transaction.session import Decision, Session
from ds_dynatrain.engine.transaction.swap import Swap
from ds_dynatrain.errors import CensusError, CertificateError, DynatrainError, OutcomeUnknown, SwitchFailed
from ds_dynatrain.plan import MemberPlan
from ds_dynatrain.transfer import DeviceLink, ReadyPlan, TransferStats, Transport, execute, send_down


class Transaction(Meeting):
    """See the module; `run` is called once, by every member of either world, at a boundary.

    is_part: of something larger, which decides for all its parts. Then all vote, and all conclude what was decided.
    """

    def __init__(self, engine: EngineCore, preparation: Preparation, place: str, is_part: bool = False) -> None:
        super().__init__(engine, preparation, place)
        self.source: Buffers = {}
        self.target: Buffers = {}
        self.scalars = Scalars()
        self.before: dict[str, Any] = {}
        self.carried = Carried({}, {}, {}, "", ())
        self.rest: dict[str, Any] = {}
        self.own_streams = streams.capture()
        self.new_streams: streams.Streams | None = None
        self.source_digests: SideDigests | None = None
        self.target_digests: SideDigests | None = None
        self.kept_share: SideDigests = {}
        self.old_config = engine.host.present_config
        self.settlement = Settlement()
        self.layers = LayerStates(engine, self.control, self.proposal)
        self.swap = Swap(engine)
        self.swap.on_undo(streams.restore, self.own_streams)
        self.is_part, generation, layout = is_part, self.proposal.generation, self.proposal.layout
        record = f"part/{generation}" if is_part else f"record/{generation}"
        key, members, what = agreement.key_of(self.proposal), self.proposal.union, f"switch to {layout}"
        self.session = Session(self.control, key, members, what, record=record, stop=preparation.stop)
        self.digest = ""
        self.interrupt: BaseException | None = None

    # ---- the protocol --------------------------------------------------------------------------------------------

    def run(self) -> Outcome:
        """Take part in the switch; returns on every member with the same `committed`."""
        return self.conclude(self.vote())

    def vote(self) -> Decision:
        """All that can fail, and what all members come to; whoever fails says no for all."""
        return self._vote(self._carry_out)

    def _vote(self, work: Callable[[], dict[str, Any]]) -> Decision:
        """A vote on what `work` reports, judged by the certificate."""
        try:
            decision = self.session.vote(work, joined_sides, self._judge)
        except OutcomeUnknown as lost:  # others may have read a commit
            self.outcome.is_uncertain = True
            interrupt: BaseException | None = lost.__cause__ or lost
            if self.control.watch is not None:  # where members come and go, whoever can tell finds out
                self.control.lost, interrupt = None, lost.__cause__
            return Decision(False, str(lost), interrupt=interrupt)
        if decision.said and "doubts" in decision.said:
            decision = replace(decision, reason=self._explained(decision.said["doubts"]))
        elif decision.said:
            self.digest = str(decision.said["digest"])
        return decision

    def conclude(self, decision: Decision) -> Outcome:
        """Do what was decided; with or without a vote, where another part has decided before that."""
        self.outcome.committed, self.outcome.reason = decision.commit, decision.reason
        self.outcome.digest = self.digest if decision.commit else ""
        self.interrupt, self.outcome.is_rebuilt = decision.interrupt, self.swap.has_begun
        with self.phase("commit" if decision.commit else "roll back"):
            self._commit() if decision.commit else self._roll_back()
        if self.interrupt is not None:
            raise self.interrupt
        return self.outcome

    def _carry_out(self) -> dict[str, Any]:
        """This member's report."""
        with self.phase("drain"):
            self._drain()
        with self.phase("meet"):
            self.meet(self.session)
            self._settle_results()
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
            return self._verify()

    # ---- before the commit ---------------------------------------------------------------------------------------

    def _drain(self) -> None:
        """No collective is under way and no window is open; what there is to give away is named and posted."""
        engine, generation, rank = self.engine, self.proposal.generation, self.source_rank
        if rank is None:
            return
        refuse_at_boundary(engine.host)
        refuse_changes(engine.host)
        engine.host.settle_parameters()
        self.source, self.scalars = engine.host.state_buffers()
        check_census(engine.host, engine.vps, rank, self.source, "before the moves")
        self.warn_of_last_gradients()
        self.before = shared_carry(engine, self.scalars)
        streams_of_rank = {"states": self.own_streams, "print": fingerprint(self.own_streams)}
        self.control.post(f"stream/{generation}/{rank}", streams_of_rank)
        self.layers.offer()
        if rank == 0:
            self.rest = rest_carry(engine, has_module=not self.layers.go_by_layers)
            kinds = [kind for kind in engine.vps.present_kinds() if any(kind == held for held, _ in self.source)]
            self.control.post(
                f"carry/{generation}", Carried.record(self.before, self.rest, kinds, bool(self.newcomers))
            )

    def _settle_results(self) -> None:
        """Where a death may abort an accelerator's collectives: what the last step had of them is there, on all of
        them, so a later death in the switch leaves nothing in doubt. In a world that has died nobody who is here is.
        """
        if self.old_world is None or not self.old_world.has_gate:
            return
        among = self._among(self.proposal.source_members)
        if among.reduce("doubts", self.engine.is_in_doubt, or_):
            self.engine.agree(lambda number: among.reduce(f"results/{number}", number, max))

    def _receive_carry(self) -> None:
        """Rank 0's, which all others must have, too; it was posted before rank 0 came to the meeting."""
        self.carried = Carried.from_record(self.control.value(f"carry/{self.proposal.generation}"))
        self.outcome.kinds = self.kinds
        if self.source_rank is not None:
            self._compare_carry(self.before, "before")
        self._settle_target()

    @property
    def kinds(self) -> tuple[str, ...]:
        """The state kinds that there are now."""
        return self.carried.kinds

    @property
    def proved_at_once(self) -> tuple[str, ...]:
        """Those of them whose digests are computed in the pause."""
        return self.kinds

    def _compare_carry(self, mine: dict[str, Any], when: str) -> None:
        """CertificateError unless this member has what rank 0 had before the moves."""
        prints = fingerprints(mine)
        parts = sorted(part for part, wanted in self.carried.prints.items() if prints.get(part) != wanted)
        if parts:
            raise CertificateError(
                f"carry of member {self.control.member} {when} the moves differs from rank 0's before them in: "
                f"{', '.join(parts)}"
            )

    def _digest_source(self) -> None:
        if self.source_rank is not None:
            self.source_digests, self.kept_share = side_digests(
                self.engine.vps,
                self.proposal.source_layout,
                self.source_rank,
                self.source,
                self.proved_at_once,
                self.preparation.kept,
                ready=self.preparation.sides.get((self.proposal.source_layout, self.source_rank)),
            )

    def _settle_replicas(self) -> None:
        """Before anything is read: tensors that several stages or tensor ranks hold are those of their owners."""
        layout, members = self.proposal.source_layout, self.proposal.source_members
        if layout.pipe * layout.tensor == 1 or self.source_rank is None or self.source_digests is None:
            return
        vps, rank, session = self.engine.vps, self.source_rank, self._among(members)
        drifting = differing(session, "drifting", vps, layout, rank, self.source_digests, "source")
        if not drifting:
            return
        self.swap.on_undo(self.settlement.undo)
        transport = self.preparation.ways.transport(self.preparation.world)
        self.settlement.take_owners(vps, rank, self.source, drifting, transport, self.control.timeout_seconds)
        found = session.reduce("distances", self.settlement.distances, furthest)
        types = self.engine.host.element_types
        tolerance = self.engine.settings.replica_tolerance
        self.outcome.warnings.append(judge_replicas(found, tolerance, {kind: types.of(kind) for kind in drifting}))
        self._digest_source()

    def _among(self, members: tuple[int, ...]) -> Session:
        """What some of the members do together in between."""
        key = f"{self.session.key}/source"
        record, stop = self.session.record, self.preparation.stop
        return Session(self.control, key, members, self.session.what, record=record, stop=stop)

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
            preparation.kept = preparation.reusable(self.source)
            local = vps.local(layout, self.target_rank)
            preparation.buffers = provide(local, preparation.memory, preparation.kept, self.source, zeros)
        absent = set(vps.present_kinds(self.proposal.source_layout)) - set(self.kinds)
        self.target = {key: held for key, held in preparation.buffers.items() if key[0] not in absent}

    def _rebuild(self) -> None:
        """Old optimizer off, new groups in, new optimizer on, over the memory that was made ready."""
        self.connect(self.session)
        world, old_world = self.preparation.world, self.old_world
        if self.source_rank is not None and old_world is not None:
            self.swap.off(lambda: self._back(old_world))
            self.swap.on_undo(self.settlement.undo)  # before the old optimizer reads them
        if self.target_rank is not None and world is not None:
            self.swap.into(world)
            scalars = self.scalars if self.source_rank is not None else scalars_of(self.carried.shared)
            made, self.preparation.made = self.preparation.made, None
            vps, layout = self.preparation.vps, self.proposal.layout
            self.swap.over(vps, layout, world, self.target_rank, self.target, scalars, made)

    def _back(self, world: World) -> None:
        """The old optimizer over the old memory, in the old world."""
        install(world)
        self.engine.host.attach(self.proposal.source_layout, world, self.old_config, self.source, self.scalars)
        put_back(self.engine, self.before)

    def _move(self) -> None:
        transport = self.preparation.ways.transport(self.preparation.world)
        self.outcome.stats = self._execute(self.preparation.moves(self.kinds), transport, self._link())
        self._send_rest(transport)
        self.outcome.layer_bytes = self.layers.exchange(transport, self.control.timeout_seconds)

    def _execute(
        self, plan: MemberPlan | ReadyPlan, transport: Transport, link: DeviceLink | None = None
    ) -> TransferStats:
        seconds, budget = self.control.timeout_seconds, self.engine.settings.memory_budget_bytes
        return execute(plan, self.source, self.target, transport, seconds, budget, link=link)

    def _link(self) -> DeviceLink | None:
        """Between devices, where the plan needs one; SwitchFailed if somebody has gone back without having used it."""
        link = self.preparation.ways.link(self.preparation.world, self.session.stop)
        is_lent = link is not None and link.communicator is self.preparation.ways.may_lend(self.old_world)
        if is_lent and not self._decides(begins=True):
            raise SwitchFailed("another member has given the switch up before the moves")
        return link

    def _decides(self, begins: bool) -> bool:
        """Whether moves over a communicator of the old world begin: what any member has said first counts for all."""
        return bool(self.control.decide(f"batches/{self.proposal.generation}", {"begin": begins})["begin"])

    def _send_rest(self, transport: Transport) -> None:
        """Send tensors of the carry (module buffers, the user's objects) from rank 0 to the members that start to work.

        They go down a tree in which no member sends to more than two others.
        """
        deadline = time.monotonic() + self.control.timeout_seconds
        tree = [self.proposal.source_members[0], *self.newcomers]
        if self.source_rank == 0:
            tensors: list[torch.Tensor] = []
            encode(self.rest, tensors)
            send_down(tree, self.control.member, tensors, transport, deadline)
        elif self.control.member in self.newcomers:
            tensors = blank_tensors(self.carried.rest)
            send_down(tree, self.control.member, tensors, transport, deadline)
            self.rest = decode(self.carried.rest, tensors)
            if fingerprint(self.rest) != self.carried.rest_print:
                raise CertificateError(
                    f"module buffers or carried objects of member {self.control.member} are not those of rank 0"
                )

    def _carry(self) -> None:
        if self.target_rank is None:
            return
        if self.source_rank is None:
            take_over(self.engine, self.carried.shared, {**self.rest, "resized": self.layers.is_resized})
        else:
            settle_counters(self.engine, self.carried.shared)
        self.layers.put()
        self.new_streams = self._streams_of(self.target_rank)
        streams.restore(self.new_streams)

    def _streams_of(self, rank: int) -> streams.Streams:
        """The random streams of a rank of the next world."""
        source, target = self.proposal.source_layout, self.proposal.layout
        generation, seed, place = self.proposal.generation, self.engine.job.job_seed, target.coordinate(rank)
        origin = streams.origin(source, target, rank)
        if origin is None:
            return streams.seeded(seed, place, generation)
        record = self.control.value(f"stream/{generation}/{origin}")
        found: streams.Streams = record["states"]
        is_forked = streams.is_forked(source, target, rank)
        made = streams.forked(found, seed, place, generation) if is_forked else found
        alike = streams.shared(made) == streams.shared(found) if is_forked else made == found
        if not alike or fingerprint(found) != record["print"]:
            raise CertificateError(
                f"random streams of data index {place['data']}: those of member {self.control.member} are not those "
                f"that member {self.proposal.source_members[origin]} had"
            )
        return made

    def _verify(self) -> dict[str, Any]:
        """What this member says of both sides."""
        begin = time.perf_counter()
        if self.target_rank is not None:
            self._check_target(self.target_rank)
        self.outcome.certificate_ms = self.outcome.phases_ms["digest"] + 1e3 * (time.perf_counter() - begin)
        self._measure()
        return self._report()

    def _report(self) -> dict[str, Any]:
        """This member's digests, as shares of the sums over all."""
        source, target = self.source_rank, self.target_rank
        vps, layout, members = self.preparation.vps, self.proposal.layout, self.proposal.members
        report: dict[str, Any] = {"source": None, "target": None}
        if source is not None and self.source_digests is not None:
            before = self.proposal.source_layout, self.proposal.source_members
            report["source"] = shares(vps, *before, source, self.source_digests)
        if target is not None and self.target_digests is not None:
            report["target"] = shares(vps, layout, members, target, self.target_digests)
        return report

    def _check_target(self, rank: int) -> None:
        layout = self.proposal.layout
        vps = self.preparation.vps.with_layout(layout, self.proposal.members)
        held, scalars = self.engine.host.state_buffers()
        check_census(self.engine.host, vps, rank, held, "after the moves")
        present = vps.present_kinds()
        gone = [key for key in self.target if key[0] in self.kinds and key[0] in present and key not in held]
        if gone:
            raise CensusError(f"rank {rank}: {gone[0][0]} of {gone[0][1]} is not in the rebuilt optimizer")
        kept, kinds = self.preparation.kept, tuple(kind for kind in self.proved_at_once if kind in present)
        ready = self.preparation.sides.get((layout, rank))
        self.target_digests, _ = side_digests(vps, layout, rank, held, kinds, kept, self.kept_share, ready)
        if streams.capture() != self.new_streams:
            raise CertificateError(f"random streams of rank {rank} are not those that its place in the layout has")
        self._compare_carry(shared_carry(self.engine, scalars), "after")

    def _judge(self, report: dict[str, Any]) -> Decision:
        """On the first member: the certificate, from what all say."""
        vps, layouts = self.preparation.vps, (self.proposal.source_layout, self.proposal.layout)
        try:
            said = certify(vps, *layouts, report)
        except CertificateError as error:
            return Decision(False, f"CertificateError: {error}")
        return Decision("digest" in said, "copies of one state differ" if "doubts" in said else "", said=said)

    def _explained(self, wrong: dict[str, Doubts]) -> str:
        """Whose copies differ: the same words on all members."""
        side = next(each for each in SIDES if wrong[each])
        proposal, session = self.proposal, self.session
        layout, members, own = {
            "source": (proposal.source_layout, proposal.source_members, self.source_digests),
            "target": (proposal.layout, proposal.members, self.target_digests),
        }[side]
        among = Session(self.control, session.key, session.members, session.what, stop=self.preparation.stop)
        what = among, "differing", self.preparation.vps, layout, members, own, wrong[side], side
        try:
            return f"CertificateError: {explained(*what)}"
        except (DynatrainError, td.DistError) as error:  # it is rolled back in any case
            return f"CertificateError: copies of one state differ, and it is not known whose ({error})"

    # ---- at and after the commit ---------------------------------------------------------------------------------

    def _commit(self) -> None:
        """All have the record; let go of the old world once all have said so."""
        engine, proposal = self.engine, self.proposal
        self.swap.keep()
        engine.enter(proposal, self.preparation.world if self.target_rank is not None else None)
        if PROCESS.is_shared and self.target_rank is not None:
            engine.activate()  # since the vote it was another engine's turn
        self.preparation.committed()
        self.acknowledge(self.session)
        if self.target_rank is not None:
            engine.host.forget_steps()
        self.preparation.ways.end()
        self.target, self.preparation.buffers, self.preparation.sides = {}, {}, {}
        self.control.track_teardown(release(self.source))
        if self.old_world is not None:
            self.control.track_teardown(drop(self.old_world))
        if self.target_rank is None:
            engine.host.leave_world()
            engine.launch.install()
            if self.preparation.world is not None:
                self.control.track_teardown(drop(self.preparation.world))
        elif self.preparation.world is not None:
            self.control.track_teardown(self.preparation.world.retire_transfer())

    def _roll_back(self) -> None:
        """As if nobody had asked: the old optimizer over the old memory, the old groups, the old streams."""
        try:
            self._mend_communicator()
        finally:
            self.swap.undo()
            self._measure()
            self.source = {}
            self.target = {}
            self.preparation.abandon()

    def _mend_communicator(self) -> None:
        """Moves that failed over a communicator of the old world have left it in any state: all make it anew.

        SwitchFailed if that does not come about: the old world cannot compute without it, and the job has to end.
        """
        old, lent = self.old_world, self.preparation.ways.may_lend(self.old_world)
        if old is None or lent is None or self.outcome.is_uncertain or not self._decides(begins=False):
            return
        end([lent], is_broken=True)
        seconds = self.control.timeout_seconds + END_SECONDS  # another one may have waited for its device so long
        try:
            old.renew(lent, f"anew/{self.proposal.generation}", seconds)
        except RuntimeError as error:
            raise SwitchFailed(
                f"the switch to {self.proposal.layout} was rolled back ({self.outcome.reason}), and the communicator "
                f"that its moves had used could not be made anew: {error}. Start the job again from a checkpoint"
            ) from error

    # ---- small things --------------------------------------------------------------------------------------------

    @property
    def newcomers(self) -> list[int]:
        """Members that start to work with this switch."""
        return [member for member in self.proposal.members if member not in self.proposal.source_members]

    def _measure(self) -> None:
        """State held at once on this member: source, what the target adds to it, and staging."""
        held = {_memory(buffer) for buffer in (*self.source.values(), *self.target.values())}
        staging = self.outcome.stats.staging_peak if self.outcome.stats else 0
        self.outcome.peak_memory = _union_bytes(held) + staging


def _memory(buffer: torch.Tensor) -> tuple[int, int]:
    return buffer.data_ptr(), buffer.data_ptr() + buffer.numel() * buffer.element_size()


def _union_bytes(runs: set[tuple[int, int]]) -> int:
    """Bytes covered by address runs that may overlap."""
    total, end = 0, 0
    for start, stop in sorted(runs):
        total += max(0, stop - max(start, end))
        end = max(end, stop)
    return total
