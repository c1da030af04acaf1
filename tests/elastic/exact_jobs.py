"""Jobs of `exactly.py` whose members come and go, and the run that they are held against: one process, never disturbed.

Whatever happens to a job, each line that one of its processes wrote has the bits of that run.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ds_dynatrain.exact.bits.bit_records import ExactRun, read_exact
from tests.elastic.agents import ROOT, Job, Row
from tests.elastic.kinds import settings
from tests.elastic.runs import SECONDS, training
from tests.elastic.warm import nursery

SCRIPT = Path(__file__).with_name("exactly.py")
OWN = {"train_batch_size": 13, "train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0.4}
LEAVES = 7
"""Of a batch; the last one is smaller."""
BLOCK = {"exact": {"digest_every_steps": 1}}
MACHINE = {"MKL_CBWR": "COMPATIBLE"}
MODULUS = 1 << 64
ROUND = 50
"""A run has a multiple of so many steps."""


@dataclass
class Step:
    """losses: leaf, by its samples -> loss. held: as `exactly.held`, of all ranks together."""

    losses: dict[tuple[int, ...], float] = field(default_factory=dict)
    norms: set[float] = field(default_factory=set)
    held: dict[str, tuple[int, int]] = field(default_factory=dict)
    ranks: set[int] = field(default_factory=set)
    size: int = 0

    @property
    def is_whole(self) -> bool:
        """Whether all ranks have told of it; who was killed may not have."""
        return self.ranks == set(range(self.size))

    def add(self, row: Row) -> None:
        """What one rank has told."""
        self.losses |= {tuple(numbers): loss for loss, numbers in row["parts"] if numbers}
        self.norms.add(row["norm"])
        self.ranks.add(row["rank"])
        self.size = row["size"]
        for key, (count, total) in row["held"].items():
            before = self.held.get(key, (0, 0))
            self.held[key] = before[0] + count, (before[1] + total) % MODULUS


def steps_of(rows: Iterable[Row]) -> dict[tuple[int, int], Step]:
    """By (step, generation)."""
    found: defaultdict[tuple[int, int], Step] = defaultdict(Step)
    for row in rows:
        found[row["step"], row["generation"]].add(row)
    return found


class Exact:
    """The run that never changes, as long as it has to be."""

    steps: dict[int, Step]
    report: ExactRun

    def __init__(self, folder: Path, own: dict[str, Any] | None = None, **variables: str) -> None:
        self._folder, self._own, self._given, self.steps = folder, {**OWN, **(own or {})}, variables, {}

    def _run(self, steps: int) -> None:
        folder = self._folder / str(steps)
        folder.mkdir(parents=True)
        variables = {"OUT": str(folder), "STEPS": str(steps), "STEP_SECONDS": "0", "DS_ACCELERATOR": "cpu", **MACHINE}
        block = {**BLOCK, "report": {"jsonl": str(folder / "report.jsonl")}}
        variables |= {"SETTINGS": json.dumps(settings(1, self._own, **block)), "OMP_NUM_THREADS": "1"}
        variables |= {"PYTHONPATH": str(ROOT), **self._given}
        command = ["torch.distributed.run", "--standalone", "--nproc-per-node=1", str(SCRIPT)]
        with (folder / "log").open("wb") as log:
            run = nursery().start(command, {**os.environ, **variables}, folder, log.fileno())
        try:
            assert run.wait(2 * SECONDS) == 0, (folder / "log").read_text()[-3000:]
        finally:
            run.kill()
        lines = [line for file in folder.glob("[0-9]*.jsonl") for line in file.read_text().splitlines()]
        rows = [row for line in lines if (row := json.loads(line))["event"] == "step"]
        self.steps = {step: found for (step, _), found in steps_of(rows).items()}
        self.report = read_exact(folder / "report.jsonl")

    def mistakes(self, *jobs: Job, deaths: int = 0) -> list[str]:
        """In what these jobs, one of which goes on where the other has ended, are not bit for bit what this run is.

        deaths: so many steps may have been made of which nobody told, as somebody died in them; what follows tells.
        """
        rows = [row for job in jobs for row in job.rows("step")]
        made, found = {row["step"] for row in rows}, list[str]()
        if len(self.steps) <= max(made):
            self._run(ROUND * (1 + max(made) // ROUND))
        if len(untold := set(range(max(made))) - made) > deaths:
            found.append(f"nobody made steps {sorted(untold)}")
        for (step, generation), told in sorted(steps_of(rows).items()):
            found += [f"step {step} of generation {generation}: {each}" for each in self._unlike(step, told)]
        return found

    def _unlike(self, step: int, told: Step) -> Iterator[str]:
        true = self.steps[step]
        if not told.losses.keys() <= true.losses.keys() or (told.is_whole and told.losses.keys() != true.losses.keys()):
            yield f"leaves {sorted(told.losses)}, not {sorted(true.losses)}"
        differ = [leaf for leaf, loss in told.losses.items() if loss != true.losses.get(leaf)]
        if differ:
            yield f"losses of {len(differ)} of {len(told.losses)} leaves"
        if told.norms != true.norms:
            yield f"norms {told.norms}, not {true.norms}"
        for key, (count, total) in true.held.items() if told.is_whole else ():
            mine, sums = told.held.get(key, (0, 0))
            if not mine or mine % count or sums != mine // count * total % MODULUS:
                yield f"{key}: {mine} elements where there are {count}"


def exact_job(folder: Path, stage: int, own: dict[str, Any] | None = None, **given: Any) -> Job:
    """A job of `exactly.py`. own, given: as of `runs.training`."""
    block = {**BLOCK, **given.pop("block", {})}
    variables = {**MACHINE, "STEP_SECONDS": "0.2", **given.pop("variables", {})}
    return training(folder, stage, block, {**OWN, **(own or {})}, script=SCRIPT, variables=variables, **given)
