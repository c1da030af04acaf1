"""Kill members at random, one at a time, under ZeRO with buddies and no checkpoint, and check that nothing is lost.

python tools/deaths.py                                              # 10 deaths in each of stages 1, 2 and 3
python tools/deaths.py --stages 2 --seeds 1 2 3 --deaths 70 --minutes 90
python tools/deaths.py --stages 1 --beside 3                        # two engines in each process
python tools/deaths.py --write docs/figures

The job has three stock torchrun agents and a spare. A worker or a whole node is killed at a random time, the spare
takes its place, and another node becomes the spare. When all members are protected again, the next one dies. Every
world thus has three members. At the end all steps must be there with their samples and, bit for bit, with the losses of
a run without deaths; with two engines, this holds for both. If anything is wrong, the exit status is 1 and the folder
with all logs stays.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parents[1]))

from figures import keep, machine
from history import Losses, Samples, history
from nodes import processes, training

from ds_dynatrain.elastic.messages import Status

SIZE, SPARES = 3, 1
STEP_SECONDS = 0.3
BLOCK = {"buddies": {"mode": "copy"}}


@dataclass
class Row:
    """The results of one job.

    gaps: the seconds from each death to the first step after it.
    """

    stage: int
    seed: int
    gaps: list[float] = field(default_factory=list)
    steps: int = 0
    again: int = 0
    faults: list[str] = field(default_factory=list)


class Deaths:
    """One job in which members are killed.

    rest_seconds: the time limit for the job to recover.
    beside: the ZeRO stage of a second engine, if there is one.
    """

    def __init__(self, folder: Path, stage: int, seed: int, rest_seconds: float, beside: int | None = None) -> None:
        self.chance, self.row, self.rest_seconds = random.Random(seed), Row(stage, seed), rest_seconds
        self.events = ["step"] if beside is None else ["step", "beside"]
        self.given = {} if beside is None else {"script": "several.py", "BESIDE": str(beside)}
        self.job = training(folder, stage, BLOCK, f"{SIZE}:{SIZE}", STEP_SECONDS, **self.given)
        self.job.seconds = rest_seconds
        self.agents: list[str] = []
        self.count = 0

    def begin(self) -> None:
        """Start the coordinator, all nodes and the spare, and wait until they train."""
        self.job.coordinator("coordinator")
        for _ in range(SIZE + SPARES):
            self.join()
        self.rest(0)

    def join(self) -> None:
        """Start another node."""
        name = f"n{self.count}"
        self.count += 1
        self.job.node(name, is_host=0)
        self.agents.append(name)

    def rest(self, after: int) -> Status:
        """Wait until all members train and are protected, and a spare is ready. Return the status.

        after: the newest generation that does not count.
        """

        def look() -> Status | None:
            for name in self.agents:
                if self.job.processes[name].poll() is not None:
                    raise RuntimeError(f"agent {name} has ended by itself\n{self.job.logs()}")
            status = self.job.status()
            if status is None or status.generation <= after or len(status.members) != SIZE + SPARES:
                return None
            working = [one for one in status.members if one.rank is not None]
            is_in = len(working) == SIZE and all(
                one.entered == status.generation and one.protected == "yes" for one in working
            )
            is_in = is_in and self.job.steps(status.generation) >= SIZE
            return status if is_in and all(one.phase in ("working", "waiting") for one in status.members) else None

        return self.job.wait(look, f"a protected world of {SIZE} after generation {after}, and a spare")

    def kill(self) -> None:
        """Kill a worker or a node at a random time, and wait until the job has recovered."""
        status = self.rest(0)
        time.sleep(self.chance.uniform(0.0, 4 * STEP_SECONDS))
        pid = self.chance.choice(processes(status))
        name = next(name for name in self.agents if pid in self.job.workers_of(name))
        killed = time.monotonic()
        if self.chance.random() < 0.5:
            self.job.kill(name)
        else:
            os.kill(pid, signal.SIGKILL)
        self.agents.remove(name)
        self.join()
        self.rest(status.generation)
        later = [row["time"] for row in self.job.rows("step") if row["generation"] > status.generation]
        self.row.gaps.append(min(later) - killed)

    def end(self) -> None:
        """End the job, and compare its steps with those of a run without deaths."""
        self.job.end()
        for name in (*self.agents, "coordinator"):
            if code := self.job.code(name):
                self.row.faults.append(f"{name} ended with code {code}")
        made = [(row["pid"], row["step"]) for row in self.job.rows("step")]
        self.row.again = len(made) - len(set(made))
        self.row.steps = 1 + max(step for _, step in made)
        wanted = self._undisturbed(self.row.steps)
        for event, (wanted_losses, wanted_samples) in zip(self.events, wanted, strict=True):
            losses, samples = history(self.job.rows(event))
            if sorted(losses) != list(range(len(losses))):
                self.row.faults.append(f"{event}: some are missing")
            wrong = [step for step in losses if samples[step] != wanted_samples.get(step)]
            other = [step for step in losses if losses[step] != wanted_losses.get(step)]
            if wrong or other:
                self.row.faults.append(f"{event}: samples differ in {wrong[:9]}, losses in {other[:9]}")

    def _undisturbed(self, steps: int) -> list[tuple[Losses, Samples]]:
        """Return the losses and samples of each engine in a run without deaths."""
        (folder := self.job.folder / "undisturbed").mkdir()
        job = training(folder, self.row.stage, BLOCK, f"{SIZE}:{SIZE}", 0.0, STEPS=str(steps), **self.given)
        try:
            for number in range(SIZE):
                job.node(f"n{number}")
            for number in range(SIZE):
                job.processes[f"n{number}"].wait(self.rest_seconds + steps)
            return [history(job.rows(event)) for event in self.events]
        finally:
            job.clean_up()


def run(stage: int, seed: int, args: argparse.Namespace, until: float) -> Row:
    """Run one job, with as many deaths as fit before `until`, and return its results."""
    folder = Path(tempfile.mkdtemp(prefix="dynatrain-deaths-"))
    deaths = Deaths(folder, stage, seed, args.rest, args.beside)
    try:
        deaths.begin()
        while len(deaths.row.gaps) < args.deaths and time.monotonic() < until:
            deaths.kill()
        deaths.end()
    except (TimeoutError, RuntimeError) as error:
        deaths.row.faults.append(f"{type(error).__name__}: {str(error).splitlines()[0]}")
    finally:
        deaths.job.clean_up()
    if deaths.row.faults:
        print(f"All logs are in {folder}")
    else:
        shutil.rmtree(folder)
    return deaths.row


def line(rows: list[Row]) -> str:
    """Return a line about the jobs of one stage."""
    middles = sorted(median(row.gaps) for row in rows if row.gaps)
    span = " to ".join(dict.fromkeys(f"{middles[at]:.2f}" for at in (0, -1))) if middles else "none"
    deaths, longest = sum(len(row.gaps) for row in rows), max((max(row.gaps) for row in rows if row.gaps), default=0.0)
    faults = "; ".join(fault for row in rows for fault in row.faults)
    return (
        f"- stage {rows[0].stage}: {deaths} deaths in {len(rows)} jobs, {sum(row.steps for row in rows)} steps, "
        f"{sum(row.again for row in rows)} made again by a member; next step after {span} s (medians of jobs), "
        f"{longest:.2f} s at most: {faults or 'nothing was wrong'}"
    )


def main() -> None:
    """Run the jobs, and judge the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--beside", type=int, help="the stage of a second engine in each process")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--deaths", type=int, default=10, help="of each job (default 10)")
    parser.add_argument("--minutes", type=float, default=60.0, help="for all jobs together (default 60)")
    parser.add_argument("--rest", type=float, default=120.0, help="seconds until everything has to be in order")
    parser.add_argument("--write", type=Path, help="a page, or a folder of them, for the table: docs/figures")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # whatever ends this process also ends the job
    jobs = [(stage, seed) for seed in args.seeds for stage in args.stages]
    begin, rows = time.monotonic(), list[Row]()
    for number, (stage, seed) in enumerate(jobs):
        rows.append(run(stage, seed, args, begin + 60 * args.minutes * (number + 1) / len(jobs)))
    beside = "" if args.beside is None else f", beside each a second engine in stage {args.beside}"
    what = f"{SIZE} nodes of one rank and a spare, copies with buddies at each step{beside}"
    text = f"Measured on: {machine()}. {what}.\n\n"
    text += "\n".join(line([row for row in rows if row.stage == stage]) for stage in args.stages)
    print(text)
    if args.write is not None and args.beside is None:
        keep(args.write, "deaths", text)
    if any(row.faults for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
