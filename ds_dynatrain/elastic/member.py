"""A worker's side of membership: its connection to the coordinator, which decides which processes train together.

One thread keeps the connection. It sends heartbeats, receives messages and watches for SIGTERM. If the coordinator is
lost, the thread reconnects, however long that takes. Meanwhile training continues, because it needs the coordinator
only when the world changes.
"""

from __future__ import annotations

import faulthandler
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from enum import IntEnum
from multiprocessing.connection import wait

from torch._C._distributed_c10d import Store

from ds_dynatrain.elastic.connection import Connection, ask_to_leave, connect, logger, retry_pause
from ds_dynatrain.elastic.environment import WorkerPlace
from ds_dynatrain.elastic.generation import LONGEST_TEXT, Generation, member_id
from ds_dynatrain.elastic.main_thread import OWN_WAITS, WAITING, MainThread
from ds_dynatrain.elastic.messages import (
    LONGEST_WORDS,
    Announce,
    Bye,
    Changed,
    Figures,
    Finished,
    Leave,
    Message,
    Probe,
    Protected,
    Refused,
    Report,
    Show,
    Switched,
    Tally,
    clipped,
)
from ds_dynatrain.elastic.reach import Reach
from ds_dynatrain.elastic.settings import ORPHAN_SECONDS
from ds_dynatrain.elastic.showing import LAST_LINES, shown
from ds_dynatrain.elastic.store import open_store
from ds_dynatrain.elastic.worker_process import Termination, end_with_parent, in_forked_children
from ds_dynatrain.errors import CoordinatorUnproved, JobFinished, MessageError, PeerRefused

JOIN_SECONDS = 600.0
CONNECT_SECONDS = 2.0
REMEMBERED_SWITCHES = 16
"""Number of recent switches kept, so that they can be reported again to another coordinator."""


class Ending(IntEnum):
    """Exit codes with which a member ends its own process, whatever its script is doing; one for each reason."""

    GIVEN_UP = 85
    """The other members continue without this one."""
    ORPHANED = 86
    """No coordinator was reachable for too long."""
    TOO_FEW = 87
    """Fewer than MIN nodes (the job's minimum) were present for too long."""
    DEVICE = 88
    """The member's accelerator has failed for good."""


def end_process(ending: Ending, reason: str) -> None:
    """End this process. Called when it is no longer a member of the job and the other members do not need its state."""
    logger.error("this process ends with code %d: %s", ending, reason)
    os._exit(ending)


