"""One history of an elastic job, from a seed: what happens to it, what never may, and whether it comes to rest.

The decisions are the product's, on both sides (`elastic.membership_machine`, `membership.boundary_machine`); processes,
tensors and the network are not. See `tests.engine.simulated` and `network`.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations

from ds_dynatrain.elastic.links import largest_reaching
from ds_dynatrain.elastic.settings import Settings
from tests.engine.simulated import Job, Member
from tests.sim.network import Network

SETTINGS = {"silent_seconds": 2.0, "stuck_seconds": 5.0, "recovery_seconds": 1.0}
FOR_EVER = 1e6
FAULT_SECONDS = 4.0
REST_SECONDS = 60.0
LOOK_SECONDS = 30.0
"""After so long without rest somebody looks at the job, and kills what hangs if that is most of the world."""
TURN_SECONDS = 0.03
RESTART_SECONDS = 0.1
"""What an agent takes to start a worker again."""
BUILD_TURNS = (3, 30, 300)
"""How long newcomers may take to make their engines."""


class StuckError(AssertionError):
    """It did not come to rest in time."""


@dataclass
class SimulatedJob(Job):
    """Its processes do what they do when the clock says so."""

    seed: int = 0
    parts: bool = False
    """Whether hosts lose each other while both reach the coordinator."""
    asks: bool = False
    """Whether its script asks for switches."""
    came: int = 0

    def __post_init__(self) -> None:
        self.chance, self.mood = random.Random(self.seed), random.Random(f"asks {self.seed}")
        self.network = Network(Settings(self.least, self.most, **SETTINGS), self.chance, self._hear, self._end)
        self.driver = self.network  # type: ignore[assignment]
        self.broken: set[str] = set()
        self.network.start_coordinator()
        for _ in range(self.nodes):
            self.join()

    def join(self, restarts: int = 0, reach: str = "") -> None:
        """A node comes. reach: where it is, by default on a host of its own."""
        node, self.came = f"n{self.came}", self.came + 1
        member = self.members[f"{node}/0"] = Member(self, f"{node}/0")
        if self.parts:
            reach = reach or f"10.0.{self.came // 256}.{self.came % 256}:1"
        self.network.start(node, restarts, reach)
        self._take_turns(member)

    def _hear(self, name: str) -> None:
        self.members[name].hear()

    def _end(self, name: str, why: str) -> None:
        member = self.members[name]
        has_state = any(engine.works for engine in member.engines)
        assert not has_state or "is over here" not in why or not self.is_anew, f"{name} was turned away with the state"
        if not member.end:
            member.end = f"ended: {why}"
            self.network.die(name)
            reach = self.network.lines[name].reach
            self.network.after(RESTART_SECONDS, lambda: self.join(restarts=1, reach=reach))

    def _take_turns(self, member: Member) -> None:
        if member.end:
            return
        if member.elastic.is_aborted:
            self.broken.discard(member.id)
        if (
            not self.network.hangs(member.id)
            and member.id not in self.broken
            and not self._waits_for_lost_hosts(member)
        ):
            member.turn()
            self._count_steps(member)
        self.network.after(TURN_SECONDS * self.chance.uniform(0.2, 2.0), lambda: self._take_turns(member))

    def _count_steps(self, member: Member) -> None:
        """What the next heartbeat says of its step; that of the first one is said at once."""
        said = self.network.reports[member.id]
        step = max((engine.step for engine in member.engines), default=0)
        if self.parts and said.step not in (0, step):
            self.network.reports[member.id] = said.model_copy(update={"step": step})

    def _waits_for_lost_hosts(self, member: Member) -> bool:
        """Whether a collective of the newest generation that a member knows of can never end."""
        world = self.network.told.get(member.id)
        all_in_it = () if world is None or not self.network.parted else (*world.members, *world.leaving)
        there = [one for one in all_in_it if not self.members[one].end]
        return member.id in there and any(not self._reach(*pair) for pair in combinations(there, 2))

    def _reach(self, one: str, other: str) -> bool:
        lines = self.network.lines
        return self.network.reaches(lines[one].reach, lines[other].reach)

    @property
    def is_anew(self) -> bool:
        """Whether the coordinator knows of no job but one that was begun with it."""
        return self.network.membership is not None and self.network.membership._is_starter

    # -- faults ------------------------------------------------------------------------------------------------------

    def lose_coordinator(self) -> None:
        """Its store is gone with it: whoever is in a change finds the board lost."""
        self.network.kill_coordinator()
        for member in self.alive:
            if (member.world or member.asked) and member.waits_in is None and member.engines:
                member._carry_out(member.machine.board_is_lost("cut"))
            elif member.waits_in is not None and member.waits_in[0] == "ask":
                member.refuse()
            elif member.waits_in is not None and member.waits_in[0] == "switch":
                member.present.decide(member.waits_in[2][0].record_key, {"commit": False, "reason": "cut"})

    def fault(self) -> None:
        """One thing goes wrong, or somebody comes or goes."""
        if self.asks and self.mood.random() < 0.5:
            self.wish(self.mood.randint(1, self.widest), self.mood.randint(1, 2))
        alive = self.alive
        one = self.chance.choice(alive) if alive else None
        seconds = self.chance.choice((0.1, 0.5, 1.5, 3.0))
        on_one: list[Callable[[Member], None]] = [
            self.kill,
            self._leave,
            self._end_early,
            self._breach,
            lambda member: self.network.cut(member.id, seconds),
            lambda member: self.network.drop(member.id, seconds),
            lambda member: self.network.hang(member.id, seconds),
            self._freeze,
            self._get_stuck,
        ]
        on_all: list[Callable[[], None]] = [
            self.join,
            lambda: self.votes.extend(self.chance.choices((True, False), k=2)),
            self._restart_coordinator,
            lambda: self.network.pause_coordinator(seconds),
            lambda: self._cut_all(seconds),
            lambda: self.building.append(self.chance.choice(BUILD_TURNS)),
        ]
        if self.parts and len(alive) > 1 and self.chance.random() < 0.2:
            self._part(*self.chance.sample(alive, 2))
        elif one is not None and self.chance.random() < 0.6:
            self.chance.choice(on_one)(one)
        else:
            self.chance.choice(on_all)()

    def _part(self, one: Member, other: Member) -> None:
        """Two hosts lose each other; both still reach the coordinator."""
        pair = frozenset(self.network.lines[member.id].reach for member in (one, other))
        if len(pair) == 2:
            self.network.parted[pair] = self.network.now + self.chance.choice((0.5, 3.0, 10.0, FOR_EVER))

    def _cut_all(self, seconds: float) -> None:
        """The coordinator's own link is cut."""
        for member in self.alive:
            self.network.cut(member.id, seconds)

    def _freeze(self, member: Member) -> None:
        """The whole process, as by SIGSTOP."""
        self.network.hang(member.id, FOR_EVER)
        self.network.cut(member.id, FOR_EVER)

    def _get_stuck(self, member: Member) -> None:
        """The main thread alone, of one that has trained, or makes its engines for a job that runs."""
        is_told = member.id in self.network.trained or bool(member.coming)
        if is_told and self.network.lines[member.id].cut_until < FOR_EVER:
            self.network.hang(member.id, FOR_EVER)

    def _leave(self, member: Member) -> None:
        self.network.say(member.id, leaving=True)
        member.elastic.member._report = member.elastic.member._report.model_copy(update={"leaving": True})

    def _end_early(self, member: Member) -> None:
        """Its script ends by itself when it is told to go, and has handed nothing over."""
        if self.network.reports[member.id].leaving:
            member.end = "ended by itself"
            self.network.bye(member.id, has_left=False)

    def _breach(self, member: Member) -> None:
        """A collective of it fails: it says so, and waits until all know (`Losses`)."""
        if member.engines and member.engines[0].works and not member.elastic.is_aborted and member.waits_in is None:
            member.elastic.breach()
            member.say()
            self.broken.add(member.id)

    def _restart_coordinator(self) -> None:
        if self.network.membership is not None:
            self.lose_coordinator()
            self.network.after(self.chance.choice((0.0, 0.3, 1.0, 3.0)), self.network.start_coordinator)

    # -- the end -----------------------------------------------------------------------------------------------------

    def kill_what_hangs(self) -> None:
        """Kill the stuck members where they are more than half of the world; the coordinator gives up fewer itself."""
        world = None if self.network.membership is None else self.network.membership.world
        there = [one for one in self.alive if world is not None and one.id in (*world.members, *world.leaving)]
        hung = [one for one in there if self.network.hangs(one.id)]
        if 2 * len(hung) > len(there):
            for member in hung:
                self.kill(member)

    @property
    def live(self) -> list[Member]:
        """Those whose main threads get on."""
        return [one for one in self.alive if not self.network.hangs(one.id)]

    @property
    def has_too_few(self) -> bool:
        """Whether fewer nodes than MIN reach each other, so that nobody may train.

        Where somebody holds the state it has to be one of them: it is not given up while the network may come back.
        """
        stay = [one for one in self.live if not self.network.reports[one.id].leaving]
        holders = [one.id for one in stay if any(engine.works for engine in one.engines)]
        around = [[one.id for one in stay if self._reach(one.id, holder)] for holder in holders]
        sets = around or [[one.id for one in stay]]
        return all(len(largest_reaching(one, lambda a, b: not self._reach(a, b))) < self.least for one in sets)

    @property
    def unrest(self) -> str:
        """Why it is not at rest; empty if all that may train do, in the newest generation."""
        membership = self.network.membership
        world = None if membership is None else membership.world
        live = self.live
        if self.has_too_few:
            return ""
        if membership is None or membership.is_recovering or world is None:
            return "there is no world" if live else ""
        hung = [one for one in self.alive if one not in live and one.id in (*world.members, *world.leaving)]
        late = [one.id for one in hung if one.coming and world.change == "planned"]
        if len(late) < len(hung):
            return f"{hung[0].id} hangs"
        there = [self.members[one] for one in world.members if one not in late]
        training = [member for member in there if not member.end]
        for member in live:
            if not self.network.lines[member.id].term:
                return f"{member.id} has no coordinator"
            if member.id in self.broken:
                return f"{member.id} has said that a collective failed, and nothing follows"
            if member.waits_in is not None:
                return f"{member.id} waits in {member.waits_in[0]}"
            is_outside = member.id not in world.members and not any(engine.works for engine in member.engines)
            if member.id in world.leaving or (member.elastic.is_aborted and member.engines and not is_outside):
                return f"{member.id} has no world"
        for member in training:
            generation = member.elastic.generation
            if generation != world.generation and not (late and generation):
                return f"{member.id} is not in generation {world.generation}: {member.machine.stage}"
        if len(training) < len(there):
            return "some of the world are dead"
        if any(not self._reach(*pair) for pair in combinations(world.members, 2)):
            return "two of the world do not reach each other"
        waiting = [one for one in live if all(self._reach(one.id, other) for other in world.members)]
        waiting = [one for one in waiting if one.id not in world.members]
        if waiting and len(world.members) < self.most:
            return f"{waiting[0].id} is not let in"
        return ""


