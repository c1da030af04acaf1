"""A switch on one member: everything from its start to its commit or roll-back.

Read `vote`, then the phases that `_carry_out` names, in order, then `conclude`:

| phase | every member |
|---|---|
| drain | checks that no work is in progress, records its state, and posts its random streams |
| meet | waits for all others at one boundary, and gets the carry (extra state that is no tensor) of rank 0 |
| digest | computes digests of the state that it holds |
| rebuild | connects the next world, detaches the old optimizer, and attaches the new one to the prepared memory |
| move | sends and receives |
| carry | loads counters, hyper-parameters and random streams |
| verify | checks its own part of the new state, and reports digests of both sides for the certificate |

The first member judges the sum of all reports. Its decision is the record, which is written once; every member then
commits or rolls back. A failure before the record rolls the switch back on all members; a failure after it does so on
none. Every member keeps the source until all members have acknowledged the record, or another world is entered.

A *late* switch has two votes, because state that no forward pass reads is moved during the new world's first global
batch. The first vote, in the pause, confirms that everything that a forward pass reads has arrived; the remaining state
kinds are the *late kinds* (`Preparation.late_kinds`). If the first vote is a yes, the new world is *entered*: it
trains, but no record is written yet. Every member keeps the source: its buffers, its groups, and the means to undo the
swap. A thread on each member moves the late kinds into buffers that the new optimizer already uses, over a process
group of their own, and computes the digests of both sides, including the weights, since nothing writes to either side
before an optimizer step. The second vote comes before that step, and its certificate covers all kinds. If it is a yes,
the record is written, and the switch ends like any other. If it is a no, the global batch is discarded, and all steps
of entering are undone in reverse order.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from operator import or_
from traceback import clear_frames
from typing import Any

import torch
import torch.distributed as td

from ds_dynatrain.adapters.deepspeed.support_checks import refuse_at_boundary
from ds_dynatrain.adapters.groups.communicators import END_SECONDS, end
from ds_dynatrain.adapters.groups.device import is_accelerated, on_separate_stream, start_thread, synchronize
from ds_dynatrain.adapters.groups.world import World
from ds_dynatrain.adapters.groups.worlds import drop
from ds_dynatrain.adapters.zero.optimizers import forget_running_products
from ds_dynatrain.adapters.zero.regroup import refuse_changes
from ds_dynatrain.adapters.zero.state import Buffers
from ds_dynatrain.errors import CensusError, CertificateError, DynatrainError, OutcomeUnknown, SwitchFailed
from ds_dynatrain.membership import agreement
from ds_dynatrain.membership.proposal import CONNECTING, Proposal
from ds_dynatrain.membership.session import Session, VoteResult
from ds_dynatrain.reshard import streams
from ds_dynatrain.reshard.carry import LoadReason, scalars_of, shared_carry, take
from ds_dynatrain.reshard.certificate import (
    SIDES,
    Shares,
    SideDigests,
    certify,
    differing,
    explained,
    folded,
    joined_sides,
    shares,
    side_digests,
)
from ds_dynatrain.reshard.core import EngineCore, OldState
from ds_dynatrain.reshard.encoding import decode, encode, fingerprint
from ds_dynatrain.reshard.layers import MovingStates
from ds_dynatrain.reshard.preparation import ABANDON_SECONDS, Outcome, Preparation
from ds_dynatrain.reshard.process import PROCESS
from ds_dynatrain.reshard.replicas import Settlement, furthest
from ds_dynatrain.reshard.replicas import judge as judge_replicas
from ds_dynatrain.reshard.swap import Before, Swap, check_census
from ds_dynatrain.space import Layout, row_of
from ds_dynatrain.transfer import DeviceLink, ReadyPlan, TransferStats, Transport, execute


def meet(session: Session, engine: EngineCore, preparation: Preparation, place: str, carry: Any = None) -> Any:
    """Wait until all members are prepared and have reached the step of the switch; return a record from rank 0.

    place: the loader or call at which the script of this member is.
    carry: on rank 0, the record for all other members.

    Raises SwitchFailed if a member could not be prepared.
    """
    agreement.wait_until_prepared(preparation.board, preparation.proposal, session.stop)
    carry = agreement.meet(session, preparation.proposal, int(engine.global_steps), place, carry)
    preparation.join()
    return carry


def drain(engine: EngineCore, proposal: Proposal, rank: int, outcome: Outcome) -> Before:
    """Check that a working member is between two global batches and that every element is where the layout predicts.
    Return the member's state.

    Raises SwitchRefused if a global batch is unfinished or the registered parameters have changed, and CensusError if
    an element is elsewhere.
    """
    refuse_at_boundary(engine.host)
    refuse_changes(engine.host)
    before = Before.of(engine)
    check_census(engine.host, engine.vps, rank, before.buffers, "before the moves")
    if engine.host.without_gradient:
        outcome.warnings += last_gradients_warning(engine, proposal)
    return before


def last_gradients_warning(engine: EngineCore, proposal: Proposal) -> list[str]:
    """Return a warning if the switch changes how parameters without a gradient are updated; [] if it does not.

    ZeRO-3, and CPU offload in stages 1 to 3, update such a parameter with its last gradient; other stages do not.
    """
    names, vps = engine.host.without_gradient, engine.vps
    rows = [row_of(kind.name) for kind in vps.kinds]
    offloads = any(row.is_offloaded for row in rows)
    keeping = {stage for row in rows if row.is_gradient for stage in row.stages}
    if len({layout.zero_stage in keeping for layout in (proposal.source_layout, proposal.layout)}) == 1:
        return []
    where = "stages 1 to 3 re-use their last gradient under CPU offload, stage 0 does"
    where = where if offloads else "stage 3 re-uses their last gradient, the other stages do"
    return [
        f"{len(names)} parameters got no gradient in the last step ({', '.join(names[:3])}): ZeRO {where} not, "
        "so their updates change with the stage"
    ]


def connect(preparation: Preparation, old_world: World | None, session: Session) -> None:
    """Connect the next world's process groups over the accelerator, while all members wait and no device work is in
    progress.

    Called on all members of either world. Does nothing without an accelerator, or if the groups are connected already.

    Raises MemberMissing if a member does not arrive, and RuntimeError if connecting does not succeed within the
    timeout. In that case, connections made so far are closed together with the preparation.
    """
    world = preparation.world
    if not is_accelerated() or world is None or preparation.connections is not None:
        return
    synchronize()
    session.reduce(CONNECTING, None, lambda *_: None, doing="connecting the next world's members")
    preparation.connections = world.connect(preparation.board.timeout_seconds, old_world, session.stop)


def connect_ahead(preparation: Preparation, old_world: World | None) -> VoteResult:
    """Connect the next world's process groups some steps before the switch; return the decision of all members.

    If the decision is negative, the switch cannot take place, and members have changed nothing else. Raises
    OutcomeUnknown if the members' key-value store is lost.
    """
    board, proposal = preparation.board, preparation.proposal
    what = f"connecting for the switch to {proposal.layout}"
    session = Session(board, proposal.ahead_key, proposal.union, what, stop=preparation.stop)

    def work() -> None:
        preparation.join()
        connect(preparation, old_world, session)

    decision = session.vote(work)
    if decision.commit and preparation.connections is not None:
        preparation.connections = replace(preparation.connections, is_ahead=True)
    elif session.is_first and not decision.commit:  # members that take no part in the vote read this record
        board.decide(f"record/{proposal.generation}", {"commit": False, "reason": decision.reason})
    return decision


POLL_SECONDS = 0.02


class Transaction:
    """A switch on one member; see the docstring of the module. Every member of the old or new world makes one.

    Call `vote` between two steps, and then `conclude`. For a late switch (optimizer state moves during the next global
    batch) call `enter` between two steps, and then `settle` before the next optimizer step.

    place: the loader or call at which the script of this member is.
    is_part: whether this is one of several engines in the process, for which the caller makes one decision.
    interrupt: an exception to raise after `conclude`; None if there is none.
    begin: the start of the switch, from `time.perf_counter()`.
    was: layout and members before the switch.
    source_rank: this member's rank before the switch; None if it has none.
    target_rank: this member's rank after the switch; None if it has none.
    old_world: the world before the switch; None if this member was idle.
    sides: layout, members and this member's rank, before ("source") and after ("target").
    """

    def __init__(self, engine: EngineCore, preparation: Preparation, place: str, is_part: bool = False) -> None:
        self.begin, self.was = time.perf_counter(), (engine.layout, engine.members)
        self.engine, self.preparation, self.place = engine, preparation, place
        self.proposal, self.control = preparation.proposal, preparation.board
        self.source_rank, self.target_rank = preparation.source_rank, preparation.target_rank
        self.old_world: World | None = engine.world
        self.outcome, self.swap, self.settlement = Outcome(), Swap(engine), Settlement()
        proposal, generation = self.proposal, self.proposal.generation
        self.sides: dict[str, tuple[Layout, tuple[int, ...], int | None]] = {
            "source": (proposal.source_layout, proposal.source_members, self.source_rank),
            "target": (proposal.layout, proposal.members, self.target_rank),
        }
        self.moving = MovingStates(engine, self.control, proposal)
        self.before: Before | None = None
        self.source: Buffers = {}
        self.target: Buffers = {}
        self.carried: dict[str, Any] = {}
        """Record received from rank 0: its extra state that must be equal on all members ("shared"), and its state
        kinds ("kinds")."""
        self.kinds: tuple[str, ...] = ()
        """State kinds that exist now."""
        self.proved_at_once: tuple[str, ...] = ()
        """State kinds whose digests are computed in the pause."""
        self.new_streams: streams.Streams | None = None
        self.digests: dict[str, SideDigests] = {"source": {}, "target": {}}
        self.shares: dict[str, Shares | None] = {}
        """This member's weighted digests before and after the switch."""
        self.kept_share: SideDigests = {}
        """Digests of the part of the old state that lies in buffers that the next layout reuses."""
        self.digest = ""
        self.interrupt: BaseException | None = None
        kind = "part" if is_part else "entered" if proposal.late else "record"
        self.session = self._session(proposal.key, f"{kind}/{generation}")
        self._final = self._session(f"{proposal.key}/late", f"record/{generation}", is_patient=True)
        self._entered: VoteResult | None = None
        self._thread: threading.Thread | None = None
        self._late_error: BaseException | None = None

    def _session(
        self, key: str, record: str | None = None, members: tuple[int, ...] = (), is_patient: bool = False
    ) -> Session:
        """Return a session for joint steps of some members; by default, of all members of the old and the new world."""
        what, stop = f"switch to {self.proposal.layout}", self.preparation.stop
        members = members or self.proposal.union
        return Session(self.control, key, members, what, record=record, is_patient=is_patient, stop=stop)

    # ---- from the vote to the end --------------------------------------------------------------------------------

    def vote(self, work: Callable[[], dict[str, Any]] | None = None) -> VoteResult:
        """Do everything that can fail, and return the decision of all members. A failure on one member rolls the switch
        back on all.

        work: does everything that can fail and returns this member's report; by default `_carry_out`.
        """
        try:
            decision = self.session.vote(work or self._carry_out, joined_sides, self._judge)
        except OutcomeUnknown as lost:  # other members may have read a commit
            self.outcome.is_uncertain, self.interrupt = True, lost.__cause__ or lost
            if self.control.watch is not None:  # an elastic job learns the outcome later
                self.control.lost, self.interrupt = None, lost.__cause__
            return VoteResult(False, str(lost))
        self.interrupt = decision.interrupt
        if decision.said and "digest" in decision.said:
            self.digest = str(decision.said["digest"])
        elif decision.said:
            decision = replace(decision, reason=f"CertificateError: {self._explained()}")
        return decision

    def conclude(self, decision: VoteResult) -> None:
        """Commit or roll back, as decided. Also called without `vote` if another engine of the process has failed
        earlier."""
        self.outcome.committed, self.outcome.reason = decision.commit, decision.reason
        self.outcome.digest = self.digest if decision.commit else ""
        self.outcome.is_rebuilt = self.swap.has_begun
        with self.outcome.phase("commit" if decision.commit else "roll back"):
            self._commit() if decision.commit else self._roll_back()

    def _carry_out(self) -> dict[str, Any]:
        """Run all phases of the switch that come before the vote; return this member's report."""
        phase = self.outcome.phase
        with phase("drain"):
            self._drain()
        with phase("meet"):
            self._meet()
        with phase("digest"):
            self.kept_share = self._digest("source", self.source, self.proved_at_once)
            layout = self.proposal.source_layout
            if layout.pipe * layout.tensor > 1 and self.source_rank is not None:
                self._settle_replicas(self.source_rank)
        with phase("rebuild"):
            self._rebuild()
        with phase("move"):
            self._move()
        with phase("carry"):
            self._carry()
        with phase("verify"):
            return self._verify()

    # ---- the phases before the vote ------------------------------------------------------------------------------

    def _drain(self) -> None:
        """Check that no work is in progress; record this member's state, and post its random streams.

        Rank 0 also prepares the extra state that all members get from it when they meet.
        """
        engine, generation, rank = self.engine, self.proposal.generation, self.source_rank
        if rank is None:
            return
        self.before = drain(engine, self.proposal, rank, self.outcome)
        self.source = self.before.buffers
        if self.proposal.late:  # forward passes of a discarded batch must not change the module's buffers
            held = [(buffer, buffer.detach().clone()) for buffer in engine.host.module.buffers()]
            self.swap.on_undo(_put_back, held)
        own = self.swap.streams
        self.control.post(f"stream/{generation}/{rank}", {"states": own, "print": fingerprint(own)})
        self.moving.offer()
        if rank == 0:
            kinds = engine.vps.present_kinds(among={kind for kind, _ in self.source})
            self.carried = {"shared": encode(self.before.shared, None), "kinds": kinds}

    def _meet(self) -> None:
        """Wait until all members are prepared and have reached the step of the switch, and get the extra state from
        rank 0."""
        record = meet(self.session, self.engine, self.preparation, self.place, self.carried)
        if self.old_world is not None and self.old_world.has_gate:
            self._settle_results()
        self.carried = {**record, "shared": decode(record["shared"], [])}
        self.kinds = self.outcome.kinds = self.proved_at_once = tuple(record["kinds"])
        if self.proposal.late:  # a backward pass overwrites gradients, so they can only be compared now
            self.proved_at_once = tuple(kind for kind in self.kinds if row_of(kind).is_gradient)
        if self.before is not None:
            self._compare_carry(self.before.shared, "before")
        if self.target_rank is not None:
            self.target = self.preparation.target(self.target_rank, self.source, self.kinds)

    def _settle_results(self) -> None:
        """Make sure that all members of the old world have the results of the last step's collectives.

        Called only if a member's death may abort collectives on an accelerator. After this call, a death during the
        switch can no longer make those results doubtful. Does nothing if no member has doubts, as in a world that has
        already lost a member.
        """
        among = self._among_sources()
        if among.reduce("doubts", self.engine.is_in_doubt, or_):
            self.engine.agree(lambda number: among.reduce(f"results/{number}", number, max))

    def _among_sources(self) -> Session:
        """Return a session for a joint step of only the members of the old world."""
        return self._session(f"{self.session.key}/source", self.session.record, self.proposal.source_members)

    def _digest(
        self, side: str, held: Buffers, kinds: tuple[str, ...], share: SideDigests | None = None
    ) -> SideDigests:
        """Compute and store the digests of this member's buffers before or after the switch. Return the part of them
        that covers buffers which the next layout reuses.

        side: "source" or "target".
        share: this part, if it was computed before.
        """
        layout, members, rank = self.sides[side]
        if rank is None:
            return {}
        vps, ready = self.preparation.vps.with_layout(layout, members), self.preparation.sides.get((layout, rank))
        kinds = vps.present_kinds(layout, kinds)
        found, share = side_digests(vps, layout, rank, held, kinds, self.preparation.kept, share, ready)
        self.digests[side] = {**self.digests[side], **found}
        return share

    def _settle_replicas(self, rank: int) -> None:
        """If replicas of a tensor have drifted apart, overwrite them with the values of the tensor's owner, before any
        of them is read."""
        vps, session = self.engine.vps, self._among_sources()
        drifting = differing(session, "drifting", vps, vps.layout, rank, self.digests["source"], "source")
        if not drifting:
            return
        self.swap.on_undo(self.settlement.undo)
        transport = self.preparation.ways.transport(self.preparation.world)
        self.settlement.take_owners(vps, rank, self.source, drifting, transport, self.control.timeout_seconds)
        found = session.reduce("distances", self.settlement.distances, furthest)
        types = self.engine.host.element_types
        tolerance = self.engine.settings.replica_tolerance
        self.outcome.warnings.append(judge_replicas(found, tolerance, {kind: types.of(kind) for kind in drifting}))
        self.kept_share = self._digest("source", self.source, self.proved_at_once)

    def _rebuild(self) -> None:
        """Detach the optimizer from its old buffers, install the new process groups, and attach the optimizer to the
        prepared buffers."""
        if is_accelerated():
            self.connect()
        world, before = self.preparation.world, self.before
        if before is not None:
            self.swap.off(before)
            self.swap.on_undo(self.settlement.undo)  # undone before the old optimizer reads them
        if self.target_rank is not None and world is not None:
            self.swap.into(world)
            scalars = scalars_of(self.carried["shared"]) if before is None else before.scalars
            made, self.preparation.made = self.preparation.made, None
            vps, layout = self.preparation.vps, self.proposal.layout
            self.swap.over(vps, layout, world, self.target_rank, self.target, scalars, made)

    def connect(self) -> None:
        """Connect the next world's groups over the accelerator, unless they are connected already."""
        connect(self.preparation, self.old_world, self.session)
        self.outcome.connections = self.preparation.connections or self.outcome.connections

    def _move(self) -> None:
        """Fill the new buffers; send module buffers, user objects and layers' states to members that lack them."""
        transport, seconds = self.preparation.ways.transport(self.preparation.world), self.control.timeout_seconds
        link = None if self.preparation.ways.batching is None else self._link()
        self.outcome.cost = self.preparation.cost(self.kinds)
        self.outcome.best = self.preparation.best.get(self.kinds)
        self.outcome.stats = self._execute(self.preparation.moves(self.kinds), transport, link)
        self.outcome.layer_bytes = self.moving.exchange(transport, seconds)

    def _execute(self, plan: ReadyPlan, transport: Transport, link: DeviceLink | None = None) -> TransferStats:
        return execute(plan, self.source, self.target, transport, self.control.timeout_seconds, link)

    def _link(self) -> DeviceLink | None:
        """Return the link that sends messages between accelerators; None if there is none.

        Raises SwitchFailed if the link uses a communicator of the old world and another member has already given up the
        switch.
        """
        link = self.preparation.ways.link(self.preparation.world, self.session.stop)
        is_lent = link is not None and link.communicator is self.preparation.ways.may_lend(self.old_world)
        if is_lent and not self._decides(begins=True):
            raise SwitchFailed("another member has given the switch up before the moves")
        return link

    def _decides(self, begins: bool) -> bool:
        """Decide whether moves over a communicator of the old world may begin. The first member that calls this decides
        for all; return that decision."""
        return bool(self.control.decide(f"batches/{self.proposal.generation}", {"begin": begins})["begin"])

    def _carry(self) -> None:
        """Load rank 0's counters and hyper-parameters, and the random streams that belong to this member's new rank."""
        source, target, rank = self.proposal.source_layout, self.proposal.layout, self.target_rank
        if rank is None:
            return
        is_resized = (source.expert, source.tensor) != (target.expert, target.tensor)
        if self.source_rank is None:
            take(self.engine, {**self.carried["shared"], **self.moving.rest(), "resized": is_resized}, LoadReason.START)
        else:
            take(self.engine, self.carried["shared"], LoadReason.NEW_OPTIMIZER)
        self.moving.put(is_resized)
        seed, generation = self.engine.job.job_seed, self.proposal.generation
        self.new_streams = streams.continued(source, target, rank, seed, generation, self._streams_of)
        streams.restore(self.new_streams)

    def _streams_of(self, rank: int) -> streams.Streams:
        """Return the random streams of a rank of the old world. Raises CertificateError if they were altered on the
        way."""
        if rank == self.source_rank:
            return self.swap.streams
        record = self.control.value(f"stream/{self.proposal.generation}/{rank}")
        found: streams.Streams = record["states"]
        if fingerprint(found) != record["print"]:
            raise CertificateError(
                f"random streams of rank {rank}: those of member {self.control.member} are not those that member "
                f"{self.proposal.source_members[rank]} had"
            )
        return found

    def _verify(self) -> dict[str, Any]:
        """Check the new state on this member; return this member's digests of the state before and after the switch, as
        a report."""
        begin, rank, layout = time.perf_counter(), self.target_rank, self.proposal.layout
        if rank is not None:
            vps = self.preparation.vps.with_layout(layout, self.proposal.members)
            held, scalars = self.engine.host.state_buffers()
            check_census(self.engine.host, vps, rank, held, "after the moves")
            for kind, name in self.target.keys() - held.keys():
                if kind in self.kinds and vps.is_held(layout, kind):
                    raise CensusError(f"rank {rank}: {kind} of {name} is not in the rebuilt optimizer")
            self._digest("target", held, self.proved_at_once, self.kept_share)
            if streams.capture() != self.new_streams:
                raise CertificateError(f"random streams of rank {rank} are not those that its place in the layout has")
            self._compare_carry(shared_carry(self.engine, scalars), "after")
        self.outcome.certificate_ms = self.outcome.phases_ms["digest"] + 1e3 * (time.perf_counter() - begin)
        return self._report()

    def _compare_carry(self, mine: dict[str, Any], when: str) -> None:
        """Raise CertificateError if the extra state that must be equal on all members differs between this member and
        rank 0.

        when: "before" or "after" the moves, for the error.
        """
        first = self.carried["shared"]
        names = sorted(mine.keys() | first.keys())
        parts = [name for name in names if fingerprint(mine.get(name)) != fingerprint(first.get(name))]
        if parts:
            raise CertificateError(
                f"carry of member {self.control.member} {when} the moves differs from rank 0's before them in: "
                f"{', '.join(parts)}"
            )

    def _report(self) -> dict[str, Any]:
        """Return a summary of this member's digests before and after the switch, to be added up over all members."""
        self._measure()
        vps = self.preparation.vps
        for side, (layout, members, rank) in self.sides.items():
            self.shares[side] = None if rank is None else shares(vps, layout, members, rank, self.digests[side])
        return {side: mine and folded(mine) for side, mine in self.shares.items()}

    def _measure(self) -> None:
        """Record the peak memory of the switch on this member, in bytes: old buffers, newly allocated buffers, and
        staging."""
        total, end = 0, 0
        for held in sorted([*self.source.values(), *self.target.values()], key=torch.Tensor.data_ptr):
            start, stop = held.data_ptr(), held.data_ptr() + held.nbytes
            total, end = total + max(0, stop - max(start, end)), max(end, stop)
        staging = self.outcome.stats.staging_peak if self.outcome.stats else 0
        self.outcome.peak_memory = total + staging

    # ---- the judgement -------------------------------------------------------------------------------------------

    def _judge(self, report: dict[str, Any]) -> VoteResult:
        """Return the decision that follows from the summed digests of all members. Called on the first member."""
        said = self._certified(report)
        return VoteResult("digest" in said, "" if "digest" in said else "the digests of state differ", said=said)

    def _certified(self, report: dict[str, Any]) -> dict[str, Any]:
        """Return the result of `certify`, which is {"digest": ...} or {"doubts": ...}; {"error": ...} with the text of
        its error if it raises one."""
        try:
            return certify(self.preparation.vps, self.proposal.source_layout, self.proposal.layout, report)
        except CertificateError as error:
            return {"error": str(error)}

    def _explained(self) -> str:
        """Find out which tensor differs, and return a message that names it. If replicas of the tensor differ, the
        message also names two members that hold them.

        Called on all members, after their summed digests have differed. The message is the same on all of them.
        """
        among = self._session(self.session.key)
        try:
            said = among.reduce("shares", self.shares, joined_sides, self._certified)
            if "doubts" not in said:
                return str(said.get("error", "the digests of state differ, and those of no tensor do"))
            side = next(each for each in SIDES if said["doubts"][each])
            layout, members, _ = self.sides[side]
            own, wrong = self.digests[side] or None, said["doubts"][side]
            return explained(among, "differing", self.preparation.vps, layout, members, own, wrong, side)
        except (DynatrainError, td.DistError) as error:  # the switch is rolled back in any case
            return f"the digests of state differ, and it is not known whose ({error})"

    # ---- commit, or undo -----------------------------------------------------------------------------------------

    def _commit(self) -> None:
        """Enter the new world permanently. The old world is released once all members have read the decision."""
        engine, world, ways = self.engine, self.preparation.world, self.preparation.ways
        works, track = self.target_rank is not None, self.control.teardowns.add
        self.swap.keep()
        engine.enter(self.proposal, world if works else None)
        if PROCESS.is_shared and works:
            engine.activate()  # another engine may have used the process since the vote
        self.preparation.committed()
        engine.old_state = OldState(self.session, self.source, self.old_world, ways)
        if self.outcome.acknowledge(self.session):
            engine.release_old_state()
        if works:
            forget_running_products(engine.host.basic_optimizer)
        else:
            engine.host.leave_world()
            engine.launch.install()
        self.source, self.target, self.preparation.buffers, self.preparation.sides = {}, {}, {}, {}
        if world is not None:
            track(world.retire_transfer() if works else drop(world))

    def _roll_back(self) -> None:
        """Undo the switch: restore the optimizer with its old buffers, the old process groups and the old random
        streams."""
        try:
            self._mend_communicator()
        finally:
            self.swap.undo()
            self._measure()
            self.source, self.target, self.before = {}, {}, None
            self.preparation.abandon()
        if self._thread is not None:
            self._thread.join(ABANDON_SECONDS)  # it may still wait for messages that will never come
            if self.source_rank is not None:
                self.engine.repeat_places()

    def _mend_communicator(self) -> None:
        """Replace the communicator of the old world that the moves used, because failed moves may have broken it.

        Called on all members. Raises SwitchFailed if it cannot be replaced: the old world cannot compute without it,
        and the job has to end.
        """
        old, lent = self.old_world, self.preparation.ways.may_lend(self.old_world)
        if old is None or lent is None or self.outcome.is_uncertain or not self._decides(begins=False):
            return
        end([lent], is_broken=True)
        seconds = self.control.timeout_seconds + END_SECONDS  # another member may wait as long for its device
        try:
            old.renew(lent, f"anew/{self.proposal.generation}", seconds)
        except RuntimeError as error:
            raise SwitchFailed(
                f"the switch to {self.proposal.layout} was rolled back ({self.outcome.reason}), and the communicator "
                f"that its moves had used could not be made anew: {error}. Start the job again from a checkpoint"
            ) from error

    # ---- a late switch: the two votes ----------------------------------------------------------------------------

    def enter(self, discard: Callable[[], None]) -> bool:
        """Hold the first vote of a late switch (optimizer state moves during the next global batch); return whether
        this member now trains in the new world. If not, call `settle` at once.

        discard: drops the part of a global batch trained so far, and returns to the beginning of that batch.
        """
        self._entered = self.vote()
        if not self._entered.commit:
            return False
        synchronize()  # the thread's queue does not wait for the work of the pause
        self._thread = start_thread(self._move_late, f"dynatrain-late-{self.proposal.generation}")
        if self.target_rank is None:
            return False
        engine = self.engine
        was = engine.world, engine.layout, engine.members

        def go_back() -> None:
            engine.world, engine.layout, engine.members = was

        self.swap.on_undo(go_back)
        engine.enter(self.proposal, self.preparation.world)
        self.swap.on_undo(discard)
        return True

    @property
    def worlds(self) -> tuple[World, ...]:
        """The worlds before and after the switch, as far as this member is in them."""
        return tuple(world for world in (self.old_world, self.preparation.world) if world is not None)

    @property
    def has_entered(self) -> bool:
        """Whether the first vote of a late switch was positive, so that the new world trains on this member or on
        others."""
        return self._entered is not None and self._entered.commit

    def settle(self) -> None:
        """Hold the second vote of a late switch, and commit or roll back accordingly. If the first vote was negative,
        only roll back."""
        decision = self._entered
        if decision is None:
            raise RuntimeError("enter comes first")
        if decision.commit:
            self.session = self._final
            with self.outcome.phase("late"):
                decision = self.vote(self._arrive)
        elif not self.outcome.is_uncertain:
            with suppress(RuntimeError, OSError):  # for members without a part in it: they only read the record
                self._final.decide(replace(decision, said=None, interrupt=None))
        self.conclude(decision)

    def give_up(self, reason: str) -> None:
        """Decide against a late switch on behalf of all members, before its second vote; `settle` then rolls it
        back."""
        with suppress(RuntimeError, OSError):
            self._final.decide(VoteResult(False, f"member {self.control.member}: {reason}"))

    def _move_late(self) -> None:
        """Move the optimizer state of a late switch, and compute the digests before and after. Runs in a background
        thread."""
        begin = time.perf_counter()
        try:
            with on_separate_stream():
                moves = self.preparation.moves(self.kinds, is_late=True)
                ways, world = self.preparation.ways, self.preparation.world
                self.outcome.late_stats = self._execute(moves, ways.transport(world))
                kinds = tuple(kind for kind in self.kinds if not row_of(kind).is_gradient)
                self._digest("target", self.target, kinds, self._digest("source", self.source, kinds))
        except BaseException as error:
            clear_frames(error.__traceback__)  # they keep the group, whose end wakes the same thread of others
            self._late_error = error
        self.outcome.late_ms = 1e3 * (time.perf_counter() - begin)

    def _arrive(self) -> dict[str, Any]:
        """Wait until the optimizer state has been moved; return this member's report on all state for the second vote.

        Raises the error of the background thread that moves the state, if it had one. Every wait in that thread has a
        timeout.
        """
        self._final.stop()
        while self._thread is not None and self._thread.is_alive():
            self._thread.join(POLL_SECONDS)
            self._final.stop()
        if self._late_error is not None:
            raise self._late_error
        return self._report()


def _put_back(held: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Restore tensors: copy the second tensor of each pair into the first."""
    with torch.no_grad():
        for tensor, value in held:
            tensor.copy_(value)
