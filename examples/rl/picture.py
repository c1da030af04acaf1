"""Records of what each process did when, as lines of JSON, and a plot of them. Needs matplotlib (the extra `demo`)."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from ds_dynatrain.report import read_events

if TYPE_CHECKING:
    from matplotlib.axes import Axes

RUNS = {"keep": "keeps its size", "pool": "shares the pool"}
COLORS = {"train": "#0b6e99", "generate": "#3a7d44", "weights": "#e0a030", "switch": "#d1495b", "wait": "#cccccc"}
SWITCHES, REWARDS = "switches.jsonl", "rewards.jsonl"
SHOWN = 2  # number of rollouts in the plot, from the middle of a run
Row = dict[str, Any]


class Timeline:
    """A record of what one process does when. `close` writes it to a file in the folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.spans: list[Row] = []

    @contextmanager
    def during(self, what: str) -> Iterator[None]:
        """Context manager that records the duration of its block under the name `what`."""
        begin = time.time()
        yield
        self.note(what, begin)

    def note(self, what: str, begin: float) -> None:
        """Record an activity that started at time `begin` and ends now."""
        self.spans.append({"what": what, "begin": begin, "end": time.time()})

    def close(self, member: int) -> None:
        """Write the record to the member's file."""
        write(self.folder / f"member-{member}.jsonl", self.spans)


def write(path: Path, rows: list[Row]) -> None:
    """Write rows as lines of JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def read(path: Path) -> list[Row]:
    """Read lines of JSON."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def members(folder: Path) -> list[list[Row]]:
    """Return the records of each member of a run."""
    return [read(file) for file in sorted(folder.glob("member-*.jsonl"))]


def show(out: Path) -> None:
    """Print a line for each run in a folder, and plot all runs into OUT/rl.png."""
    runs = [name for name in RUNS if (out / name / REWARDS).exists()]
    for name in runs:
        print(line(name, out / name))
    print(f"picture: {draw(out / 'rl.png', {name: out / name for name in runs})}", flush=True)


def line(name: str, folder: Path) -> str:
    """Return a line on a run: its last rewards, and how its processes spent their time after the first rollout."""
    rewards = read(folder / REWARDS)
    begin, end = rewards[0]["time"], rewards[-1]["time"]
    spent: defaultdict[str, float] = defaultdict(float)
    held = members(folder)
    for span in (span for spans in held for span in spans if begin <= span["begin"]):
        spent[span["what"]] += span["end"] - span["begin"]
    whole = (end - begin) * len(held)
    shares = ", ".join(f"{what} {spent[what] / whole:.0%}" for what in COLORS if spent[what])
    pauses = [event.pause_ms for event in events_of(folder)]
    switches = f"; {len(pauses)} switches, median pause {median(pauses):.0f} ms" if pauses else ""
    return (
        f"{RUNS[name]}: reward {rewards[-1]['reward']:.3f} after {len(rewards)} rollouts, "
        f"{(end - begin) / (len(rewards) - 1):.2f} s a rollout: {shares}{switches}"
    )


def events_of(folder: Path) -> list[Any]:
    """Return the switches of a run that were committed."""
    path = folder / SWITCHES
    return [event for event in read_events(path) if event.outcome == "committed"] if path.exists() else []


def draw(path: Path, runs: dict[str, Path]) -> Path:
    """Plot the rewards, the activities of each process in the middle of each run, and the pauses of switches."""
    from matplotlib.figure import Figure  # a Figure of its own needs no window and no global state

    figure = Figure(figsize=(10, 5 + 2 * len(runs)), layout="constrained")
    axes = figure.subplots(2 + len(runs), 1, height_ratios=[2.5, *[1.3] * len(runs), 1.3])
    for (name, folder), width in zip(runs.items(), (5.0, 1.4), strict=False):
        rewards = [row["reward"] for row in read(folder / REWARDS)]
        axes[0].plot(rewards, color=COLORS["switch" if name == "pool" else "train"], lw=width, label=RUNS[name])
    axes[0].set(xlabel="rollout", ylabel="mean reward", ylim=(0, 1))
    axes[0].legend(frameon=False)
    axes[0].grid(alpha=0.25)
    for part, (name, folder) in zip(axes[1:], runs.items(), strict=False):
        _draw_members(part, RUNS[name], folder)
    for event in (event for folder in runs.values() for event in events_of(folder)):
        shrinks = len(event.target.members) < len(event.source.members)
        axes[-1].plot(event.step, event.pause_ms, "v" if shrinks else "^", color=COLORS["switch"], ms=4)
    axes[-1].set(xlabel="optimizer step", ylabel="pause in ms\n(v: to few ranks)", ylim=(0, None))
    axes[-1].grid(alpha=0.25)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    return path


def _draw_members(axes: Axes, title: str, folder: Path) -> None:
    """Plot the activities of each member during a few rollouts in the middle of a run. White means idle."""
    times = [row["time"] for row in read(folder / REWARDS)]
    middle = len(times) // 2
    begin, end = times[middle - 1], times[min(middle - 1 + SHOWN, len(times) - 1)]
    for member, spans in enumerate(members(folder)):
        for what, color in COLORS.items():
            found = [span for span in spans if span["what"] == what and begin <= span["begin"] <= end]
            bars = [(span["begin"] - begin, span["end"] - span["begin"]) for span in found]
            axes.broken_barh(bars, (member - 0.4, 0.8), color=color, label=what if member == 0 else "")
    axes.set(title=title, ylabel="member", xlabel="seconds", xlim=(0, end - begin))
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize=8, frameon=False)
