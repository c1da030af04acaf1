"""Measure thousands of simulated workers that join a coordinator at once, and a loss of which all others must hear.

python tools/bench_joins.py                          # 4,096 workers; about a minute on two cores
python tools/bench_joins.py --workers 512
python tools/bench_joins.py --write docs/figures

A simulated worker is a coroutine that speaks a worker's side of the protocol over its own socket: handshake with tags,
announcement, heartbeats, and the check of each generation that it receives. Two processes run half of the workers each,
and `ds-dynatrain coordinator` runs in a third process. Another measurement has no sockets: the time that the
coordinator's decisions take for 16,384 members.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import random
import secrets
import sys
import time
from collections.abc import Callable
from functools import lru_cache
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench_coordinator import BEAT_SECONDS, coordinator, free_port, verdict, wait_for
from figures import keep, machine, table

from ds_dynatrain.descriptors import raise_descriptors
from ds_dynatrain.elastic.address import Address
from ds_dynatrain.elastic.connection import NO_TAG, TAG_BYTES, Channel, ask_status, new_nonce
from ds_dynatrain.elastic.generation import Generation
from ds_dynatrain.elastic.membership_machine import MembershipStateMachine
from ds_dynatrain.elastic.messages import (
    HEADER,
    Amended,
    Announce,
    Changed,
    Hello,
    Message,
    Refused,
    Report,
    decode,
    encode,
)
from ds_dynatrain.elastic.roster import Publish
from ds_dynatrain.elastic.settings import Settings

PER_NODE = 8
PROCESSES = 2
SIMULATED = 16_384
JOIN_BAR_SECONDS, LOSS_BAR_SECONDS = 10.0, 1.0
ANSWER_SECONDS, RETRY_SECONDS = 5.0, 0.2
"""A worker's time-out for each answer of the handshake, and its mean pause before another attempt."""

decoded: Callable[[bytes], Message] = lru_cache(64)(decode)
"""Decoder that all simulated workers of a process share. Each of them checks its own tag."""


amended: dict[str, Generation] = {}
"""Generations that were made from changes, keyed by digest."""


class LightWorker:
    """One simulated worker.

    newest: the newest generation of which it was told.
    told_at: the time at which it was told.
    """

    def __init__(self, number: int, size: int, token: str) -> None:
        self.number, self._size, self._token = number, size, token
        self.newest: Generation | None = None
        self.told_at = self.connected_at = 0.0
        self.refused: list[str] = []
        self.broken = 0
        self.report = Report(ready=True)
        self.is_announced = False
        self._writer: asyncio.StreamWriter | None = None
        self._channel: Channel | None = None

    async def run(self, address: Address) -> None:
        """Connect, with as many attempts as needed, and read the coordinator's messages."""
        while True:
            try:
                await self._serve(*await self._greet(address))
            except (OSError, EOFError, TimeoutError):
                self.broken += 1
            self.is_announced = False
            await asyncio.sleep(random.uniform(0.5, 1.5) * RETRY_SECONDS)

    def say(self, message: Message) -> None:
        """Send a message if connected."""
        if self._writer is not None and self._channel is not None and not self._writer.is_closing():
            self._writer.write(self._channel.seal(encode(message)))

    def die(self) -> None:
        """Close the connection at once."""
        if self._writer is not None:
            self._writer.transport.abort()

    async def _greet(self, address: Address) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        opening = asyncio.open_connection(address.host, address.port)
        reader, writer = await asyncio.wait_for(opening, ANSWER_SECONDS)
        try:
            challenge: Any = decode((await asyncio.wait_for(frame(reader), ANSWER_SECONDS))[0])
            nonce = new_nonce()
            self._writer, self._channel = writer, Channel(self._token, (challenge.nonce, nonce), "peer")
            self.say(Hello(nonce=nonce))
            self._heard(*await asyncio.wait_for(frame(reader), ANSWER_SECONDS))
            node, local_rank = divmod(self.number, PER_NODE)
            local_size = min(PER_NODE, self._size - PER_NODE * node)
            self.say(Announce(node=f"n{node}", local_rank=local_rank, local_size=local_size, pid=1 + self.number))
            self.say(self.report)
        except BaseException:
            writer.close()
            raise
        self.connected_at, self.is_announced = time.monotonic(), True
        return reader, writer

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                message = self._heard(*await frame(reader))
                if isinstance(message, Changed | Amended):
                    self.newest, self.told_at = in_full(message, self.newest), time.monotonic()
                    self.report = self.report.model_copy(update={"entered": self.newest.generation})
                    self.say(self.report)
        finally:
            writer.close()

    def _heard(self, wire: bytes, tag: bytes = NO_TAG, header: bytes = b"") -> Message:
        if self._channel is None:
            raise RuntimeError("nobody was greeted")
        self._channel.check(header + wire, tag)
        message = decoded(wire)
        if isinstance(message, Refused):
            self.refused.append(message.reason)
        return message


