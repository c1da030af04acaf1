"""Measure a coordinator under load: a thousand members, a thousand strangers per second, and forged messages.

python tools/bench_coordinator.py                          # about three minutes on two cores
python tools/bench_coordinator.py --members 200 --seconds 5 --forged 500   # a quick look
python tools/bench_coordinator.py --write docs/figures

The coordinator is `ds-dynatrain coordinator` in a process of its own, with a token and the usual limit of 1,024 open
files. Members are simulated: they have the connections, messages and heartbeats of a worker, but do not train.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import secrets
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from figures import keep, machine, table

from ds_dynatrain.descriptors import raise_descriptors
from ds_dynatrain.elastic.address import Address
from ds_dynatrain.elastic.connection import NO_TAG, TAG_BYTES, Channel, Connection, ask_status, new_nonce
from ds_dynatrain.elastic.generation import Generation
from ds_dynatrain.elastic.main_thread import MainThread
from ds_dynatrain.elastic.messages import HEADER, Announce, Changed, Report, encode
from ds_dynatrain.elastic.store import open_store
from ds_dynatrain.membership.control import Seal

FILES = 1024
BEAT_SECONDS = 0.5
STORES = 2
"""Connections of a worker to the store: one for each of the two boards of a generation."""
ASKED = 300
STRANGERS_A_SECOND = 1000
STATUS_BAR_MS, STRANGERS_BAR_MS, DESCRIPTORS_BAR = 200.0, 1000.0, 4.0
STEP_BAR, LOSS_BAR = 0.005, 1.0
LISTEN_SECONDS = 2.0
"""Seconds without a message after which a connection counts as accepted. The coordinator closes bad ones at once, and
silent ones after 5 s."""
CHANGES = ("a bit", "no tag", "once more", "the order", "left out", "of another connection", "in its own direction")


# ---- a coordinator, and members -------------------------------------------------------------------------------------


@contextmanager
def coordinator(members: int, token: str, port: int, least: int = 1) -> Iterator[int]:
    """Context manager with a coordinator for `least` to `members` nodes, which starts with the usual limit of files.

    Yields the id of its process.
    """
    command = [sys.executable, "-m", "ds_dynatrain.cli", "coordinator", f"127.0.0.1:{port}"]
    command += [f"--nnodes={least}:{members}", "--recovery-seconds=1"]

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (FILES, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))

    process = subprocess.Popen(
        command, env={**os.environ, "DYNATRAIN_TOKEN": token}, preexec_fn=limit, stderr=subprocess.DEVNULL
    )
    try:
        yield process.pid
    finally:
        process.kill()
        process.wait()


class Members:
    """Simulated workers, one per node, in one thread. They send heartbeats, and enter each generation that is
    announced.
    """

    def __init__(self, address: Address, token: str, count: int) -> None:
        self._links: dict[int, tuple[Connection, Report]] = {}
        self._stop, self._starts, self._leaves = threading.Event(), threading.Event(), threading.Event()
        self._poll = select.poll()
        self.world: Generation | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        for number in range(count):
            link = Connection.open(address, token, seconds=60.0)
            link.send(Announce(node=f"n{number}", local_rank=0, local_size=1, pid=1 + number))
            self._links[link.fileno()] = link, Report()
            self._poll.register(link.fileno(), select.POLLIN)
        self.store_port = link.welcome.store_port

    def start(self) -> None:
        """Report all workers as ready; until then, they send heartbeats."""
        self._starts.set()

    def lose_one(self) -> float:
        """Close the connection of one worker; return the seconds until all others have entered a world without it."""
        count, begin = len(self._links) - 1, time.monotonic()
        self._leaves.set()
        wait_for(lambda: self.world is not None and self.entered == count == len(self.world.members), "a loss")
        return time.monotonic() - begin

    def stop(self) -> None:
        """Stop the thread, and close all connections."""
        self._stop.set()
        self._thread.join()
        for link, _ in self._links.values():
            link.close()

    @property
    def entered(self) -> int:
        """The number of workers that have entered the newest generation."""
        newest = 0 if self.world is None else self.world.generation
        return sum(0 < newest == report.entered for _, report in self._links.values())

    def _say(self, number: int, **changes: object) -> None:
        link, report = self._links[number]
        report = report.model_copy(update=changes)
        self._links[number] = link, report
        link.send(report)

    def _run(self) -> None:
        beat = 0
        while not self._stop.is_set():
            begin, numbers = time.monotonic(), list(self._links)
            if self._starts.is_set():
                self._starts.clear()
                for number in numbers:
                    self._say(number, ready=True)
            if self._leaves.is_set():
                self._leaves.clear()
                number = numbers.pop()
                self._poll.unregister(number)
                self._links.pop(number)[0].close()
            # heartbeats are spread over the interval between two of one worker
            for _ in range(-(-len(numbers) // 20)):
                self._say(numbers[beat % len(numbers)])
                beat += 1
            while (left := begin + BEAT_SECONDS / 20 - time.monotonic()) > 0:
                for number, _ in self._poll.poll(1000 * left):
                    self._hear(number)

    def _hear(self, number: int) -> None:
        link = self._links[number][0]
        link.read()
        for message in link.messages():
            if isinstance(message, Changed):
                if self.world is None or message.world.generation > self.world.generation:
                    self.world = message.world
                self._say(number, entered=message.world.generation)


def descriptors(process: int) -> int:
    """Return the number of open files of a process."""
    return len(os.listdir(f"/proc/{process}/fd"))


def percentiles(times: list[float]) -> tuple[float, float]:
    """The median and the 99th percentile, in milliseconds."""
    ordered = sorted(times)
    return 1e3 * ordered[len(ordered) // 2], 1e3 * ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]


def measured(ask: Callable[[], object], times: int) -> list[float]:
    """Call a function several times, and return the seconds of each call."""
    found = []
    for _ in range(times):
        begin = time.perf_counter()
        ask()
        found.append(time.perf_counter() - begin)
    return found


def many_members(count: int, token: str, port: int) -> list[list[object]]:
    """Return rows about a world of this many members: how it formed, open files, and how quickly the coordinator
    answers.
    """
    address = Address("127.0.0.1", port)
    with coordinator(count, token, port) as process:
        wait_for(lambda: ask_status(address, token), "the coordinator")
        before, begin = descriptors(process), time.monotonic()
        members = Members(address, token, count)
        connected = time.monotonic() - begin
        begin = time.monotonic()
        members.start()
        wait_for(lambda: members.world is not None and members.entered == count == len(members.world.members), "all")
        formed = time.monotonic() - begin
        world = members.world
        stores = (
            [open_store("127.0.0.1", members.store_port, world.prefix, 60.0) for _ in range(STORES * count)]
            if world
            else []
        )
        for store in stores:
            store.check(["there"])
        held = (descriptors(process) - before) / count
        middle, worst = percentiles(measured(lambda: ask_status(address, token, 30.0), ASKED))
        soft = next(line for line in Path(f"/proc/{process}/limits").read_text().splitlines() if "open files" in line)
        lost = members.lose_one()
        members.stop()
    return [
        [f"{count} members connect", f"{connected:.1f} s", "", ""],
        [f"{count} members are told of one world, and all have entered it", f"{formed:.1f} s", "", ""],
        [
            "one is lost, until all others have heard of it",
            f"{lost:.2f} s",
            f"≤ {LOSS_BAR:g} s",
            verdict(lost <= LOSS_BAR),
        ],
        [
            f"files that it may open, begun with {FILES}",
            soft.split()[3],
            f"> {FILES}",
            verdict(int(soft.split()[3]) > FILES),
        ],
        ["files open for a member", f"{held:.2f}", f"≤ {DESCRIPTORS_BAR:.0f}", verdict(held <= DESCRIPTORS_BAR)],
        [
            "`status`, median and p99",
            f"{middle:.0f} and {worst:.0f} ms",
            f"< {STATUS_BAR_MS:.0f}",
            verdict(worst < STATUS_BAR_MS),
        ],
    ]


# ---- strangers -------------------------------------------------------------------------------------------------------


FLOOD = """
import socket, sys, time
port, a_second, seconds = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
begin, count, held = time.monotonic(), 0, []
while time.monotonic() - begin < seconds:
    for _ in range(int((time.monotonic() - begin) * a_second) - count):
        count += 1
        link = socket.socket()
        link.setblocking(False)
        link.connect_ex(("127.0.0.1", port))
        held.append(link)
    while len(held) > 4000:
        held.pop(0).close()
    time.sleep(0.002)