class Member:
    """Membership of this process in a job. `start` and `stop` must be called from the main thread, all other methods
    may be called from any thread.

    on_world: called on the member's own thread with every new generation, before threads that wait for the generation
        wake up. It returns True if the member's current world can no longer be used and all its collectives in flight
        have been aborted. It must return quickly, because no heartbeat is sent in the meantime.
    on_end: called on that thread when the process has to end; by default it ends the process.
    orphan_seconds: how long the member continues without a coordinator before its process has to end.
    waits_in: modules in which the main thread waits for other members. Time spent in them does not count as being
        stuck, because the other members would be at fault.
    hangs_in: called at each heartbeat with the number of seconds for which the main thread has run no Python code. It
        returns the collective in which that thread has waited for too long, or "".
    """

    def __init__(
        self,
        place: WorkerPlace,
        token: str | None = None,
        on_world: Callable[[Generation], bool] = lambda world: True,
        on_end: Callable[[Ending, str], object] = end_process,
        orphan_seconds: float = ORPHAN_SECONDS,
        waits_in: tuple[str, ...] = WAITING,
        hangs_in: Callable[[float], str] = lambda blocked_seconds: "",
    ) -> None:
        self.id = member_id(place.node, place.local_rank)
        self.place = place
        self._token = token
        self._on_world = on_world
        self._on_end = on_end
        self._orphan_seconds = orphan_seconds
        self._connection: Connection | None = None
        self._nonce = secrets.token_hex(8)
        self._termination = Termination()
        self._reach = Reach(self._send)
        self._reach_address = ""
        self._report = Report()
        self._has_just_entered = False
        self._switched: deque[Switched] = deque(maxlen=REMEMBERED_SWITCHES)
        self._reporting = threading.RLock()
        self._main_thread = MainThread(waits_in)
        self._hangs_in = hangs_in
        self._waits_for = ""
        self._is_stuck = False
        self.newest: Generation | None = None
        """The newest generation that this member has received."""
        self._has_breach = False
        self.has_left = False
        """Whether the others no longer need this member, because its state was handed over or saved. Set before
        `stop`."""
        self.is_finished = False
        """Whether the scripts of the working members have ended, so that waiting members will get no work."""
        self._changed = threading.Condition()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dynatrain-member", daemon=True)

    # -- the script's side -------------------------------------------------------------------------------------------

    def start(self, seconds: float = JOIN_SECONDS) -> None:
        """Register with the coordinator. The member is not ready yet, so nothing changes for the others.

        From this call on, SIGTERM means "leave", and this process ends when its agent ends. Raises TimeoutError if no
        coordinator answers within `seconds`, and PeerRefused or JobFinished if the coordinator does not admit this
        process.
        """
        end_with_parent(self.place.agent)
        LAST_LINES.listen()
        self._connection = connect(self.place.coordinator, self._token, self.place.job, seconds)
        self._reach_address = self._reach.listen()
        self._announce()
        self._termination.watch()
        in_forked_children(self._close_connection)
        self._thread.start()

    def ready(self) -> None:
        """Report that everything is imported and built, so that the next generation may include this member."""
        self._say(ready=True)

    def building(self) -> None:
        """Report that this member is still building its engines for a running job, so that the others need not wait for
        it."""
        if self._report.engines == "none":
            self._say(engines="building")

    def built(self) -> None:
        """Report that all engines are built and the script has reached its training loop."""
        if self._report.engines != "built":
            self._say(engines="built")

    def leave(self) -> None:
        """Ask to leave the job, as SIGTERM does. The next generation lists this member as leaving."""
        self._say(leaving=True)
        with self._changed:
            self._changed.notify_all()

    @property
    def min_nodes(self) -> int:
        """The minimum number of nodes with which the job trains, as reported by the coordinator."""
        return 1 if self._connection is None else self._connection.welcome.min_nodes

    def send_home(self, node: str) -> None:
        """Ask the coordinator to make a node leave that has no work, as `ds-dynatrain leave` does.

        Raises PeerRefused if the job needs the node, and the other errors of `ask_to_leave` if no coordinator answers.
        """
        ask_to_leave(self.place.coordinator, node, self._token, is_spare=True)

    def enter(self, world: Generation) -> None:
        """Report that this member trains in a generation from now on. Called once the switch to that generation is
        committed."""
        with self._reporting:
            self._has_breach, self._has_just_entered = False, True
            self._say(entered=world.generation, hung="")

    def broken(self, world: Generation) -> None:
        """Report that this member could not form the world of a generation, so that all members have to form a later
        one."""
        with self._reporting:
            self._say(broken=max(world.generation, self._report.broken))

    def lacks(self, world: Generation) -> None:
        """Report that no layout is possible with the members of a generation, because they are too few."""
        if self._report.lacking < world.generation:
            self._say(lacking=world.generation)

    def breach(self, hung: str = "") -> None:
        """Report that a collective has failed or hung in this member's current world, so that all members have to form
        a new world.

        The coordinator may publish a generation before it receives this report, so the failure is reported again for
        each later generation, until `on_world` returns True for one of them.

        hung: a description of the collective if it hung; "" if it failed.
        """
        with self._reporting:
            self._has_breach = True
            self._note(hung=clipped(hung, LONGEST_WORDS))
            if self.newest is not None:
                self.broken(self.newest)

    def progress(
        self,
        step: int,
        layout: str = "",
        pause_ms: float = 0.0,
        protected: Protected = "",
        tally: Tally = Tally(),  # noqa: B008 - it is frozen
        figures: Figures = Figures(),  # noqa: B008 - it is frozen
    ) -> None:
        """Record this member's progress, which the job's status shows.

        The record is sent with the next heartbeat, with two exceptions. The first step is reported at once, because
        from then on the job has state that can be lost. The first call in a new generation is reported at once, because
        it shows that the change is over.
        """
        with self._reporting:
            is_first = step > 0 == self._report.step or self._has_just_entered
            self._has_just_entered = False
            tally = tally.model_copy(update={"generation": self._report.entered})
            what = {"layout": layout, "pause_ms": pause_ms, "protected": protected, "tally": tally, "figures": figures}
            self._note(step=step, **what)
            if is_first:
                self._say()

    def switched(self, said: Switched) -> None:
        """Report the outcome of a switch, for people who watch the job. Called on the member of rank 0."""
        with self._reporting, suppress(OSError):  # sent again after the next connect
            self._switched.append(said)
            self._send(said)

    def waits_for(self, whom: str) -> None:
        """Record for which members this member is waiting. The status shows this from the next heartbeat on.

        whom: a description of those members; "" for none.
        """
        self._waits_for = clipped(whom, LONGEST_TEXT)

    def is_newest(self, world: Generation) -> bool:
        """Return whether this member has received no generation later than `world`."""
        newest = self.newest
        return newest is None or newest.generation <= world.generation

    @property
    def is_leaving(self) -> bool:
        """Whether this member will leave: it has asked for it, or it was asked by SIGTERM or by the coordinator."""
        return self._report.leaving

    def wait_for_world(self, after: int = 0, seconds: float | None = None) -> Generation:
        """Wait for a generation later than `after`, and return the newest one, which may not list this member.

        Raises JobFinished if no work will come, because the scripts of the working members have ended or this member
        was asked to leave while it was in no generation. Raises TimeoutError after `seconds`.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._is_decided(after), seconds):
                raise TimeoutError(f"{self.id}: no generation after {after} within {seconds:g} s")
            if self.newest is not None and self.newest.generation > after:
                return self.newest
            raise JobFinished("the job has finished" if self.is_finished else f"{self.id} was told to leave")

    def store(self, prefix: str, seconds: float) -> Store:
        """Open a new connection to the job's key-value store, and return it. All its keys get a prefix.

        seconds: the longest time that a call on the store waits.
        """
        if self._connection is None:
            raise RuntimeError(f"{self.id} has not been started")
        return open_store(self._connection.address.host, self._connection.welcome.store_port, prefix, seconds)

    def stop(self, has_ended: bool = True) -> None:
        """Say goodbye and close the connection, because the script has ended or the state was handed over.

        has_ended: False if the script ends with an error, so that the others count this member as lost.
        """
        self._stopping.set()
        self._termination.wake()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join()
        self._termination.stop()
        self._reach.close()
        if has_ended:
            with suppress(OSError):
                newest = 0 if self.newest is None else self.newest.generation
                self._send(Bye(newest=newest, has_left=self.has_left))
        if self._connection is not None:
            self._connection.close()

    def _is_decided(self, after: int) -> bool:
        newest = self.newest
        if self.is_finished or (newest is not None and newest.generation > after):
            return True
        return self._report.leaving and (newest is None or self.id not in newest.everyone)

    # -- reports -----------------------------------------------------------------------------------------------------

    def _note(self, **fields: object) -> None:
        """Change fields of the report; they are sent with the next heartbeat."""
        with self._reporting:
            self._report = self._report.model_copy(update=fields)

    def _say(self, **fields: object) -> None:
        """Change fields of the report and send it at once. If sending fails, the report is sent after the next
        reconnection."""
        with self._reporting, suppress(OSError):
            self._note(**fields)
            self._send_report()

    def _send_report(self) -> None:
        with self._reporting:
            self._send(self._report)

    def _send(self, *messages: Message) -> None:
        if self._connection is not None:
            for message in messages:
                self._connection.send(message)

    def _announce(self) -> None:
        place = self.place
        with self._reporting:
            said = Announce(
                node=place.node,
                local_rank=place.local_rank,
                local_size=place.local_size,
                pid=os.getpid(),
                nonce=self._nonce,
                restarts=place.restarts,
                world=self.newest,
                reach=self._reach_address,
            )
            self._send(said, self._report, *self._switched)

    # -- the member's thread -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self._serve()
            except (OSError, MessageError) as error:
                if not self.is_finished and not self._stopping.is_set():
                    logger.warning("%s: the coordinator is lost (%s); training goes on", self.id, error)
            except PeerRefused as error:
                self._end(Ending.GIVEN_UP, str(error))
                return
            if self.is_finished or self._stopping.is_set() or not self._come_back():
                return

    def _serve(self) -> None:
        """Send heartbeats and handle messages over one connection until it breaks or `stop` is called."""
        connection = self._connection
        if connection is None:
            return
        beat, most = connection.welcome.beat_seconds, connection.welcome.stuck_seconds
        next_beat = time.monotonic() + beat
        while not self._stopping.is_set():
            waits_for = [connection.fileno(), self._termination.fileno(), *self._reach.filenos()]
            ready = wait(waits_for, max(0.0, next_beat - time.monotonic()))
            self._see_termination()
            self._reach.answer()
            if connection.fileno() in ready:
                connection.read()
                for message in connection.messages():
                    self._take(message)
            if time.monotonic() >= next_beat:
                self._look_at_main_thread(most)
                self._send_report()
                next_beat = time.monotonic() + beat

    def _look_at_main_thread(self, most: float) -> None:
        """Record how long the main thread has been blocked and what it waits for, and report a hung collective.

        Dumps the stacks of all threads once if the main thread has been blocked for longer than `most` seconds.
        """
        seconds, waits_for = self._main_thread.blocked_seconds(), self._waits_for or str(OWN_WAITS)
        self._note(blocked_seconds=seconds, waits_for=waits_for)
        if hung := self._hangs_in(seconds):
            self.breach(hung)
        is_stuck = 0 < most <= seconds
        if is_stuck and not self._is_stuck:
            logger.error(
                "%s: the main thread has not moved for %.0f s; give the coordinator a longer stuck_seconds if it may "
                "take so long; it is here:",
                *(self.id, seconds),
            )
            faulthandler.dump_traceback(all_threads=True)
        self._is_stuck = is_stuck

    def _take(self, message: object) -> None:
        match message:
            case Changed(world=world):
                self._hear(world)
            case Leave():
                self._see_request("its node was told to leave")
            case Probe(peers=peers):
                self._reach.ask(peers)
            case Show():
                self._send(shown())
            case Finished():
                with self._changed:
                    self.is_finished = True
                    self._changed.notify_all()
            case Refused(reason=reason):
                raise PeerRefused(reason)
            case _:
                raise MessageError(f"{message!r} is nothing that a worker is told")

    def _hear(self, world: Generation) -> None:
        newest = self.newest
        if newest is not None and world.generation <= newest.generation:
            return
        logger.info("%s: generation %d, %s: %s", self.id, world.generation, world.change, world.reason)
        self.newest = world
        is_aborted = self._on_world(world)
        with self._reporting:
            if self._has_breach and not is_aborted:
                self.broken(world)
            self._has_breach = self._has_breach and not is_aborted
        with self._changed:
            self._changed.notify_all()

    def _see_termination(self) -> None:
        if self._termination.read():
            self._see_request("SIGTERM")

    def _see_request(self, why: str) -> None:
        if not self._report.leaving:
            logger.warning("%s: %s; its state is handed over, then it goes", self.id, why)
            self.leave()

    def _come_back(self) -> bool:
        """Reconnect and announce this member again. Returns False if `stop` was called, or if reconnecting is not
        possible and the process has to end."""
        begin = time.monotonic()
        while not self._stopping.wait(retry_pause()):
            self._see_termination()
            try:
                old = self._connection
                connection = Connection.open(
                    self.place.coordinator, self._token, self.place.job, seconds=CONNECT_SECONDS
                )
                if old is not None:
                    old.close()
                self._connection = connection
                self._announce()
                logger.warning("%s: a coordinator is there again after %.1f s", self.id, time.monotonic() - begin)
                return True
            except (OSError, MessageError, CoordinatorUnproved) as error:  # also if another process listens at the port
                if time.monotonic() - begin > self._orphan_seconds:
                    self._end(Ending.ORPHANED, f"no coordinator for {self._orphan_seconds:g} s ({error})")
                    return False
            except (PeerRefused, JobFinished) as error:
                self._end(Ending.GIVEN_UP, str(error))
                return False
        return False

    def _end(self, ending: Ending, reason: str) -> None:
        self._on_end(ending, f"{self.id}: {reason}")

    def _close_connection(self) -> None:
        """Close the sockets that a forked child process has inherited. Otherwise they would keep the connection open
        after this process is killed."""
        self._reach.close()
        if self._connection is not None:
            self._connection.close()