def in_full(message: Changed | Amended, base: Generation | None) -> Generation:
    """Return the generation that a message describes. All workers of a process share one object.

    base: the generation to which the message refers.
    """
    if isinstance(message, Changed):
        return message.world
    if base is None or base.digest != message.change.base:
        raise RuntimeError("a worker was sent a change of a generation that it does not have")
    if message.change.digest not in amended:
        amended[message.change.digest] = message.change.apply(base)
    return amended[message.change.digest]


async def frame(reader: asyncio.StreamReader) -> tuple[bytes, bytes, bytes]:
    """Read the next message, and return it with its tag and its header."""
    header = await reader.readexactly(HEADER.size)
    body = await reader.readexactly(HEADER.unpack(header)[0])
    return body, await reader.readexactly(TAG_BYTES), header


async def lead(workers: list[LightWorker], address: Address, pipe: Pipe) -> None:
    """Run all workers of a process, and answer the questions of the measurement.

    pipe: the connection to the measuring process.
    """
    tasks = [asyncio.create_task(worker.run(address)) for worker in workers]
    beating = asyncio.create_task(beat(workers))
    while (asked := await asyncio.to_thread(pipe.recv)) is not None:
        if asked == "die":
            tasks[0].cancel()
            workers.pop(0).die()
            pipe.send(time.monotonic())
        else:
            newest = max((one.newest.generation for one in workers if one.newest), default=0)
            told = [one for one in workers if one.newest and one.newest.generation == newest]
            pipe.send(
                {
                    "connected": sum(one.connected_at > 0 for one in workers),
                    "last_connected": max(one.connected_at for one in workers),
                    "newest": newest,
                    "size": max((len(one.newest.members) for one in told if one.newest), default=0),
                    "told": len(told),
                    "last_told": max((one.told_at for one in told), default=0.0),
                    "refused": [reason for one in workers for reason in one.refused],
                    "broken": sum(one.broken for one in workers),
                }
            )
    beating.cancel()


async def beat(workers: list[LightWorker]) -> None:
    """Send the heartbeats of all workers, spread over the interval between two of one worker."""
    parts = 20
    while True:
        for part in range(parts):
            begin = time.monotonic()
            for worker in workers[part::parts]:
                if worker.is_announced:
                    worker.say(worker.report)
            await asyncio.sleep(max(0.0, begin + BEAT_SECONDS / parts - time.monotonic()))


def process(numbers: range, size: int, token: str, port: int, pipe: Pipe) -> None:
    """Body of a process that runs simulated workers.

    numbers: the numbers of the workers.
    size: the number of all workers.
    """
    raise_descriptors()
    pipe.recv()
    asyncio.run(lead([LightWorker(number, size, token) for number in numbers], Address("127.0.0.1", port), pipe))


def asked(pipes: list[Pipe]) -> dict[str, Any]:
    """Ask all processes for the state of their workers, and return the merged answer."""
    for pipe in pipes:
        pipe.send("state")
    states = [pipe.recv() for pipe in pipes]
    newest = max(state["newest"] for state in states)
    found = {name: sum((state[name] for state in states), type(states[0][name])()) for name in states[0]}
    last = {name: max(state[name] for state in states) for name in ("last_connected", "last_told", "size")}
    told = sum(state["told"] for state in states if state["newest"] == newest)
    return {**found, **last, "newest": newest, "told": told}


