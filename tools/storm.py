"""Random events in an elastic job: nodes join and leave, and processes are killed and stopped, sometimes two at once.

One worker is always spared, so that a living member has the state. It changes every `SPARED_EVENTS` events to the
youngest one of the world, so that rank 0 is killed often enough. If a new coordinator needs longer to start than
members wait for one, the spared worker ends too, and the storm ends with an error.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable

from nodes import Job, processes
from processes import Growth, is_below, with_variable

from ds_dynatrain.elastic.member import Ending
from ds_dynatrain.elastic.messages import Status

SPARED_EVENTS = 30
SETTLED_EVERY = 6
"""Number of events after which the job has to come to rest."""
SECONDS = 90.0
"""Time limit for coming to rest, if the script starts within seconds."""
AHEAD = 20
"""Steps until the scripts end. No script makes all of them before it reads that it has to end."""
PAUSES = (0.5, 2.0, 6.0)
"""Seconds for which a coordinator stands still."""
AGENT_OPTIONS = ("--max-restarts=1000", "--shutdown-timeout=10")


class Storm:
    """Random events in a job whose coordinator is a process of its own.

    least, most: the limits of the number of nodes. If `most` exceeds the job's MAX, some nodes wait.
    rest_seconds: the time limit for the job to recover.
    told: the events so far, as (time, event, agent).
    """

    def __init__(self, job: Job, seed: int, least: int = 2, most: int = 5, rest_seconds: float = SECONDS) -> None:
        self.job = job
        self.rest_seconds = rest_seconds
        self.chance = random.Random(seed)
        self.least, self.most = least, most
        self.counts: Counter[str] = Counter()
        self.pairs = 0
        self.told: list[tuple[float, str, str]] = []
        self.growth = Growth()
        self.faults: list[str] = []
        self.agents: list[str] = []
        self.spared = ""
        self._spared_until = 0
        self._ended: list[str] = []
        self._names = itertools.count()
        self._coordinator = ""
        self._started_at = 0.0
        self._touched: set[int] = set()
        self._seen_alone: set[int] = set()

    # -- the whole ---------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Start a coordinator and one node more than the minimum, and wait until they train."""
        self._start_coordinator()
        for _ in range(self.least + 1):
            self.join()
        self.settle()

    def run(self, events: int) -> None:
        """Cause this many events. Raises TimeoutError if the job does not recover after some of them."""
        while (done := self.counts.total()) < events:
            self._one()
            if self.chance.random() < 0.2:
                self._one()
                self.pairs += 1
            time.sleep(self.chance.choice((0.05, 0.2, 0.5, 1.0)))
            if done // SETTLED_EVERY != self.counts.total() // SETTLED_EVERY:
                self.settle()

    def end(self) -> None:
        """Let the scripts end, and check that all processes have ended."""
        self.settle()
        self.job.end(AHEAD)
        for name in (*self.agents, self._coordinator):
            code = self.job.processes[name].wait(self.rest_seconds)
            if code:
                self.faults.append(f"{name} ended with code {code}")
        left = with_variable("OUT", str(self.job.folder))
        if left:
            self.faults.append(f"processes {left} are still there")

    def settle(self) -> None:
        """Wait until all nodes that can take part in training do so. Check that no process was left behind, and sample
        what processes hold.
        """
        size = min(len(self.agents), int(self.job.nodes.partition(":")[2])) * self.job.workers
        status = self.job.wait(lambda: self._rest(size), f"{size} members at rest ({self.agents})", self.rest_seconds)
        members = processes(status)
        for name in self.agents:
            self.growth.sample(self.job.processes[name].pid, f"agent {name}", size)
        self.growth.sample(self.job.processes[self._coordinator].pid, "coordinator", size)
        for pid in members:
            self.growth.sample(pid, "worker", size)
        for pid in self._alone() - self._seen_alone:
            self._seen_alone.add(pid)
            self.faults.append(f"process {pid} has lost its agent, and goes on")
        if self.counts.total() >= self._spared_until:
            self.spared = next(name for name in self.agents if members[-1] in self.job.workers_of(name))
            self._spared_until = self.counts.total() + SPARED_EVENTS

    def _alone(self) -> set[int]:
        """Return the processes of this job whose ancestors are gone, and which have not ended a little later."""

        def look() -> set[int]:
            return {pid for pid in with_variable("OUT", str(self.job.folder)) if not is_below(pid, os.getpid())}

        found = look()
        if found:
            time.sleep(1.0)
        return found and found & look()

    def _rest(self, size: int) -> Status | None:
        """Return the status if the world has this many members, all are in it and make steps, and no node is
        leaving.
        """
        self._see_orphans()
        for name in self.agents:
            if self.job.processes[name].poll() is not None:
                raise RuntimeError(f"agent {name} has ended by itself\n{self.job.logs()}")
        if any(self.job.processes[name].poll() is None for name in self._ended):
            return None
        status = self.job.status()
        if status is None or len(status.ranks) != size or len(status.members) != len(self.agents) * self.job.workers:
            return None
        working = [one for one in status.members if one.rank is not None]
        is_in = len(working) == size and all(one.entered == status.generation for one in working)
        return status if is_in and self.job.steps(status.generation) > 2 * size else None

    def _see_orphans(self) -> None:
        """Raise RuntimeError if a worker, which may be the last with the state, has ended because it found no
        coordinator.
        """
        end = f"this process ends with code {Ending.ORPHANED:d}"
        for name in self.agents:
            orphans = [line for line in (self.job.folder / f"{name}.log").read_text().splitlines() if end in line]
            if orphans:
                seconds = time.monotonic() - self._started_at
                raise RuntimeError(
                    f"a job of which state may be lost: {orphans[-1]}; {self._coordinator} was started {seconds:.0f} s "
                    "ago; use a machine that is less busy"
                )

    # -- events ------------------------------------------------------------------------------------------------------

    def _one(self) -> None:
        """Cause one event that is possible now."""
        events: dict[str, Callable[[], bool]] = {
            "a node joins": self.join,
            "SIGTERM to an agent": lambda: self._end_agent(signal.SIGTERM),
            "SIGKILL to an agent": lambda: self._end_agent(signal.SIGKILL),
            "SIGKILL to a worker": self._kill_worker,
            "SIGKILL to rank 0": self._kill_first,
            "SIGSTOP to a worker": self._stop_worker,
            "a main thread hangs": self._hang_worker,
            "SIGKILL to the coordinator": self._kill_coordinator,
            "SIGSTOP to the coordinator, for a while": self._pause_coordinator,
        }
        weights = (6, 2, 2, 2, 2, 1, 1, 1, 1)
        while True:
            name = self.chance.choices(list(events), weights)[0]
            if events[name]():
                self.counts[name] += 1
                return

    def join(self) -> bool:
        """Start a node if there is room for one. Return whether it was started."""
        if len(self.agents) >= self.most:
            return False
        name = f"n{next(self._names)}"
        self.job.node(name, *AGENT_OPTIONS, is_host=0)
        self.agents.append(name)
        self._tell("join", name)
        return True

    def _end_agent(self, number: int) -> bool:
        name = self._victim()
        if name is None or len(self.agents) <= self.least:
            return False
        self._tell("preemption" if number == signal.SIGTERM else "loss", name)
        self.job.kill(name, number)
        self.agents.remove(name)
        self._ended.append(name)
        return True

    def _kill_worker(self) -> bool:
        """Kill a worker, which may still be warming up. Return whether there was one."""
        name = self._victim()
        workers = [] if name is None else self.job.workers_of(name)
        return bool(workers) and self._signal(self.chance.choice(workers), signal.SIGKILL)

    def _kill_first(self) -> bool:
        return any(self._signal(pid, signal.SIGKILL) for pid in self._working()[:1] if not self._is_spared(pid))

    def _stop_worker(self) -> bool:
        """Stop a worker of the world. Outside the world, a stopped worker would not be noticed. Return whether there
        was one.
        """
        working = [pid for pid in self._working() if not self._is_spared(pid)]
        return bool(working) and self._signal(self.chance.choice(working), signal.SIGSTOP)

    def _hang_worker(self) -> bool:
        """Hang the main thread of a worker, by a message to its script. Its heartbeats continue. Return whether there
        was one.
        """
        working = [pid for pid in self._working() if not self._is_spared(pid) and pid not in self._touched]
        if not working:
            return False
        pid = self.chance.choice(working)
        self._touched.add(pid)
        self._tell("hang", self._agent_of(pid))
        (self.job.folder / f"hang-{pid}").touch()
        return True

    def _pause_coordinator(self) -> bool:
        """Stop the coordinator for a while, during which other events happen."""
        process = self.job.processes[self._coordinator]
        process.send_signal(signal.SIGSTOP)
        threading.Timer(self.chance.choice(PAUSES), process.send_signal, (signal.SIGCONT,)).start()
        return True

    def _kill_coordinator(self) -> bool:
        self._tell("coordinator", "")
        self.job.kill(self._coordinator)
        self.job.code(self._coordinator)
        time.sleep(self.chance.choice((0.0, 0.5, 1.5)))
        self._start_coordinator()
        return True

    # -- small things ------------------------------------------------------------------------------------------------

    def _start_coordinator(self) -> None:
        self._coordinator, self._started_at = f"coordinator{next(self._names)}", time.monotonic()
        self.job.coordinator(self._coordinator)

    def _working(self) -> list[int]:
        status = self.job.status()
        return [] if status is None else processes(status)

    def _is_spared(self, pid: int) -> bool:
        return pid in self.job.workers_of(self.spared)

    def _victim(self) -> str | None:
        names = [name for name in self.agents if name != self.spared]
        return self.chance.choice(names) if names else None

    def _tell(self, what: str, name: str) -> None:
        self.told.append((time.monotonic(), what, name))

    def _agent_of(self, pid: int) -> str:
        return next((name for name in self.agents if pid in self.job.workers_of(name)), "")

    def _signal(self, pid: int, number: int) -> bool:
        """Send a signal to a worker unless it already got one: a stopped worker must not be killed as well. Return
        whether sent.
        """
        if pid in self._touched:
            return False
        self._touched.add(pid)
        self._tell("stop" if number == signal.SIGSTOP else "kill", self._agent_of(pid))
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            return False
        return True
