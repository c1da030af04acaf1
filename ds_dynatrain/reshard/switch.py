"""One switch on one member: meet, drain, rebuild, move, verify, commit, or roll back.

Up to the commit record every failure ends in a roll-back on all members, after it in none: the record is written once,
by the member that comes first, and each member reads what was written before it acts. Source buffers are held until
every member has acknowledged the record, or the time-out has passed.

A *late* switch has two votes: state that no forward pass reads moves during the first global batch of the new world.
The first vote, in the pause, says that everything that a forward pass reads has arrived (`Preparation.late_kinds` are
the other kinds). If it is a yes, the new world is *entered*: it trains, and no record is written. Every member keeps
the source: buffers, groups, and the means to undo the swap. A thread on each member moves the late kinds into buffers
that lie under the new optimizer already, over a group of their own, and computes the digests of both sides, of weights
too: nothing writes to either before an optimizer step. The second vote comes before that step, and its certificate is
about all kinds. If it is a yes, the record is written, and the switch ends like any other. If it is a no, the global
batch is void: entering is undone, the last step first.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from operator import or_
from typing import Any

import torch
import torch.distributed as td

from ds_dynatrain.adapters.communicators import END_SECONDS, Connections, end
from ds_dynatrain.adapters.device import beside, start_thread, synchronize
from ds_dynatrain.adapters.memory import provide, release, zeros
from ds_dynatrain.adapters.state import Buffers
from ds_dynatrain.adapters.world import World
from ds_dynatrain.adapters.worlds import drop
from ds_dynatrain.errors import CensusError, CertificateError, DynatrainError, OutcomeUnknown, SwitchFailed
from ds_dynatrain.membership.session import Decision, Session
from ds_dynatrain.reshard import streams
from ds_dynatrain.reshard.carry import (
    Carried,
    fingerprints,
    rest_carry,
    scalars_of,
    settle_counters,
    shared_carry,
    take_over,
)
from ds_dynatrain.reshard.census import check_census
from ds_dynatrain.reshard.certificate import (
    SIDES,
    Doubts,
    Shares,
    certify,
    differing,
    explained,
    joined_sides,
    shares,
)
from ds_dynatrain.reshard.core import EngineCore
from ds_dynatrain.reshard.digests import SideDigests, side_digests
from ds_dynatrain.reshard.encoding import blank_tensors, decode, encode, fingerprint
from ds_dynatrain.reshard.layers import LayerStates
from ds_dynatrain.reshard.meeting import Outcome, connect, drain, meet
from ds_dynatrain.reshard.preparation import ABANDON_SECONDS, Preparation
from ds_dynatrain.reshard.process import PROCESS
from ds_dynatrain.reshard.replicas import Settlement, furthest
from ds_dynatrain.reshard.replicas import judge as judge_replicas
from ds_dynatrain.reshard.swap import Before, Swap
from ds_dynatrain.space import VirtualParameterSpace, row_of
from ds_dynatrain.transfer import DeviceLink, ReadyPlan, TransferStats, Transport, execute, send_down

POLL_SECONDS = 0.02


class Transaction:
    """A switch on one member; see the module. Called by every member of either world at a boundary.

    Call `vote`, and then `conclude`; or for a late switch `enter`, and `settle` before the next optimizer step.

    is_part: whether it is one of several engines' in a process, for which the caller decides together. interrupt:
    to be raised once it is concluded. begin, was: when it began, in seconds, and layout and members before it.
    source_rank, target_rank: None if this member has none. old_world: None if it was idle.
    """

    def __init__(self, engine: EngineCore, preparation: Preparation, place: str, is_part: bool = False) -> None:
        self.begin, self.was = time.perf_counter(), (engine.layout, engine.members)
        self.engine, self.preparation, self.place, self.is_part = engine, preparation, place, is_part
        self.proposal, self.control = preparation.proposal, preparation.board
        self.source_rank, self.target_rank = preparation.source_rank, preparation.target_rank
        self.old_world: World | None = engine.world
        self.outcome = Outcome()
        self.before: Before | None = None
        self.source: Buffers = {}
        self.target: Buffers = {}
        self.carried = Carried({}, {}, {}, "", ())
        self.rest: dict[str, Any] = {}
        self.new_streams: streams.Streams | None = None
        self.source_digests: SideDigests = {}
        self.target_digests: SideDigests = {}
        self.kept_share: SideDigests = {}
        self.settlement = Settlement()
        self.layers = LayerStates(engine, self.control, self.proposal)
        self.swap = Swap(engine)
        key, generation = self.proposal.key, self.proposal.generation
        kind = "part" if is_part else "entered" if self.proposal.late else "record"
        self.session = self._session(key, f"{kind}/{generation}")
        self._final = self._session(f"{key}/late", f"record/{generation}", is_patient=True)
        self._entered: Decision | None = None
        self._thread: threading.Thread | None = None
        self._late_error: BaseException | None = None
        self.digest = ""
        self.interrupt: BaseException | None = None

    def _session(
        self, key: str, record: str | None = None, members: tuple[int, ...] = (), is_patient: bool = False
    ) -> Session:
        """Return a session of all members of both worlds, or of some of them."""
        what, stop = f"switch to {self.proposal.layout}", self.preparation.stop
        members = members or self.proposal.union
        return Session(self.control, key, members, what, record=record, is_patient=is_patient, stop=stop)

    # ---- the protocol --------------------------------------------------------------------------------------------

    def vote(self) -> Decision:
        """Do everything that can fail, and return the decision of all members; one that fails says no for all."""
        return self._vote(self._carry_out)

    def _vote(self, work: Callable[[], dict[str, Any]]) -> Decision:
        """Vote on what `work` reports, judged by the certificate."""
        try:
            decision = self.session.vote(work, joined_sides, self._judge)
        except OutcomeUnknown as lost:  # others may have read a commit
            self.outcome.is_uncertain, self.interrupt = True, lost.__cause__ or lost
            if self.control.watch is not None:  # in an elastic job the outcome is found out later
                self.control.lost, self.interrupt = None, lost.__cause__
            return Decision(False, str(lost))
        self.interrupt = decision.interrupt
        if decision.said and "doubts" in decision.said:
            decision = replace(decision, reason=self._explained(decision.said["doubts"]))
        elif decision.said:
            self.digest = str(decision.said["digest"])
        return decision

    def conclude(self, decision: Decision) -> None:
        """Do what was decided. Called with or without a vote: another engine may have failed before that."""
        self.outcome.committed, self.outcome.reason = decision.commit, decision.reason
        self.outcome.digest = self.digest if decision.commit else ""
        self.outcome.is_rebuilt = self.swap.has_begun
        with self.outcome.phase("commit" if decision.commit else "roll back"):
            self._commit() if decision.commit else self._roll_back()

    def _carry_out(self) -> dict[str, Any]:
        """Take all steps up to the vote; return this member's report."""
        phase = self.outcome.phase
        with phase("drain"):
            self._drain()
        with phase("meet"):
            self.meet()
            self._settle_results()
            self._receive_carry()
        with phase("digest"):
            self._digest_pause()
            self._settle_replicas()
        with phase("rebuild"):
            self._rebuild()
        with phase("move"):
            self._move()
        with phase("carry"):
            self._carry()
        with phase("verify"):
            return self._verify()

    # ---- a late switch: the two votes ----------------------------------------------------------------------------

    def enter(self, discard: Callable[[], None]) -> bool:
        """Hold the first vote; return whether this member trains in the new world now. If not, call `settle` at once.

        discard: drops what was trained of a global batch, and goes back to its beginning.
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
        """Worlds before and after it, as far as this member has them by now."""
        return tuple(world for world in (self.old_world, self.preparation.world) if world is not None)

    @property
    def has_entered(self) -> bool:
        """Whether the first vote was a yes: the new world trains, on this member or on others."""
        return self._entered is not None and self._entered.commit

    def settle(self) -> None:
        """Hold the second vote of a late switch and carry its decision out; end a switch that was not entered."""
        decision = self._entered
        if decision is None:
            raise RuntimeError("enter comes first")
        if decision.commit:
            self.session = self._final
            with self.outcome.phase("late"):
                decision = self._vote(self._arrive)
        elif not self.outcome.is_uncertain:
            with suppress(RuntimeError, OSError):  # for members without a part in it, which read only the record
                self._final.decide(replace(decision, said=None, interrupt=None))
        self.conclude(decision)

    def give_up(self, reason: str) -> None:
        """Say no for all, before the second vote: `settle` then goes back."""
        with suppress(RuntimeError, OSError):
            self._final.decide(Decision(False, f"member {self.control.member}: {reason}"))

    def _move_late(self) -> None:
        """Move the late kinds, and compute the digests of both sides. Runs in a thread."""
        begin = time.perf_counter()
        try:
            with beside():
                moves = self.preparation.moves(self.kinds, is_late=True)
                transport = self.preparation.ways.transport(self.preparation.world)
                self.outcome.late_stats = self._execute(moves, transport)
                kinds = tuple(kind for kind in self.kinds if not row_of(kind).is_gradient)
                self._digest_target(self.target, kinds, self._digest_source(self.preparation.vps, kinds))
        except BaseException as error:
            self._late_error = error
        self.outcome.late_ms = 1e3 * (time.perf_counter() - begin)

    def _arrive(self) -> dict[str, Any]:
        """Wait until the late kinds have moved; return this member's report on all kinds for the second vote.

        Raise what the thread that moves them raised. All waits of that thread have a time-out.
        """
        while True:
            self._final.stop()
            if self._thread is None or not self._thread.is_alive():
                break
            self._thread.join(POLL_SECONDS)
        if self._late_error is not None:
            raise self._late_error
        self._measure()
        return self._report()

    # ---- before the commit ---------------------------------------------------------------------------------------

    def meet(self) -> None:
        """Wait until all members are prepared and stand at one boundary."""
        meet(self.session, self.engine, self.preparation, self.place)

    def connect(self) -> None:
        """Connect the next world's groups over the accelerator, unless they are connected."""
        connect(self.preparation, self.old_world, self.session)
        self.outcome.connections = self.preparation.connections or Connections()

    def _drain(self) -> None:
        """Check that nothing is under way and no window is open; note this member's state, and post its carry."""
        engine, generation, rank = self.engine, self.proposal.generation, self.source_rank
        if rank is None:
            return
        self.before = drain(engine, self.proposal, rank, self.outcome)
        self.source = self.before.buffers
        if self.proposal.late:  # forward passes of a void batch must leave no trace in the module's buffers
            held = [(buffer, buffer.detach().clone()) for buffer in engine.host.module.buffers()]
            self.swap.on_undo(_put_back, held)
        own = self.swap.streams
        self.control.post(f"stream/{generation}/{rank}", {"states": own, "print": fingerprint(own)})
        self.layers.offer()
        if rank == 0:
            self.rest = rest_carry(engine, has_module=not self.layers.go_by_layers)
            kinds = [kind for kind in engine.vps.present_kinds() if any(kind == held for held, _ in self.source)]
            record = Carried.record(self.before.shared, self.rest, kinds, bool(self.newcomers))
            self.control.post(f"carry/{generation}", record)

    def _settle_results(self) -> None:
        """Make sure that all members of the source have the results of the last step's collectives.

        Only if a death may abort an accelerator's collectives; a later death in the switch then leaves nothing in
        doubt. In a world that has lost a member, none of the remaining ones is in doubt.
        """
        if self.old_world is None or not self.old_world.has_gate:
            return
        among = self._among(self.proposal.source_members)
        if among.reduce("doubts", self.engine.is_in_doubt, or_):
            self.engine.agree(lambda number: among.reduce(f"results/{number}", number, max))

    def _receive_carry(self) -> None:
        """Read rank 0's carry, which all others must have, too; it was posted before rank 0 came to the meeting."""
        self.carried = Carried.from_record(self.control.value(f"carry/{self.proposal.generation}"))
        self.outcome.kinds = self.kinds
        if self.before is not None:
            self._compare_carry(self.before.shared, "before")
        self._settle_target()

    @property
    def kinds(self) -> tuple[str, ...]:
        """State kinds that exist now."""
        return self.carried.kinds

    def _compare_carry(self, mine: dict[str, Any], when: str) -> None:
        """Raise CertificateError unless this member has the carry that rank 0 had before the moves."""
        prints = fingerprints(mine)
        parts = sorted(part for part, wanted in self.carried.prints.items() if prints.get(part) != wanted)
        if parts:
            raise CertificateError(
                f"carry of member {self.control.member} {when} the moves differs from rank 0's before them in: "
                f"{', '.join(parts)}"
            )

    def _digest_pause(self) -> None:
        """Digest the source in the pause.

        For a late switch, only the kinds that a backward pass writes to: later there would be nothing left to compare.
        """
        self.kept_share = self._digest_source(self.engine.vps, self._proved_at_once)

    @property
    def _proved_at_once(self) -> tuple[str, ...]:
        """State kinds whose digests are computed in the pause."""
        return tuple(kind for kind in self.kinds if not self.proposal.late or row_of(kind).is_gradient)

    def _digest_source(self, vps: VirtualParameterSpace, kinds: tuple[str, ...]) -> SideDigests:
        """Add digests of this member's source buffers; return the share of them in buffers that stay."""
        if self.source_rank is None:
            return {}
        side, kept = (self.proposal.source_layout, self.source_rank), self.preparation.kept
        found, share = side_digests(vps, *side, self.source, kinds, kept, ready=self.preparation.sides.get(side))
        self.source_digests = {**self.source_digests, **found}
        return share

    def _digest_target(self, held: Buffers, kinds: tuple[str, ...], share: SideDigests) -> None:
        """Add digests of this member's target buffers. share: of buffers that have stayed."""
        if self.target_rank is None:
            return
        vps = self.preparation.vps.with_layout(self.proposal.layout, self.proposal.members)
        side, kept = (self.proposal.layout, self.target_rank), self.preparation.kept
        kinds = tuple(kind for kind in kinds if kind in vps.present_kinds())
        found, _ = side_digests(vps, *side, held, kinds, kept, share, self.preparation.sides.get(side))
        self.target_digests = {**self.target_digests, **found}

    def _settle_replicas(self) -> None:
        """Set tensors that several stages or tensor ranks hold to their owners' values, before anything is read."""
        layout, members = self.proposal.source_layout, self.proposal.source_members
        if layout.pipe * layout.tensor == 1 or self.source_rank is None:
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
        self._digest_pause()

    def _among(self, members: tuple[int, ...]) -> Session:
        """Return a session of some of the members, for a step in between."""
        return self._session(f"{self.session.key}/source", self.session.record, members)

    def _settle_target(self) -> None:
        """Choose the target buffers; provide new ones if live buffers are no longer those that were to be kept."""
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
        """Take the old optimizer off, install the new groups, and put the new optimizer over the prepared memory."""
        self.connect()
        world, before = self.preparation.world, self.before
        if before is not None:
            self.swap.off(before)
            self.swap.on_undo(self.settlement.undo)  # before the old optimizer reads them
        if self.target_rank is not None and world is not None:
            self.swap.into(world)
            scalars = scalars_of(self.carried.shared) if before is None else before.scalars
            made, self.preparation.made = self.preparation.made, None
            vps, layout = self.preparation.vps, self.proposal.layout
            self.swap.over(vps, layout, world, self.target_rank, self.target, scalars, made)

    def _move(self) -> None:
        transport = self.preparation.ways.transport(self.preparation.world)
        self.outcome.stats = self._execute(self.preparation.moves(self.kinds), transport, self._link())
        self._send_rest(transport)
        self.outcome.layer_bytes = self.layers.exchange(transport, self.control.timeout_seconds)

    def _execute(self, plan: ReadyPlan, transport: Transport, link: DeviceLink | None = None) -> TransferStats:
        return execute(plan, self.source, self.target, transport, self.control.timeout_seconds, link)

    def _link(self) -> DeviceLink | None:
        """Return the link between devices, or None if the plan needs none.

        Raise SwitchFailed if the link is lent by the old world and another member has gone back without using it.
        """
        link = self.preparation.ways.link(self.preparation.world, self.session.stop)
        is_lent = link is not None and link.communicator is self.preparation.ways.may_lend(self.old_world)
        if is_lent and not self._decides(begins=True):
            raise SwitchFailed("another member has given the switch up before the moves")
        return link

    def _decides(self, begins: bool) -> bool:
        """Return whether moves over a communicator of the old world begin: the first member to say decides for all."""
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
        """Return the random streams of a rank of the next world."""
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
        """Check the target; return this member's report on both sides."""
        begin = time.perf_counter()
        if self.target_rank is not None:
            self._check_target(self.target_rank)
        self.outcome.certificate_ms = self.outcome.phases_ms["digest"] + 1e3 * (time.perf_counter() - begin)
        self._measure()
        return self._report()

    def _report(self) -> dict[str, Any]:
        """Return this member's digests, as shares of the sums over all."""
        vps, report = self.preparation.vps, dict[str, Shares | None]({"source": None, "target": None})
        if self.source_rank is not None:
            side = self.proposal.source_layout, self.proposal.source_members, self.source_rank
            report["source"] = shares(vps, *side, self.source_digests)
        if self.target_rank is not None:
            side = self.proposal.layout, self.proposal.members, self.target_rank
            report["target"] = shares(vps, *side, self.target_digests)
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
        self._digest_target(held, self._proved_at_once, self.kept_share)
        if streams.capture() != self.new_streams:
            raise CertificateError(f"random streams of rank {rank} are not those that its place in the layout has")
        self._compare_carry(shared_carry(self.engine, scalars), "after")

    def _judge(self, report: dict[str, Any]) -> Decision:
        """Return the decision by the certificate, from what all members report. Called on the first member."""
        vps, layouts = self.preparation.vps, (self.proposal.source_layout, self.proposal.layout)
        try:
            said = certify(vps, *layouts, report)
        except CertificateError as error:
            return Decision(False, f"CertificateError: {error}")
        return Decision("digest" in said, "copies of one state differ" if "doubts" in said else "", said=said)

    def _explained(self, wrong: dict[str, Doubts]) -> str:
        """Return a message about whose copies differ, the same on all members."""
        side = next(each for each in SIDES if wrong[each])
        proposal, session = self.proposal, self.session
        layout, members, own = {
            "source": (proposal.source_layout, proposal.source_members, self.source_digests),
            "target": (proposal.layout, proposal.members, self.target_digests),
        }[side]
        among = self._session(session.key)
        what = among, "differing", self.preparation.vps, layout, members, own or None, wrong[side], side
        try:
            return f"CertificateError: {explained(*what)}"
        except (DynatrainError, td.DistError) as error:  # the switch is rolled back in any case
            return f"CertificateError: copies of one state differ, and it is not known whose ({error})"

    # ---- at and after the commit ---------------------------------------------------------------------------------

    def _commit(self) -> None:
        """Enter the new world for good; let go of the old one once all members have read the record."""
        engine, proposal = self.engine, self.proposal
        self.swap.keep()
        engine.enter(proposal, self.preparation.world if self.target_rank is not None else None)
        if PROCESS.is_shared and self.target_rank is not None:
            engine.activate()  # another engine has had its turn since the vote
        self.preparation.committed()
        self.outcome.acknowledge(self.session)
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
        """Put back the old optimizer over the old memory, the old groups and the old streams."""
        try:
            self._mend_communicator()
        finally:
            self.swap.undo()
            self._measure()
            self.source, self.target, self.before = {}, {}, None
            self.preparation.abandon()
        if self._thread is not None:
            self._thread.join(ABANDON_SECONDS)  # it may still wait for messages that will not come
            if self.source_rank is not None:
                self.engine.repeat_places()

    def _mend_communicator(self) -> None:
        """Renew a communicator of the old world over which moves have failed: it may be in any state. All do so.

        Raise SwitchFailed if that fails: the old world cannot compute without it, and the job has to end.
        """
        old, lent = self.old_world, self.preparation.ways.may_lend(self.old_world)
        if old is None or lent is None or self.outcome.is_uncertain or not self._decides(begins=False):
            return
        end([lent], is_broken=True)
        seconds = self.control.timeout_seconds + END_SECONDS  # as long as another member may wait for its device
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
        """Measure the state held at once on this member: source, additions of the target, and staging."""
        held = {_memory(buffer) for buffer in (*self.source.values(), *self.target.values())}
        staging = self.outcome.stats.staging_peak if self.outcome.stats else 0
        self.outcome.peak_memory = _union_bytes(held) + staging


def _memory(buffer: torch.Tensor) -> tuple[int, int]:
    return buffer.data_ptr(), buffer.data_ptr() + buffer.numel() * buffer.element_size()


def _union_bytes(runs: set[tuple[int, int]]) -> int:
    """Return the bytes covered by address runs that may overlap."""
    total, end = 0, 0
    for start, stop in sorted(runs):
        total += max(0, stop - max(start, end))
        end = max(end, stop)
    return total


def _put_back(held: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy the second tensor of each pair into the first."""
    with torch.no_grad():
        for tensor, value in held:
            tensor.copy_(value)
