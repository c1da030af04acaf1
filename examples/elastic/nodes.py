"""A demonstration on one machine: nodes of `train.py` start, join, leave by SIGTERM, and are killed.

python examples/elastic/nodes.py --out build/elastic

Prints what happens and what it costs: how long the pause is (the time until a new step, beyond the usual time of a
step), and how many steps are trained again after a death.
"""

from __future__ import annotations

import argparse
import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import accumulate, pairwise
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

SCRIPT = Path(__file__).with_name("train.py")
STEPS_BETWEEN = 30
LONGEST_SECONDS = 300.0
LEFT_SECONDS = 30.0

Row = dict[str, Any]


class Nodes:
    """A coordinator and agents of torchrun. In a real job, each agent runs on a machine of its own."""

    def __init__(self, out: Path) -> None:
        self.out = out
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.endpoint = f"127.0.0.1:{probe.getsockname()[1]}"
        self.agents: dict[str, subprocess.Popen[bytes]] = {}
        self.coordinator = self._run("coordinator", "ds_dynatrain.cli", "coordinator", self.endpoint, "--nnodes=1:4")

    def start(self, name: str) -> None:
        """Start a node with one worker, whose output goes into OUT/NAME.log."""
        options = ["--nnodes=1:4", "--nproc-per-node=1", "--rdzv-backend=dynatrain"]
        options += [f"--rdzv-endpoint={self.endpoint}", "--rdzv-conf=is_host=0"]
        self.agents[name] = self._run(
            name, "torch.distributed.run", *options, str(SCRIPT), "--steps=100000", f"--out={self.out}"
        )

    def _run(self, name: str, *module: str) -> subprocess.Popen[bytes]:
        with (self.out / f"{name}.log").open("wb") as log:
            return subprocess.Popen([sys.executable, "-m", *module], stdout=log, stderr=log)

    def rows(self) -> list[Row]:
        """Return the lines that the workers wrote, one for each step."""
        file = self.out / "steps.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def wait(self, what: str, holds: Callable[[list[Row]], bool]) -> list[Row]:
        """Wait until `holds` is true of the steps, and return them.

        what: a description of what is waited for, for the error.

        Raises RuntimeError if a node that should train has ended, or after `LONGEST_SECONDS`.
        """
        end = time.monotonic() + LONGEST_SECONDS
        while time.monotonic() < end:
            if holds(rows := self.rows()):
                return rows
            if any(agent.poll() for name, agent in self.agents.items()):
                break
            time.sleep(0.1)
        raise RuntimeError(f"{what}: it did not come; what the nodes have printed is in {self.out}/*.log")

    def settle(self, members: int, after: int = 0) -> list[Row]:
        """Wait for `STEPS_BETWEEN` steps of this many members, the last one a new step. Return all steps.

        after: number of steps that were made before and do not count.
        """

        def holds(rows: list[Row]) -> bool:
            last = rows[-STEPS_BETWEEN:]
            is_new = bool(rows) and all(row["step"] < rows[-1]["step"] for row in rows[:-1])
            return len(rows) >= after + STEPS_BETWEEN and is_new and all(row["members"] == members for row in last)

        return self.wait(f"a world of {members}", holds)

    def end(self) -> None:
        """End the agents and the coordinator."""
        (self.out / "stop").touch()
        for process in (*self.agents.values(), self.coordinator):
            try:
                process.wait(LEFT_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()


def cost(rows: list[Row], before: int) -> tuple[float, int]:
    """Return (pause in milliseconds, number of repeated steps) of the change of members after the first `before` lines.

    The pause ends with the first new step. After a death, a survivor may have written a step that is undone later.
    """
    change = next(i for i in range(before, len(rows)) if rows[i]["members"] != rows[before - 1]["members"])
    furthest = list(accumulate((row["step"] for row in rows), max))
    again = [i for i in range(before, len(rows)) if rows[i]["step"] <= furthest[i - 1]]
    last, new = rows[change - 1], rows[max([change, *(i + 1 for i in again)])]
    usual = median(
        after["time"] - one["time"] for one, after in pairwise(rows[max(change - STEPS_BETWEEN, 0) : change])
    )
    pause = new["time"] - last["time"] - (new["step"] - last["step"]) * usual
    return 1e3 * pause, len(again)


def story(nodes: Nodes, console: Console) -> Table:
    """Let the events happen and describe them as they do. Return a table of their costs."""
    table = Table("what happened", "members", "layout", "pause", "steps made again")
    console.print("nodes A and B start")
    nodes.start("A")
    nodes.start("B")
    rows = nodes.settle(2)
    events: list[tuple[str, int, Callable[[], None]]] = [
        ("node C joins", 3, lambda: nodes.start("C")),
        ("node B gets SIGTERM", 2, lambda: nodes.agents.pop("B").send_signal(signal.SIGTERM)),
        ("node C is killed", 1, lambda: nodes.agents.pop("C").kill()),
    ]
    for what, members, happen in events:
        before, was = len(rows), rows[-1]["members"]
        console.print(f"step {rows[-1]['step']}, loss {rows[-1]['loss']:.3f}: {what}")
        happen()
        rows = nodes.settle(members, before)
        milliseconds, again = cost(rows, before)
        console.print(f"  {was} members -> {members}, {milliseconds:.0f} ms until a new step, {again} made again")
        table.add_row(what, f"{was} -> {members}", rows[-1]["layout"], f"{milliseconds:.0f} ms", str(again))
    return table


def main() -> None:
    """Run the demonstration in an empty folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("build/elastic"), help="folder for all files")
    out: Path = parser.parse_args().out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    if any(out.iterdir()):
        parser.error(f"{out} is not empty: give another folder, or remove it")
    nodes, console = Nodes(out), Console(highlight=False)
    try:
        table = story(nodes, console)
    except RuntimeError as error:
        sys.exit(str(error))
    finally:
        nodes.end()
    console.print(table)
    console.print("The process on node A was the same from the beginning to the end.")


if __name__ == "__main__":
    main()