def joins(count: int, port: int, token: str) -> list[list[object]]:
    """Let `count` workers join at once, and then let one die. Return the rows of the table."""
    context, address = multiprocessing.get_context("spawn"), Address("127.0.0.1", port)
    pipes, children = [], []
    with coordinator(-(-count // PER_NODE), token, port, least=-(-count // PER_NODE)) as served:
        wait_for(lambda: ask_status(address, token), "the coordinator")
        for part in range(PROCESSES):
            here, there = context.Pipe()
            numbers = range(part * count // PROCESSES, (part + 1) * count // PROCESSES)
            children.append(context.Process(target=process, args=(numbers, count, token, port, there)))
            children[-1].start()
            pipes.append(here)
        time.sleep(5.0)  # until both processes have imported everything
        begin, spent = time.monotonic(), cpu_seconds(served)
        for pipe in pipes:
            pipe.send("go")
        try:
            state: dict[str, Any] = {}

            def is_told(size: int) -> bool:
                state.update(asked(pipes))
                return bool(state["size"] == size and state["told"] == size)

            wait_for(lambda: is_told(count), "a world of all", 100.0)
            joined = dict(state)
            spent = cpu_seconds(served) - spent
            time.sleep(4 * BEAT_SECONDS)
            idle, beats = cpu_seconds(served), time.monotonic()
            time.sleep(4 * BEAT_SECONDS)
            idle = (cpu_seconds(served) - idle) / (time.monotonic() - beats)
            pipes[0].send("die")
            died = pipes[0].recv()
            wait_for(lambda: is_told(count - 1), "a world of the others", 60.0)
        finally:
            print(state, flush=True)
            for pipe in pipes:
                pipe.send(None)
            for child in children:
                child.kill()
    whole, loss = joined["last_told"] - begin, state["last_told"] - died
    refused = len(state["refused"])
    return [
        [
            f"{count} light workers join at once: the last is told of the world of all",
            f"{whole:.1f} s (connected after {joined['last_connected'] - begin:.1f} s)",
            f"≤ {JOIN_BAR_SECONDS:g} s",
            verdict(whole <= JOIN_BAR_SECONDS),
        ],
        ["of them refused; connections that broke and were tried again", f"{refused}; {joined['broken']}", "0", ""],
        ["the coordinator's CPU until then", f"{spent:.1f} s", "", ""],
        ["the coordinator's share of a core while they train", f"{idle:.2f}", "", ""],
        [
            "a worker dies: the last of the others is told",
            f"{loss:.2f} s",
            f"≤ {LOSS_BAR_SECONDS:g} s",
            verdict(loss <= LOSS_BAR_SECONDS),
        ],
    ]


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


def decisions(count: int) -> list[list[object]]:
    """Return a row with the CPU seconds of the decisions alone, without sockets."""
    machine_, spent = MembershipStateMachine(Settings(1, count, recovery_seconds=0), "feed", 0.0), dict[str, float]()
    machine_.advance(0.1)

    def timed(name: str, call: Callable[[], Any]) -> Any:
        begin = time.process_time()
        result = call()
        spent[name] = time.process_time() - begin
        return result

    said = [
        Announce(node=f"n{number // PER_NODE}", local_rank=number % PER_NODE, local_size=PER_NODE, pid=1 + number)
        for number in range(count)
    ]
    members = timed("announce", lambda: [machine_.announce(one, 0.2) for one in said])

    def report(**fields: object) -> None:
        report = Report(ready=True).model_copy(update=fields)
        for member in machine_.roster:
            machine_.report(member, report, 0.4)

    report()
    first = timed("first world", lambda: machine_.advance(0.5))
    timed("entered", lambda: report(entered=1))
    machine_.lost(members[5], "its connection ended", 0.6)
    second = timed("loss", lambda: machine_.advance(0.8))
    sizes = [len(effect.world.members) for effect in (*first, *second) if isinstance(effect, Publish)]
    if sizes != [count, count - 1]:
        raise RuntimeError(f"worlds of {sizes} members")
    what = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in spent.items())
    return [[f"the decisions alone, {count:,} members, CPU", what, "", ""]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=4096)
    parser.add_argument("--simulated", type=int, default=SIMULATED, help="members for the decisions alone")
    parser.add_argument("--write", type=Path, help="a page, or a folder of them, for the table: docs/figures")
    given = parser.parse_args()
    raise_descriptors()
    rows = joins(given.workers, free_port(), secrets.token_hex(32)) + decisions(given.simulated)
    text = f"Measured on: {machine()}. The coordinator and all workers share the cores.\n\n"
    text += table(("what", "found", "bar", ""), rows)
    print(text)
    if given.write is not None:
        keep(given.write, "bench_joins", text)


if __name__ == "__main__":
    main()
