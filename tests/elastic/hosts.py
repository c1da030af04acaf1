"""Hosts made of network namespaces, on a switch: each has its own loopback and a cable that can be pulled.

They live in a user namespace, so no rights are needed where the kernel lets anybody make one. Linux with util-linux and
iproute2 only.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field

STAY = ("sh", "-c", "echo ready; exec sleep infinity")
NOBODY = "02:00:00:00:00:01"
ISOLATED = ("unshare", "--user", "--map-root-user", "--net")


class NoHostsError(Exception):
    """This machine does not let us make any, and why."""


@dataclass
class Hosts:
    """`count` hosts, 10.77.0.1, 10.77.0.2 and so on, each on `eth0`. NoHostsError if there can be none."""

    count: int
    _holders: list[subprocess.Popen[str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        try:
            self._switch = self._hold(ISOLATED)
            self._run(self._switch, "ip link add name switch type bridge")
            self._run(self._switch, "ip link set switch up")
            self._hosts = [self._host(number) for number in range(1, self.count + 1)]
        except (OSError, NoHostsError) as error:
            self.close()
            raise NoHostsError(f"no network namespaces here: {error}") from error

    def inside(self, number: int) -> Sequence[str]:
        """What to put before a command so that it runs on a host, from 1."""
        return _inside(self._hosts[number - 1])

    def pull(self, number: int) -> None:
        """The cable of a host is pulled: nobody hears anything more of anybody, not even of an end."""
        self._run(self._switch, f"ip link set cable{number} down")

    def plug(self, number: int) -> None:
        """It is put back."""
        self._run(self._switch, f"ip link set cable{number} up")

    def part(self, one: int, other: int) -> None:
        """Two hosts hear nothing of each other any more: each sends to a card that nobody has. Others hear both."""
        self._run(self._hosts[one - 1], f"ip neighbour replace {address(other)} lladdr {NOBODY} dev eth0 nud permanent")
        self._run(self._hosts[other - 1], f"ip neighbour replace {address(one)} lladdr {NOBODY} dev eth0 nud permanent")

    def join(self, one: int, other: int) -> None:
        """They do again."""
        self._run(self._hosts[one - 1], f"ip neighbour delete {address(other)} dev eth0")
        self._run(self._hosts[other - 1], f"ip neighbour delete {address(one)} dev eth0")

    def close(self) -> None:
        """Nothing is left of them once all that runs on them has ended."""
        for holder in self._holders:
            holder.kill()
            holder.wait()
            if holder.stdout is not None:
                holder.stdout.close()

    def _host(self, number: int) -> int:
        host = self._hold([*_inside(self._switch), "unshare", "--net"])
        self._run(self._switch, f"ip link add name cable{number} type veth peer name eth0 netns {host}")
        self._run(self._switch, f"ip link set cable{number} master switch up")
        self._run(host, "ip link set lo up")
        self._run(host, f"ip address add {address(number)}/24 dev eth0")
        self._run(host, "ip link set eth0 up")
        return host

    def _hold(self, command: Sequence[str]) -> int:
        """The process that keeps a namespace alive."""
        holder = subprocess.Popen([*command, *STAY], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self._holders.append(holder)
        said = "" if holder.stdout is None else holder.stdout.readline()
        if said != "ready\n":
            raise NoHostsError(said.strip())
        return holder.pid

    def _run(self, inside: int, command: str) -> None:
        done = subprocess.run([*_inside(inside), *command.split()], capture_output=True, text=True)
        if done.returncode:
            raise NoHostsError(f"{command}: {done.stderr.strip()}")


def address(number: int) -> str:
    """Of a host, from 1."""
    return f"10.77.0.{number}"


def _inside(process: int) -> list[str]:
    return ["nsenter", f"--target={process}", "--user", "--net", "--preserve-credentials"]