def history(seed: int, parts: bool = False, asks: bool = False) -> SimulatedJob:
    """Run one. AssertionError if something happens that never may, StuckError if it does not come to rest.

    parts: hosts lose each other, too. asks: the script asks for switches.
    """
    chance = random.Random(f"shape {seed}")
    nodes = chance.randint(1, 3)
    job = SimulatedJob(
        nodes, nodes + chance.randint(0, 2), chance.randint(0, 1), chance.choice((1, 1, 2)), chance.randint(1, 4),
        chance.random() < 0.5, least=min(nodes, chance.choice((1, 1, 1, 2))), seed=seed, parts=parts, asks=asks,
    )  # fmt: skip
    job.widest = max(job.widest, job.least)
    job.network.run(chance.uniform(1.0, 2.5))
    end = job.network.now + FAULT_SECONDS
    while job.network.now < end:
        job.fault()
        job.network.run(chance.choice((0.0, 0.01, 0.06, 0.3, 1.0)))
    job.votes = []
    if job.network.membership is None:
        job.network.start_coordinator()
    end = job.network.now + REST_SECONDS
    while True:
        rest(job, end)
        if job.has_too_few:
            return job
        steps = {member.id: member.engines[0].step for member in job.live if member.engines and member.engines[0].works}
        job.network.run(2.0)
        members = {name: job.members[name] for name in steps}
        if all(one.end or one.engines[0].step > steps[name] for name, one in members.items()):
            return job
        if not (parts and job.unrest):  # else a newcomer came in, and does not reach all
            raise StuckError(f"seed {seed}: at rest, but it makes no steps")


def rest(job: SimulatedJob, end: float) -> None:
    """Let a job come to rest; StuckError if it does not by `end`."""
    while reason := job.unrest:
        if job.network.now > end:
            raise StuckError(f"seed {job.seed}: {REST_SECONDS:g} s after the last fault, {reason}")
        job.network.run(0.5)
        if job.network.now > end - REST_SECONDS + LOOK_SECONDS:
            job.kill_what_hangs()
