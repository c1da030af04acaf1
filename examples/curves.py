"""The record of an example's run: a progress bar, the losses as lines of JSON, and at the end a table and a plot."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from tqdm import tqdm

RUNS = {"plain": "plain DeepSpeed", "static": "ds_dynatrain, never switched", "switching": "ds_dynatrain, switching"}
SWITCHES = "switches.jsonl"


class Record:
    """Record of the losses of one run, in OUT/NAME.jsonl. Every rank calls its methods; only the current rank
    0 writes.
    """

    def __init__(self, engine: Any, out: Path, name: str, steps: int) -> None:
        self.engine, self.out, self.name, self.steps = engine, out, name, steps
        self.bar: tqdm[None] | None = None
        self.shown: dict[str, str] = {}

    def train(self, step: int, loss: float) -> None:
        """Record the loss of a step's batch, or of one of its micro-batches."""
        self._note(step, "train", loss)

    def held_out(self, step: int, loss: float) -> None:
        """Record the held-out loss after this many steps."""
        self._note(step, "held_out", loss)

    def _note(self, step: int, kind: str, loss: float) -> None:
        if self.engine.global_rank != 0:
            return
        if self.bar is None:
            self.bar = tqdm(total=self.steps, initial=step, desc=self.name, dynamic_ncols=True)
            if step == 0:
                self._forget_last_time()
        self.shown[kind] = f"{loss:.3f}"
        self.bar.set_postfix(self.shown, refresh=False)
        self.bar.update(self.engine.global_steps - self.bar.n)
        with (self.out / f"{self.name}.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, kind: float(loss)}) + "\n")

    def _forget_last_time(self) -> None:
        self.out.mkdir(parents=True, exist_ok=True)
        for name in (f"{self.name}.jsonl", SWITCHES):
            (self.out / name).unlink(missing_ok=True)

    def close(self) -> None:
        """End the progress bar."""
        if self.bar is not None:
            self.bar.close()


def losses(path: Path, kind: str) -> dict[int, float]:
    """Return a map from step to loss, for losses of one kind ("train" or "held_out"). Micro-batches of a step are
    averaged.
    """
    found: defaultdict[int, list[float]] = defaultdict(list)
    for line in path.read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        if kind in entry:
            found[entry["step"]].append(entry[kind])
    return {step: sum(values) / len(values) for step, values in found.items()}


def show(out: Path) -> None:
    """Print the table of switches, and plot the curves of all runs in the folder into OUT/losses.png."""
    import rich

    from ds_dynatrain.report import read_events
    from ds_dynatrain.report.table import table
    from plot import Curve, plot

    events = read_events(out / SWITCHES) if (out / SWITCHES).exists() else []
    runs = [(label, out / f"{name}.jsonl") for name, label in RUNS.items()]
    curves = [Curve(label, losses(file, "train"), losses(file, "held_out")) for label, file in runs if file.exists()]
    if events:
        rich.print(table(events))
    rich.print(f"plot: {plot(out / 'losses.png', curves, events)}")
