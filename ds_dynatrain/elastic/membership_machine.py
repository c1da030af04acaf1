"""Decisions of the coordinator, without sockets and without a clock: events go in, actions (effects) come out.

Every event has a method that takes the time as an argument; `advance` returns the effects that are due. The rules:

- A **generation** (a numbered list of the members that train together) is published when something has changed,
  `debounce_seconds` after the first sign of the change. Survivors keep their order; newcomers follow in the order in
  which their nodes became ready. A number is never used twice.
- A **planned** change (a node joins, a member leaves) waits until all members have entered the current generation. A
  **failure** waits for nothing: a member of the world has died, a leaving member has died before its state was handed
  over, or a collective has failed although all members are alive. A failed collective has its own field in the record,
  beside the other changes of the generation.
- A node joins as a whole, when all its workers are ready. A job starts with MIN nodes; nodes above MAX wait. If all
  members were asked to leave, nodes wait until the last of these members has gone.
- No member waits long for a **late** node, one that is still building its engines. After a failure the holders of the
  state continue without the late node if they are at least MIN nodes and have a layout. Leaving members wait for it
  `LEAVER_SECONDS`, other nodes `stuck_seconds`. It joins once it has built its engines.
- A member that was declared lost never comes back under its id, with one exception: a member that was merely silent may
  come back until a generation without it is entered.
- When more than half of a world falls silent together, the coordinator or its network link is at fault. In this case no
  member is declared lost until its silence has lasted `ORPHAN_SECONDS`: members without a coordinator end by themselves
  within that time. More than half of a world is also never declared lost for being stuck.
- When the current world has been at a **standstill** for twice `silent_seconds`, its members are asked to which of the
  others they can connect. The largest set of nodes that reach each other continues if it has at least MIN nodes. The
  others are declared lost, and join again once they reach all training members. Declaring nodes lost may cost state, so
  it happens only after `stuck_seconds`, or at once if it is a single node whose state is kept by others.
- After a restart, returning members tell the coordinator which world exists. If new members come first, a job is
  started only once no member of an earlier job can be alive. If such a member comes nevertheless, the new job gives way
  to the member's state.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ds_dynatrain.elastic.generation import LONGEST_TEXT, NO_WORLD, Generation, member_id, node_of, nodes_of
from ds_dynatrain.elastic.links import HostLinks
from ds_dynatrain.elastic.messages import Announce, Bye, Phase, Probed, Report, clipped
from ds_dynatrain.elastic.roster import Effect, Finish, GiveUpMember, Publish, Recovery, Roster, RosterEntry
from ds_dynatrain.elastic.settings import ORPHAN_SECONDS, Settings
from ds_dynatrain.errors import JobFinished, PeerRefused

LEAVER_SECONDS = 5.0
"""How long leaving members wait for nodes that are still building their engines."""
HANG_STEPS = 10
"""The job ends if two collectives hang within this many steps of each other."""
REMEMBERED_CHANGES = 20
REMEMBERED_GONE = 16_384
"""The maximum number of lost members that are remembered and refused; the oldest are forgotten."""
QUIET_BEATS = 3
"""Number of missed heartbeats after which a member counts as quiet; see `_is_cut_off`."""


@dataclass(frozen=True)
class Missed:
    """A member that was declared lost only because it was silent, and that may therefore come back.

    entry: the member's entry in the roster.
    reason: why it was declared lost.
    world: the generation in which it took part at that time; `NO_WORLD` if it was in none.
    """

    entry: RosterEntry
    reason: str
    world: Generation


class MembershipStateMachine:
    """State machine that decides which processes of a job train together. In all methods `now` is the time in seconds
    by one monotonic clock."""

    def __init__(self, settings: Settings, term: str, now: float) -> None:
        self.settings = settings
        self.term = term
        self.roster = Roster()
        self._world = NO_WORLD
        self.is_finished = False
        self.changes: deque[tuple[Generation, float]] = deque(maxlen=REMEMBERED_CHANGES)
        """The most recent generations, each with the time at which it was published."""
        self._recovery: Recovery | None = Recovery(now + settings.recovery_seconds, settings.recovery_seconds)
        self._orphaned_at = now + ORPHAN_SECONDS
        """The time from which no member of an earlier job can still be alive."""
        self._is_starter = False
        """Whether this coordinator started the current job, rather than taking it over from members of an earlier
        one."""
        self._newest = 0
        """The highest generation number that this coordinator has published or adopted from an earlier coordinator."""
        self._gone: dict[str, str] = {}
        self._done: set[str] = set()
        """Members of the current world whose scripts have ended. Such a script counts as successful unless its agent
        later reports a failure."""
        self.watched: dict[str, float] = {}
        """Map from the node of each connected agent to the time at which the agent connected. Each of these agents will
        report how its workers ended. The coordinator keeps the map up to date."""
        self._entered = 0
        self._has_begun = False
        """Whether any member has reported a step; see `Generation.begun`."""
        self._breach = ""
        self._is_hang, self._hangs, self._hung_at = False, 0, 0
        """Whether the failure in `_breach` is a collective that hung, how many collectives have hung in a row, and the
        step at which the last one hung."""
        self._mute: dict[str, list[float]] = {}
        """For each mute member, the times at which generations failed without any report from that member. Other
        members reported the failure; a mute member reported neither the failure nor that it had entered."""
        self._decide_at: float | None = None
        self._advanced = now
        self._held_at = now
        """The last time at which so many members were silent that the coordinator's own network link was at fault."""
        self._missed: dict[str, Missed] = {}
        """Members that were declared lost because they were silent, and that may still come back, keyed by member
        id."""
        self._back: dict[str, Missed] = {}
        """Members that have come back but are not listed in the current generation, keyed by member id."""
        self._published: Publish | None = None
        """The newest generation, and the members to which it was sent."""
        self._owed: list[Publish] = []
        """Publications to send again, because members that were reconnecting may not have received them."""
        self.links = HostLinks(settings.silent_seconds, now)

    @property
    def world(self) -> Generation | None:
        """The current generation; None before the first one."""
        return self._world if self._world.generation else None

    # -- events ------------------------------------------------------------------------------------------------------

    def announce(self, said: Announce, now: float) -> str:
        """Admit a worker that is new or has reconnected, and return its id.

        Raises PeerRefused if the worker cannot be admitted, JobFinished if the job has finished.
        """
        member = member_id(said.node, said.local_rank)
        if self.is_finished:
            raise JobFinished("the job has finished; a new one needs a new coordinator")
        if self._is_known(member, said):
            self._hear_again(member, now)
            newest = self._published
            is_behind = said.world is None or said.world.generation < self._newest
            if newest is not None and member in newest.to and is_behind:
                self._owed.append(Publish(newest.world, (member,)))
            return member
        if member in self._gone:
            raise PeerRefused(
                f"{member} was given up ({self._gone[member]}); end this process, and start it again to join as a new "
                "one"
            )
        if said.world is not None and not self._may_recall(said.world, now):
            raise PeerRefused(
                f"{member} comes from generation {said.world.generation}, which is over here; start it again to join "
                "as a new process"
            )
        self.roster.add(said, now)
        if said.world is not None:
            if self._recovery is None:
                self._recovery = Recovery(now, self.settings.recovery_seconds)
            self._recovery.hear(member, said.world, now)
        elif said.restarts and self._recovery is not None:
            self._recovery.expect(self._orphaned_at)
        return member

    def _is_known(self, member: str, said: Announce) -> bool:
        """Return whether an announcement comes from a known process: one in the roster, or one that was declared lost
        only because it was silent."""
        missed = self._missed.get(member)
        entry = self.roster.get(member) or (None if missed is None else missed.entry)
        return entry is not None and said.nonce != "" and (entry.pid, entry.nonce) == (said.pid, said.nonce)

    def _hear_again(self, member: str, now: float) -> None:
        """Take a member back that was declared lost because it was silent. Does nothing for any other member.

        Raises PeerRefused if the others have continued without the member.
        """
        missed = self._missed.get(member)
        if missed is None:
            return
        if self._goes_on_without(member, missed):
            raise PeerRefused(
                f"{member} was given up ({missed.reason}), and generation {self._newest} goes on without it; end this "
                "process, and start it again to join as a new one"
            )
        del self._missed[member]
        self._gone.pop(member, None)
        self.roster.restore(missed.entry, now)
        if missed.world.generation and not self._takes_part(member):
            world, last = missed.world, missed.world.survivors
            # all members hold the state once one has entered; before that survivors and leaving members hold it
            if world.generation <= self._entered or world.ranks.get(member, last) < last or member in world.leavers:
                self._back[member] = missed
                self._breach = f"{member} was heard of again"
            else:
                self._owed.append(Publish(self._world, (member,)))  # send it the newest generation
        self._note(now)

    def _goes_on_without(self, member: str, missed: Missed) -> bool:
        """Return whether the other members no longer need a member that has fallen silent.

        This is the case if the member's state was handed over, or if another member has entered a later generation
        without it.

        missed: the record of the silent member.
        """
        if member in self._world.leavers and self._is_handed_over:
            return True
        has_changed = self._world.generation > missed.world.generation
        return has_changed and self._is_entered and not self._takes_part(member)

    def report(self, member: str, said: Report, now: float) -> None:
        """Process a worker's report. Raises PeerRefused if the report is invalid or the worker was declared lost."""
        self._hear_again(member, now)
        if member not in self.roster:
            raise PeerRefused(f"{member} was given up ({self._gone.get(member, 'it is not known here')})")
        newest = self._world.generation
        if self._recovery is None and said.entered > newest:
            raise PeerRefused(
                f"{member} says it entered generation {said.entered}, and the newest is {newest}; start it again to "
                "join as a new process"
            )
        self._has_begun = self._has_begun or said.step > 0
        if self._recovery is not None and member in self._recovery.told:
            self._recovery.reported.add(member)
        before = self.roster[member].report
        if self._takes_part(member) and (said.step, said.entered) != (before.step, before.entered):
            self.links.move(now)
        if self.roster.report(member, said, now):
            if _answered(said) >= newest:
                self._mute.pop(member, None)
            if self._recovery is None or member not in self._recovery.told:  # else this generation may be another job's
                self._entered = max(self._entered, said.entered)
            if self._takes_part(member) and said.broken == newest:
                self._note_failed_collective(member, said)
            self._note(now)

    def _note_failed_collective(self, member: str, said: Report) -> None:
        """Record that a member's collective in the current generation has failed or hung."""
        if said.hung and not self._is_hang:
            step = max(entry.report.step for entry in self.roster.values())
            self._hangs = self._hangs + 1 if abs(step - self._hung_at) <= HANG_STEPS else 1
            self._hung_at, self._is_hang = step, True
            self._breach = f"a collective has not ended on {member}: {said.hung}"
        elif not self._is_hang:
            self._breach = f"a collective failed on {member}"

    def probed(self, member: str, said: Probed, now: float) -> None:
        """Process the results of a worker's attempts to connect to other hosts."""
        if member in self.roster and self.links.hear(self.roster[member].host, said, now):
            self._note(now)

    def bye(self, member: str, said: Bye, now: float) -> None:
        """Process the goodbye message of a worker whose script has ended."""
        self._hear_again(member, now)
        entry, world = self._remove(member), self._world
        if entry is None:
            return
        is_behind = said.newest < world.generation
        works = self._works(member) or (self._recovery is not None and member in self._recovery.told)
        if member in world.leavers and not self._is_handed_over and is_behind:
            self._is_gone(member, "ended before it heard that the others may ask for its state", now)
        elif member in world.leavers and not self._is_handed_over and not said.has_left:
            self._is_gone(member, "its script ended by itself", now)
        elif works and said.has_left and is_behind:
            self._is_gone(member, f"left after generation {said.newest}, which went on without it", now)
        elif works and entry.report.leaving:  # the others still rely on it
            self._is_gone(member, "ended before the others could let it go", now)
        elif works:
            self._done.add(member)
        elif member in world.leavers and world.members and not world.survivors and not self._is_entered:
            self._breach = f"{member} left before another member had said that it has the state"
        self._note(now)

    def failed(self, node: str, now: float) -> None:
        """Count a node's workers as lost, because the node's agent reports that one of them ended with an error or a
        nonzero exit code.

        A process does not know its exit code when it says goodbye, so it may have reported a regular end before.
        """
        for member in () if self.is_finished else (*self._done, *self.roster):
            if node_of(member) == node:
                self._done.discard(member)
                self._remove(member)
                self._is_gone(member, "its node's workers have failed", now)

    def lost(self, member: str, why: str, now: float) -> None:
        """Count a worker as dead.

        why: the reason, in words for people.
        """
        if self._remove(member) is not None:
            self._is_gone(member, why, now)

    def _remove(self, member: str) -> RosterEntry | None:
        """Remove a worker from the roster and from the members that may come back. Return the worker's roster entry;
        None if it had none."""
        self._missed.pop(member, None)
        self._back.pop(member, None)
        return self.roster.remove(member)

    def disconnected(self, member: str, why: str, now: float) -> None:
        """Handle the end of a worker's connection: count the worker as dead, unless it had already missed several
        heartbeats.

        After missed heartbeats the network may be down. The end of the connection is then no further evidence of a
        death, and the worker may be about to reconnect.
        """
        if member in self.roster and not self._is_quiet(self.roster[member], now):
            self.lost(member, why, now)

    # -- time --------------------------------------------------------------------------------------------------------

    @property
    def deadline(self) -> float:
        """The latest time at which `advance` has to be called."""
        times = [self._advanced if self._owed else self._advanced + self.settings.beat_seconds]
        if self._recovery is not None:
            times.append(self._advanced if self._recovery.is_complete else self._recovery.until)
        elif self._decide_at is not None and not self.is_finished:
            times.append(self._decide_at)
        return min(times)

    def advance(self, now: float) -> list[Effect]:
        """Return the actions that are due now."""
        effects: list[Effect] = [*self._owed, *self._give_up_silent(now), *self._give_up_stuck(now)]
        self._owed.clear()
        if self._recovery is not None:
            if now < self._recovery.until and not self._recovery.is_complete:
                return effects
            effects += self._end_recovery(self._recovery, now)
        effects += self._give_up_unreached(now)
        if not self.is_finished:
            effects += self.links.probes(self.roster, self._present(self._world.everyone), now)
        if self._is_overdue(now) or (self._may_rejoin and any(map(self._was_left_behind, self.roster))):
            self._note(now)
        if self._decide_at is not None and now >= self._decide_at and not self.is_finished:
            self._decide_at = None
            world = self._next_world(now)
            if world is not None:
                effects.append(self._publish(world, now))
        effects += self._finish()
        return effects

    def _give_up_silent(self, now: float) -> list[GiveUpMember]:
        """Declare members lost that have been silent for too long. Time during which the coordinator itself was not
        running is not counted."""
        asleep = now - self._advanced - self.settings.beat_seconds
        if asleep > self.settings.beat_seconds:
            self.roster.forgive(asleep)
            if self._recovery is not None:
                self._recovery.forgive(asleep)
        self._advanced = now
        if self._is_cut_off(now):
            self._held_at = now
        most = self.settings.silent_seconds
        for entry in list(self.roster.values()):
            silence = now - entry.heard
            if min(silence, now - self._held_at) > most or silence > ORPHAN_SECONDS:
                reason = f"no heartbeat for {ORPHAN_SECONDS if silence > ORPHAN_SECONDS else most:g} s"
                self.lost(entry.member, reason, now)
                world = self._world if self._takes_part(entry.member) else NO_WORLD
                self._missed[entry.member] = Missed(entry, reason, world)
        return self._part_with_missed(now)

    def _is_quiet(self, entry: RosterEntry, now: float) -> bool:
        return now - entry.heard > QUIET_BEATS * self.settings.beat_seconds

    def _is_cut_off(self, now: float) -> bool:
        """Return whether more than half of the world has missed several heartbeats, which means that the coordinator's
        own network link is at fault."""
        there = [one for one in self.roster.values() if self._takes_part(one.member)] or list(self.roster.values())
        return 2 * sum(self._is_quiet(one, now) for one in there) > len(there)

    def _part_with_missed(self, now: float) -> list[GiveUpMember]:
        """Declare silent members lost for good if the others have continued without them, so that they can no longer
        come back."""
        over = [member for member, missed in self._missed.items() if self._goes_on_without(member, missed)]
        effects = [GiveUpMember(one, self._missed[one].entry.pid, self._missed.pop(one).reason) for one in over]
        if self._is_entered:  # the returned members came too late for a new generation
            effects += self._give_up(dict.fromkeys(self._back, self._goes_on), now)
        return effects

    def _give_up_stuck(self, now: float) -> list[GiveUpMember]:
        """Declare members lost that are alive but stuck, so that the others stop waiting for them.

        If more than half of the world is stuck, no member is declared lost.
        """
        most, failed = self.settings.stuck_seconds, self._mute
        if not most:
            return []
        there = [entry for entry in self.roster.values() if self._takes_part(entry.member)]
        # a member that has taken no step yet counts as stuck only while all others wait for it
        is_needed = self._world.change == "failure" and not self._is_entered
        hung = [one.member for one in there if one.report.blocked_seconds >= most and (one.report.step or is_needed)]
        stuck = dict.fromkeys(hung, f"its main thread has not moved for {most:g} s")
        if not stuck:
            mute = [one.member for one in there if len(failed.get(one.member, ())) > 1]
            stuck = {
                one: f"it has said nothing of {len(failed[one])} generations that failed in {most:g} s"
                for one in mute
                if now - failed[one][0] >= most
            }
        if not stuck or 2 * len(stuck) > len(there):
            return []
        failed.clear()  # other members may have been mute only because they waited for the stuck ones
        return self._give_up(stuck, now)

    def _give_up(self, reasons: Mapping[str, str], now: float) -> list[GiveUpMember]:
        """Declare members lost, and return the actions that end their processes.

        reasons: a map from each member to the reason.
        """
        effects = [GiveUpMember(member, self.roster[member].pid, reason) for member, reason in reasons.items()]
        for effect in effects:
            self.lost(effect.member, effect.reason, now)
        return effects

    @property
    def _goes_on(self) -> str:
        """Reason given to a member that is declared lost because the newest generation does not list it."""
        return f"generation {self._newest} goes on without it"

    def _give_up_unreached(self, now: float) -> list[GiveUpMember]:
        """Declare nodes lost when training is at a standstill because they cannot reach each other, so that all
        remaining nodes can.

        No node is declared lost if fewer nodes than the job's minimum would remain (waiting nodes included), or while
        this may lose state that would be available again after a repair of the network. Copies of the state survive the
        loss of one node, but two nodes lost together may have kept each other's copies.
        """
        world, links = self._world, self.links
        if not links.stands_still(now) or not links.parted:
            return []
        outside = links.outside(self.roster, tuple(self._present(world.everyone)))
        reports = [self.roster[one].report for one in outside]
        stay = tuple(one for one in self._present(world.members) if one not in outside)
        has_enough = len(nodes_of((*stay, *self._newcomers(stay)))) >= self.settings.min_nodes
        loses_state = len(nodes_of(outside)) > 1 or any(said.protected != "yes" and said.step for said in reports)
        if not has_enough or (loses_state and not 0 < self.settings.stuck_seconds <= links.still_for(now)):
            return []
        if outside:
            links.move(now)
        return self._give_up({one: clipped(why, LONGEST_TEXT // 2) for one, why in outside.items()}, now)

    # -- after a restart ---------------------------------------------------------------------------------------------

    @property
    def is_recovering(self) -> bool:
        """Whether the coordinator is waiting for members of an earlier job to return."""
        return self._recovery is not None

    def _may_recall(self, world: Generation, now: float) -> bool:
        """Return whether a world from before the coordinator's restart can still be adopted.

        This is also possible if this coordinator has started a new job by mistake: for a while, members of the earlier
        job may be alive and hold more state.
        """
        if self._recovery is not None or self.world is None:
            return True
        return self._is_starter and world.term != self.term and now < self._orphaned_at

    def _end_recovery(self, recovery: Recovery, now: float) -> list[Effect]:
        """End the recovery after a restart: adopt the newest world known to members that have returned. Declare lost
        the members that this world does not list, and those that have not returned."""
        self._recovery, world, told = None, recovery.choose(), recovery.told
        started = dict.fromkeys(self._world.everyone)
        if world is None:
            return []
        back = [entry for entry in self.roster.values() if entry.member in told]
        if started and not any(entry.report.entered or entry.member not in recovery.reported for entry in back):
            outside = [one.member for one in back if one.member not in started]
            return [*self._give_up(dict.fromkeys(outside, self._goes_on), now)]
        self._world = world
        begun_here = [member for member, missed in self._missed.items() if missed.world.generation]
        self._is_starter, self._newest = False, max(self._newest, world.generation)
        self.links.move(now)
        self._done.difference_update(started)
        said = [(entry.member, entry.report) for entry in self.roster.values() if self._takes_part(entry.member)]
        self._entered = max((report.entered for _, report in said), default=0)
        self._has_begun = world.begun or any(report.step for _, report in said)
        self._note(now)
        for member, report in said:
            if report.broken == world.generation:
                self._note_failed_collective(member, report)
        stay = [entry.member for entry in back if entry.member not in started and self._may_stay(entry, recovery)]
        present = self._present(dict.fromkeys((*world.everyone, *stay)))
        over = [one for one in self.roster if one in started or (one in told and one not in present)]
        effects: list[Effect] = [*self._give_up(dict.fromkeys(over, self._goes_on), now)]
        effects += [GiveUpMember(one, self._missed.pop(one).entry.pid, self._gone[one]) for one in begun_here]
        effects += self._give_up_missing(now)
        self.changes.append((world, now))
        self._published = Publish(world, tuple(self._present(present)))
        return [*effects, self._published]

    def _may_stay(self, entry: RosterEntry, recovery: Recovery) -> bool:
        """Return whether a member that has returned may continue although the adopted world does not list it.

        A leaving member may continue until it has received the generation in which the others continue without it. Any
        other member may continue, and join again, if it holds no state and knows only an older world or one that was
        formed without it.
        """
        world, told = self._world, recovery.told[entry.member]
        is_older = told.generation < world.generation
        if entry.report.leaving and is_older:
            return True
        holds_none = entry.member in recovery.reported and not entry.report.entered
        return holds_none and not self._works(entry.member) and (is_older or told.term == world.term)

    def _give_up_missing(self, now: float) -> list[GiveUpMember]:
        """Declare lost the members of the world just adopted that have not returned."""
        effects = list[GiveUpMember]()
        for member in self._world.members:
            if member not in self.roster and member not in self._done and member not in self._missed:
                self._gone.setdefault(member, "it did not come back")
                effects.append(GiveUpMember(member, None, self._gone[member]))
        for member in self._world.leaving:
            if member not in self.roster and not self._is_handed_over:
                self._is_gone(member, "it did not come back", now)
        return effects

    # -- decisions ---------------------------------------------------------------------------------------------------

    def _next_world(self, now: float) -> Generation | None:
        """Return the generation that the connected members should form next.

        Returns None if the current generation needs no change. Also returns None if a planned change has to wait until
        the current generation is entered.
        """
        old, members = self._world, self._world.members
        dead = tuple(one for one in members if one not in self.roster and one not in self._done)
        is_failure = bool(dead or self._breach or self._is_overdue(now))
        if not is_failure and not self._is_settled:
            return None
        stay = tuple(one for one, said in self._present(self._in_order(members)).items() if not said.leaving)
        is_late = is_failure and (self._can_go_alone or self._have_others_waited(now))
        leaving, late = self._leaving(old), frozenset(self._late if is_late else ())
        stay, leaving = (tuple(one for one in some if one not in late) for some in (stay, leaving))
        needs_who_leaves = bool(leaving) and not stay  # newcomers wait until leaving members have saved it
        joined = () if needs_who_leaves else self._newcomers(stay, are_built=is_failure and self._can_go_alone)
        is_ending = not self._done.isdisjoint(members)  # members that have ended take part in no change
        if not is_failure and (stay + joined == members or is_ending):
            return None
        if not old.generation and not joined:
            return None
        reasons = [f"{one} lost ({self._gone.get(one, 'it did not come back')})" for one in dead]
        reasons += [self._breach] if self._breach else []
        reasons += [f"{node} is not waited for until it has made its engines" for node in sorted(nodes_of(late))]
        reasons += [f"{node} joined" for node in sorted(nodes_of(joined))]
        reasons += [f"{one} leaves" for one in sorted(set(members) & set(leaving))]
        has_ended = bool(old.generation) and not members and old.change == "planned"  # all have left, and saved
        holding = {*self._back, *(members if self._is_entered else self._survivors)}
        return Generation(
            term=self.term,
            generation=self._newest + 1,
            change="failure" if is_failure else "planned",
            members=stay + joined,
            survivors=len(holding.intersection(stay)),
            leaving=leaving,
            lost=dead,
            broken=old.generation if self._breach else old.broken,
            hangs=self._hangs if self._is_hang else 0,
            begun=self._has_begun and (is_failure or not has_ended),
            paused=len(nodes_of(stay + joined)) < self.settings.min_nodes,
            reason=clipped("; ".join(reasons), LONGEST_TEXT),
        )

    def _in_order(self, members: tuple[str, ...]) -> tuple[str, ...]:
        """Return the connected members of the current generation, and those that have come back after a silence, in
        their earlier order."""
        base = min((one.world for one in self._back.values()), key=lambda world: world.generation, default=NO_WORLD)
        return tuple(one for one in dict.fromkeys((*base.members, *members)) if self._works(one) or one in self._back)

    def _newcomers(self, stay: tuple[str, ...], are_built: bool = False) -> tuple[str, ...]:
        """Return the members that should join those that stay: whole nodes, up to the job's maximum of nodes in all,
        and at least its minimum to start a job.

        A member that was in an earlier generation may join only after `LEAVER_SECONDS`, because it may be about to end.

        stay: the members that stay.
        are_built: whether to return only nodes that have built their engines.
        """
        if self._done:
            return ()
        nodes = self.roster.complete_nodes(apart=self._back.keys() | self._world.ranks.keys())
        nodes = [node for node in nodes if self._may_rejoin or not any(map(self._was_left_behind, node))]
        if are_built:
            nodes = [node for node in nodes if all(self.roster[one].report.engines == "built" for one in node)]
        nodes = self.links.reaching(self.roster, nodes, stay)
        nodes = nodes[: max(0, self.settings.max_nodes - len(nodes_of(stay)))]
        if not stay and len(nodes) < self.settings.min_nodes:
            return ()
        return tuple(member for node in nodes for member in node)

    @property
    def _may_rejoin(self) -> bool:
        """Whether members of earlier generations that are still connected may join again. They must wait a while after
        the last change, because those that have to end need time to do so."""
        return bool(self.changes) and self._advanced - self.changes[-1][1] > LEAVER_SECONDS

    def _was_left_behind(self, member: str) -> bool:
        return self.roster[member].report.entered > 0 and not self._takes_part(member)

    def _leaving(self, old: Generation) -> tuple[str, ...]:
        """Return the leaving members that are still connected.

        This includes members that the previous generation lists as leaving even if their own reports do not say so yet.

        old: the previous generation.
        """
        known = dict.fromkeys((*self._in_order(old.members), *old.leaving, *self._back))
        return tuple(one for one, said in self._present(known).items() if said.leaving or one in old.leavers)

    @property
    def _late(self) -> tuple[str, ...]:
        """Newcomers that hold up the current generation, because their nodes have not built all their engines. Empty
        once any member has entered the generation."""
        world = self._world
        if self._is_entered:
            return ()
        coming = self._present(world.members[world.survivors :])
        nodes = nodes_of(one for one, said in coming.items() if said.engines != "built")
        return tuple(one for one in coming if node_of(one) in nodes)

    @property
    def _is_lacking(self) -> bool:
        """Whether a member has reported that the current generation has too few members for any layout."""
        there = self._present(self._world.everyone).values()
        return any(said.lacking == self._world.generation for said in there)

    @property
    def _can_go_alone(self) -> bool:
        """Whether the other members can train without the late newcomers, whose nodes are still building their
        engines."""
        world, late = self._world, frozenset(self._late)
        if not self._present(world.members if self._is_entered else self._survivors):
            return False
        there = self._present(world.members)
        stay = [one for one, said in there.items() if not said.leaving and one not in late]
        return bool(stay) and len(nodes_of(stay)) >= self.settings.min_nodes and not self._is_lacking

    def _have_others_waited(self, now: float) -> bool:
        """Return whether nodes that are still building their engines have kept others waiting for too long. The others
        are members of the world, or nodes that wait outside it."""
        world, late, most = self._world, self._late, self.settings.stuck_seconds
        if not late or self._is_lacking or not 0 < most <= now - self.changes[-1][1]:
            return False
        coming = self._present(world.members[world.survivors :])
        others = [one for one, said in coming.items() if not said.leaving and one not in late]
        return bool(others or self._newcomers(world.members))

    def _is_overdue(self, now: float) -> bool:
        """Return whether members must stop waiting for a generation that no member has entered yet."""
        world = self._world
        if self._recovery is not None or self._is_entered:
            return False
        if self._is_lacking:
            return bool(self._newcomers(world.members))
        if not world.survivors:
            return False
        is_leaver_late = now - self.changes[-1][1] >= LEAVER_SECONDS and bool(self._leaving(world))
        return (is_leaver_late and bool(self._late) and self._can_go_alone) or self._have_others_waited(now)

    @property
    def _is_settled(self) -> bool:
        """Whether all connected members of the current generation have entered it."""
        there = self._present(self._world.members).values()
        return all(said.entered == self._world.generation for said in there)

    @property
    def _is_handed_over(self) -> bool:
        """Whether the leaving members of the current generation are no longer needed, because all members that stay
        hold the state.

        False if all members leave, so that each of them is waited for until it has gone.
        """
        return bool(self._world.members) and self._is_settled

    @property
    def _is_entered(self) -> bool:
        """Whether any member has entered the current generation. From then on all members of the generation hold the
        state."""
        return 0 < self._world.generation <= self._entered

    @property
    def _survivors(self) -> tuple[str, ...]:
        return self._world.members[: self._world.survivors]

    def _publish(self, world: Generation, now: float) -> Publish:
        passed_over = self._present(self._world.members)
        for member in self._world.members if self._breach else ():  # each member should have reported it
            if member in passed_over and _answered(passed_over[member]) < self._world.generation:
                self._mute.setdefault(member, []).append(now)
            else:
                self._mute.pop(member, None)
        if self.world is None:
            self._is_starter = True
            self.links.move(now)
        self._world, self._newest = world, world.generation
        self.links.look(now)
        self._breach, self._is_hang = "", False
        self._back.clear()
        self._has_begun = world.begun
        self.changes.append((world, now))
        self._published = Publish(world, tuple(dict.fromkeys((*world.everyone, *passed_over))))
        return self._published

    def _finish(self) -> list[Finish]:
        """End the job when some scripts have ended and none of the remaining workers has ever been in a world."""
        is_watched = any(node_of(member) in self.watched for member in self._done)  # an agent may yet report a failure
        there = [
            entry.report for entry in self.roster.values() if self._works(entry.member) and not entry.report.leaving
        ]
        if self.is_finished or not self._done or is_watched or any(report.entered for report in there):
            return []
        self.is_finished = True
        return [Finish(tuple(self.roster))]

    # -- queries and small steps -------------------------------------------------------------------------------------

    def phase(self, entry: RosterEntry) -> Phase:
        """Return the phase in which a member is, such as "working", for the status."""
        if entry.report.leaving:
            return "leaving"
        if entry.report.engines == "building":
            return "building"
        if self._works(entry.member):
            return "working"
        return "waiting" if entry.report.ready else "warming"

    def _works(self, member: str) -> bool:
        return member in self._world.ranks

    def _takes_part(self, member: str) -> bool:
        """Return whether others may wait for a member in a collective, because the member trains or hands over its
        state."""
        return member in self._world.ranks or member in self._world.leavers

    def _is_gone(self, member: str, why: str, now: float) -> None:
        self._gone[member] = why
        if len(self._gone) > REMEMBERED_GONE:
            del self._gone[next(iter(self._gone))]
        if member in self._world.leavers and not self._is_handed_over:
            self._breach = f"{member} broke off its hand-over ({why})"
        self._note(now)

    def _note(self, now: float) -> None:
        """Schedule a decision on the next generation soon, because something has changed."""
        if self._decide_at is None:
            self._decide_at = now + self.settings.debounce_seconds

    def _present(self, members: Iterable[str]) -> dict[str, Report]:
        """Return those of the given members that are connected, with their last reports."""
        return {one: self.roster[one].report for one in members if one in self.roster}


def _answered(report: Report) -> int:
    """Return the last generation for which a member has reported an outcome: it entered the generation, or it could
    not."""
    return max(report.entered, report.broken)
