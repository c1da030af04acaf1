"""A history that is told of members by hand, and a coordinator that can be watched."""

from __future__ import annotations

import json
import urllib.request
from dataclasses import dataclass, field
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from ds_dynatrain.elastic.generation import Generation
from ds_dynatrain.elastic.history import JobHistory
from ds_dynatrain.elastic.messages import Report, Switched, Tally

TERM = "abc"
BATCH = 12
READERS = "what readers have to say"
"""The token of those who watch."""


def switched(number: int, committed: bool = True, pause_ms: float = 120.0, **given: Any) -> Switched:
    """A switch as a worker tells it."""
    fixed: dict[str, Any] = {
        "step": number,
        "source": "data=1 zero_stage=1",
        "target": "data=2 zero_stage=1",
        "members": 2,
        "phases_ms": {"drain": 20.0, "move": pause_ms - 20.0},
        "bytes_sent": 1000,
        "bytes_minimum": 1000,
    }
    return Switched(number=number, committed=committed, pause_ms=pause_ms, **{**fixed, **given})


@dataclass
class Told:
    """A history, and what its members say of themselves. Each call of `steps` makes the clock go on."""

    history: JobHistory = field(default_factory=JobHistory)
    now: float = 100.0
    world: Generation | None = None
    step: int = 0
    tallies: dict[str, Tally] = field(default_factory=dict)

    def come(self, *members: str) -> None:
        for member in members:
            self.history.goodput.begin(self.now)
            self.tallies[member] = Tally()
            self.history.reported(member, Report(ready=True), self.world, self.now)

    def publish(self, *members: str, term: str = TERM, **given: Any) -> Generation:
        number = 1 if self.world is None else self.world.generation + 1
        fixed = {"term": term, "generation": number, "change": "planned", "members": members}
        self.world = Generation(**{**fixed, **given})
        self.history.published(self.world, TERM, self.now)
        return self.world

    def go_on(self, held: float = 0.0, saving: float = 0.0, seconds: float | None = None) -> None:
        """All members of the world leave a boundary that they were held at. seconds: on the coordinator's clock."""
        self.now += held if seconds is None else seconds
        self._say(held_seconds=held, saving_seconds=saving)

    def steps(self, count: int, seconds: float, **more: float) -> None:
        """That many steps, each so long. more: what is added to other figures."""
        self.step += count
        self.now += count * seconds
        self._say(steps=count, stepping_seconds=count * seconds, **more)

    def _say(self, **more: float) -> None:
        assert self.world is not None
        for member in self.world.members:
            old = self.tallies[member].model_dump()
            new = {name: old[name] + more.get(name, 0) for name in old}
            new |= {"samples": self.step * BATCH, "generation": self.world.generation}
            self.tallies[member] = Tally(**new)
            said = Report(ready=True, entered=self.world.generation, step=self.step, tally=self.tallies[member])
            self.history.reported(member, said, self.world, self.now)


def fetched(url: str, token: str = READERS, accept: str = "") -> tuple[int, dict[str, str], bytes]:
    """(the status, the headers, the body) of a GET; whatever the status is."""
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    headers |= {"Accept": accept} if accept else {}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=10) as answer:
            return answer.status, dict(answer.headers), answer.read()
    except urllib.error.HTTPError as error:
        return error.code, dict(error.headers), error.read()


def status(url: str, token: str = READERS) -> dict[str, Any]:
    """What `/status.json` says."""
    code, _, body = fetched(f"{url}/status.json", token)
    assert code == 200, (code, body)
    found: dict[str, Any] = json.loads(body)
    return found


def metrics(url: str, token: str = READERS) -> dict[str, float]:
    """What `/metrics` says, by name, or by name{label=value}."""
    code, _, body = fetched(f"{url}/metrics", token)
    assert code == 200, (code, body)
    return parsed(body.decode())


def parsed(text: str) -> dict[str, float]:
    """Samples of Prometheus' text format."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = float(sample.value)
    return found