print(count / (time.monotonic() - begin))
"""
"""A script that opens this many connections per second, which stay open and send nothing."""


def strangers(token: str, port: int, seconds: float) -> list[list[object]]:
    """Return rows on how quickly honest connections get an answer while strangers connect."""
    address, found = Address("127.0.0.1", port), list[float]()
    with coordinator(100, token, port):
        wait_for(lambda: ask_status(address, token), "the coordinator")
        members = Members(address, token, 100)
        members.start()
        wait_for(lambda: members.entered == 100, "all")
        command = [sys.executable, "-c", FLOOD, str(port), str(STRANGERS_A_SECOND), str(seconds)]
        flood = subprocess.Popen(command, stdout=subprocess.PIPE, preexec_fn=raise_descriptors)
        refused, end = 0, time.monotonic() + seconds
        time.sleep(0.5)
        while time.monotonic() < end - 0.5:
            begin = time.perf_counter()
            try:
                ask_status(address, token, 10.0)
            except OSError:
                refused += 1
            found.append(time.perf_counter() - begin)
            time.sleep(0.02)
        came = float(flood.communicate()[0])
        status = ask_status(address, token)
        lost = 100 - len(status.ranks)
        members.stop()
    middle, worst = percentiles(found)
    is_met = worst < STRANGERS_BAR_MS and not refused and not lost
    return [
        [
            f"a status beside {came:.0f} silent connections a second and 100 members, median and p99 of {len(found)}",
            f"{middle:.0f} and {worst:.0f} ms; {refused} refused, {lost} members lost",
            f"< {STRANGERS_BAR_MS:.0f} ms",
            verdict(is_met),
        ]
    ]


# ---- changed messages ------------------------------------------------------------------------------------------------


def forged(frames: list[bytes], change: str, welcome: bytes, other: bytes, chance: random.Random) -> bytes:
    """Return the bytes of messages of which one was changed on its way.

    change: the kind of change.
    welcome: a message from the coordinator.
    other: a message that belongs to another connection.
    """
    place = chance.randrange(len(frames))
    match change:
        case "a bit":
            wire = bytearray(frames[place])
            at = chance.randrange(HEADER.size, len(wire))
            wire[at] ^= 1 << chance.randrange(8)
            frames[place] = bytes(wire)
        case "no tag":
            frames[place] = frames[place][:-TAG_BYTES] + NO_TAG
        case "once more":
            frames.insert(place, frames[place])
        case "the order":
            frames[place], frames[place - 1] = frames[place - 1], frames[place]
        case "left out":
            del frames[min(place, len(frames) - 2)]
        case "of another connection":
            frames.insert(place, other)
        case "in its own direction":
            frames.insert(place, welcome)
    return b"".join(frames)


def changed(count: int, token: str, port: int) -> list[list[object]]:
    """Change one message on each of `count` connections. Return a row on how many of them the coordinator still
    accepts.
    """
    from tests.elastic.by_hand import greeted

    address, chance, taken = Address("127.0.0.1", port), random.Random(0), 0
    with coordinator(count, token, port):
        wait_for(lambda: ask_status(address, token), "the coordinator")
        other = greeted(address, token)
        for number in range(count):
            with greeted(address, token) as end:
                welcome = end.frame()
                frames = [end.sealed(Announce(node=f"f{number}", local_rank=0, local_size=1, pid=1))]
                frames += [end.sealed(Report(step=step)) for step in range(3)]
                stray = other.sealed(Report(step=4))
                end.link.sendall(forged(frames, CHANGES[number % len(CHANGES)], welcome, stray, chance))
                end.link.settimeout(LISTEN_SECONDS)
                try:
                    end.rest()
                except TimeoutError:
                    taken += 1
    what = f"of {count} connections in which one message was changed, the coordinator goes on with"
    return [[what, f"{taken}", "0", verdict(not taken)]]


# ---- what it costs a worker ------------------------------------------------------------------------------------------


def heartbeat(token: str, port: int) -> list[list[object]]:
    """Return rows on the share of one core that a worker spends on membership while nothing happens."""
    address, watched = Address("127.0.0.1", port), MainThread()
    with coordinator(1, token, port):
        wait_for(lambda: ask_status(address, token), "the coordinator")
        link = Connection.open(address, token)
        link.send(Announce(node="n", local_rank=0, local_size=1, pid=1))

        def beat() -> None:
            blocked = watched.blocked_seconds()
            link.send(Report(ready=True, step=1, blocked_seconds=blocked))

        took = least(beat, 500)
        link.close()
    share = took / BEAT_SECONDS
    what = f"a worker's heartbeat, {1e6 * took:.0f} µs every {BEAT_SECONDS:g} s: share of a step"
    return [[what, f"{100 * share:.3f} %", f"≤ {100 * STEP_BAR:g} %", verdict(share <= STEP_BAR)]]


def tags() -> str:
    """Return a sentence on how long authentication tags take, for a heartbeat, a world of 64, and records on
    the board.
    """
    members = tuple(f"node-{number}/0" for number in range(64))
    world = Generation(term="feed", generation=7, change="planned", members=members)
    beat, change = encode(Report(ready=True, entered=7, step=1000)), encode(Changed(world=world))
    nonces, token, seal = (new_nonce(), new_nonce()), secrets.token_hex(16), Seal(secrets.token_bytes(32))
    channel, said = Channel(token, nonces, "peer"), list[str]()
    for name, wire in (("a heartbeat", beat), ("a world of 64", change)):
        took = 1e6 * least(partial(channel.seal, wire), 2000)
        said.append(f"{name}, {len(wire)} bytes, {took:.1f} µs")
    small, large = seal.put("key", bytes(200)), seal.put("key", bytes(1 << 20))
    took = 1e6 * least(partial(seal.take, "key", small), 2000)
    said.append(f"a small record {took:.1f} µs")
    took = 1e3 * least(partial(seal.take, "key", large), 20)
    return f"Tags: {'; '.join(said)}; a record of a megabyte {took:.2f} ms."


def least(work: Callable[[], object], times: int) -> float:
    """Return the seconds of one call, from the fastest of five series."""
    series = []
    for _ in range(5):
        begin = time.perf_counter()
        for _ in range(times):
            work()
        series.append((time.perf_counter() - begin) / times)
    return min(series)


# ---- the whole -------------------------------------------------------------------------------------------------------


def wait_for(holds: Callable[[], object], what: str, seconds: float = 120.0) -> None:
    """Wait until `holds()` is true. Raises TimeoutError, with `what`, if this takes longer than `seconds`."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            if holds():
                return
        except OSError:
            pass
        time.sleep(0.05)
    raise TimeoutError(f"{what} did not come within {seconds:g} s")


def verdict(is_met: bool) -> str:
    """Return the word for the table: whether a bar is met."""
    return "pass" if is_met else "missed"


def free_port() -> int:
    """Return a TCP port that is currently free."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--members", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=30.0, help="how long strangers come")
    parser.add_argument("--forged", type=int, default=5000)
    parser.add_argument("--write", type=Path, help="a page, or a folder of them, for the table: docs/figures")
    args = parser.parse_args()
    raise_descriptors()
    token = secrets.token_hex(32)
    rows = many_members(args.members, token, free_port())
    rows += strangers(token, free_port(), args.seconds)
    rows += changed(args.forged, token, free_port())
    rows += heartbeat(token, free_port())
    text = f"Measured on: {machine()}. The coordinator and all that speak to it share the cores. {tags()}\n\n"
    text += table(("what", "found", "bar", ""), rows)
    print(text)
    if args.write is not None:
        keep(args.write, "bench_coordinator", text)


if __name__ == "__main__":
    main()
