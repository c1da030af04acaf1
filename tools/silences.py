"""Check that a coordinator that hears nothing for a while gives up no member, and that training continues.

python tools/silences.py                                  # every case 10 times; about half an hour
python tools/silences.py --rounds 2 --only "cut 6" "stop 6"
python tools/silences.py --write docs/figures

A job has three nodes on hosts of their own, and the coordinator on a fourth host; the hosts are network namespaces of
this machine. "stop" stops the coordinator's process, "cut" disconnects its host, and "all" stops all workers at once,
each for the given number of seconds. Afterwards the same processes must train in the same generation, no step may be
made twice, and every sum must be that of all samples up to it. Otherwise the exit status is 1, and the folder with all
logs stays.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from figures import conclude, machine
from history import mistakes
from nodes import Job

from ds_dynatrain.elastic.address import Address
from tests.elastic.hosts import Hosts, address

NODES, COORDINATOR = 3, 4
TIMES = {"debounce_seconds": 0.05, "beat_seconds": 0.5, "silent_seconds": 5.0, "recovery_seconds": 3.0}
"""The default times, because the seconds below are real ones."""
CASES = {"stop": (6, 20, 60), "cut": (6, 20), "all": (6, 12)}
HEARD_SECONDS = 20.0
"""After a cut of 20 s, TCP tries again within this many seconds."""
MORE_STEPS = 20


class Silences:
    """One job on four hosts."""

    def __init__(self, folder: Path, hosts: Hosts) -> None:
        self._hosts = hosts
        at = Address(address(COORDINATOR), 29400)
        variables = {"DYNATRAIN_TOKEN": "silences-are-no-deaths", "GLOO_SOCKET_IFNAME": "eth0"}
        self.job = Job(folder, nodes=f"1:{NODES}", variables=variables, times=dict(TIMES), address=at)
        self.job.coordinator("coordinator", host=hosts.inside(COORDINATOR))
        for number in range(1, NODES + 1):
            self.job.node(f"host{number}", host=hosts.inside(number), at=address(number), is_host=0)
        self._workers: set[int] = self.job.wait(self._all_train, f"steps of {NODES}")

    def _all_train(self) -> set[int]:
        """Return the workers once all of them have made a step in one generation; an empty set before that."""
        newest = max((row["generation"] for row in self.job.rows("step")), default=0)
        found = {row["pid"] for row in self.job.rows("step") if row["generation"] == newest}
        return found if len(found) == NODES else set()

    @contextmanager
    def _stopped(self, *pids: int) -> Iterator[None]:
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGCONT)

    @contextmanager
    def _cut(self) -> Iterator[None]:
        self._hosts.pull(COORDINATOR)
        try:
            yield
        finally:
            self._hosts.plug(COORDINATOR)

    def silence(self, case: str, seconds: float) -> str:
        """Cause one silence. Return what was wrong afterwards; "" if nothing was.

        case: "stop", "cut" or "all".
        """
        events, generation = len(self.job.rows("formed")), self.job.rows("step")[-1]["generation"]
        begun = self._last_step()
        ways: dict[str, Callable[[], AbstractContextManager[None]]] = {
            "stop": lambda: self._stopped(self.job.processes["coordinator"].pid),
            "cut": self._cut,
            "all": lambda: self._stopped(*self._workers),
        }
        with ways[case]():
            time.sleep(seconds)
            during = self._last_step()
        try:
            self._wait_until_heard()
        except TimeoutError as error:
            return str(error)[:2000]
        wrong = []
        if case != "all" and during < begun + MORE_STEPS:
            wrong.append(f"training stood still: step {begun}, and {during} after {seconds:g} s")
        if len(self.job.rows("formed")) > events or self.job.rows("step")[-1]["generation"] != generation:
            wrong.append(f"another generation: {self.job.rows('formed')[-1]['reason']}")
        if self._all_train() != self._workers:
            wrong.append("other processes")
        return "; ".join(wrong)

    def _last_step(self) -> int:
        return max(int(row["step"]) for row in self.job.rows("step"))

    def _wait_until_heard(self) -> None:
        """Wait until the coordinator has heard all members again and training continues."""
        wanted = self._last_step() + MORE_STEPS
        self.job.wait(lambda: self._last_step() > wanted, f"step {wanted}", HEARD_SECONDS)
        time.sleep(TIMES["silent_seconds"] + 2)

    def end(self) -> str:
        """End the job. Return what is wrong with its history; "" if nothing is."""
        self.job.end()
        codes = {name: self.job.code(name) for name in self.job.processes}
        wrong = [f"{name} ended with {code}" for name, code in codes.items() if code]
        return "; ".join([*wrong, *mistakes(self.job.rows())[:3]])


def run(only: list[str], rounds: int, folder: Path, say: Callable[[str], object] = print) -> dict[str, list[str]]:
    """Run all cases. Return a map from each case to the result of each round; "history" is about the whole job."""
    hosts = Hosts(NODES + 1)
    found: dict[str, list[str]] = {name: [] for name in only}
    try:
        silences = Silences(folder, hosts)
        try:
            for name in only:
                case, _, seconds = name.partition(" ")
                for each in range(rounds):
                    found[name].append(silences.silence(case, float(seconds)))
                    say(f"{name}, {each + 1} of {rounds}: {found[name][-1] or 'well'}")
            found["history"] = [silences.end()]
        finally:
            silences.job.clean_up()
    finally:
        hosts.close()
    return found


def main() -> None:
    """Run the cases, and print how many rounds went well."""
    names = [f"{case} {seconds}" for case, all_of in CASES.items() for seconds in all_of]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    parser.add_argument("--write", type=Path, help="keep the figures in this page")
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="dynatrain-silences-"))
    found = run(given.only, given.rounds, folder)
    words = {"stop": "coordinator stopped", "cut": "its host's link cut", "all": "all members stopped at once"}
    rows = []
    for case, title in words.items():
        mine = [name for name in found if name.partition(" ")[0] == case]
        every = [each for name in mine for each in found[name]]
        lengths = ", ".join(name.partition(" ")[2] for name in mine)
        if every:
            rows.append(f"{title} for {lengths} s, {every.count('')} of {len(every)}")
    history = found["history"][0] or "No sample was lost or used twice"
    text = f"Measured on: {machine()}. Nobody given up, no batch lost: {'; '.join(rows)}. {history}."
    faults = [f"{name}: {each}" for name, wrong in found.items() for each in wrong if each]
    conclude("silences", text, folder, faults, given.write)


if __name__ == "__main__":
    main()
