"""Plays scenarios, and holds what came of each against what its row expects."""

from __future__ import annotations

import dataclasses
import math
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.scenarios.actions import Seen
from tests.scenarios.launch import WarmRanks
from tests.scenarios.models import SAMPLES
from tests.scenarios.play import BATCH
from tests.scenarios.row import Row, Run
from tests.scenarios.states import differences, read

SIZES = ("data", "pipe", "expert", "tensor", "sequence", "zero_stage", "boundaries", "shares")


class Runner:
    """Four warm ranks, and the runs without events that several rows are held against."""

    def __init__(self, ranks: WarmRanks, folder: Path) -> None:
        self.ranks, self.folder, self.rows = ranks, folder, 0
        self._undisturbed: dict[bytes, list[Seen]] = {}

    def check(self, row: Row) -> None:
        """Play a row; AssertionError if anything is not as it says."""
        self.rows += 1
        folder = self.folder / f"row{self.rows}"
        runs, folders = [row.run], [folder / "run"]
        if row.resumes:
            runs, folders = [*runs, resumed(row.run, folders[0] / "before")], [*folders, folder / "resumed"]
        played = self.ranks.play(runs, folders)
        check_ends(row, played[0])
        check_errors(row, played[0])
        check_switches(row, played[0])
        check_samples(row, played[0])
        if row.bound is not None:
            check_losses(row, played[0], self.undisturbed(row))
        if row.resumes:
            check_resumed(row, played, folders)

    def undisturbed(self, row: Row) -> list[Seen]:
        """Return what ranks saw of the run that a row's losses are held against; it is played once for all rows."""
        run = dataclasses.replace(row.run, events=())
        if row.undisturbed == "stock":
            config = {key: value for key, value in run.config.items() if key != "dynatrain"}
            stage = min(int(run.start["zero_stage"]), 1)
            run = dataclasses.replace(run, start={"data": 4, "zero_stage": stage}, config=config, loop="stock")
        key = pickle.dumps(run)
        if key not in self._undisturbed:
            folder = self.folder / f"undisturbed{len(self._undisturbed)}"
            (self._undisturbed[key],) = self.ranks.play([run], [folder])
            assert all(not seen.ended for seen in self._undisturbed[key]), [
                each.ended for each in self._undisturbed[key]
            ]
        return self._undisturbed[key]


def resumed(run: Run, checkpoint: Path) -> Run:
    """Return the job that loads the state before the last switch of a run, in the layout after it, and trains on."""
    switch = [event for event in run.events if event.do == "switch" and not event.raises][-1]
    sizes = dict(run.start)
    for event in run.events[: run.events.index(switch) + 1]:
        if event.do == "switch" and not event.raises:
            sizes.update({key: value for key, value in event.given.items() if key in SIZES})
    later = tuple(event for event in run.events if event.at >= switch.at and event.do not in ("switch", "save"))
    return dataclasses.replace(run, start=sizes, events=later, load=str(checkpoint))


def global_losses(ranks: Sequence[Seen]) -> dict[int, float]:
    """Return the mean loss of each optimizer step over all samples of its batch, whichever ranks had them."""
    found: dict[int, list[tuple[float, int]]] = {}
    for seen in ranks:
        for step, parts in seen.losses.items():
            found.setdefault(step, []).extend((loss, samples) for _, _, loss, samples in parts)
    return {
        step: math.fsum(loss * samples for loss, samples in parts) / sum(samples for _, samples in parts)
        for step, parts in sorted(found.items())
    }


def check_ends(row: Row, ranks: Sequence[Seen]) -> None:
    """Check how the script ended on each rank, and in which layout."""
    for rank, seen in enumerate(ranks):
        if row.fails:
            assert row.fails in seen.ended, f"rank {rank} ended with {seen.ended!r}, without {row.fails!r}"
        else:
            assert not seen.ended, f"rank {rank} ended with {seen.ended}"
    ends = {seen.layout for seen in ranks if seen.worked_last}
    if not row.fails:
        assert ends == {row.ends or words(row.run.start)}, f"it ended in {ends}"


def words(start: Mapping[str, object]) -> str:
    """Return a layout as the engine prints it."""
    sizes = [f"{key}={size}" for key, size in start.items() if size != 1 or key == "zero_stage"]
    return " ".join(sizes)


def check_errors(row: Row, ranks: Sequence[Seen]) -> None:
    """Check that each rank that worked got the errors of the events, word for word."""
    wanted = [event.raises for event in row.run.events if event.raises]
    for rank, seen in enumerate(ranks):
        if not seen.worked_last and not seen.errors:
            continue
        assert len(seen.errors) == len(wanted), f"rank {rank}: {seen.errors}"
        for text, part in zip(seen.errors, wanted, strict=True):
            assert part in text, f"rank {rank} was told {text!r}, without {part!r}"


def check_switches(row: Row, ranks: Sequence[Seen]) -> None:
    """Check the outcome of each switch as all members that took part were told of it."""
    asked = [event for event in row.run.events if event.do == "switch" and not event.raises]
    outcomes = row.outcomes or ("committed",) * len(asked)
    told = {tuple(each["outcome"] for each in seen.switches) for seen in ranks if seen.worked_last}
    assert told <= {outcomes}, f"switches ended {told}, not {outcomes}"


def check_samples(row: Row, ranks: Sequence[Seen]) -> None:
    """Check that the data ranks together trained each sample of an epoch once, in the order of stock DeepSpeed."""
    by_step: dict[int, dict[int, list[int]]] = {}
    for seen in ranks:
        for step, numbers in seen.samples.items():
            places = {data for _, data, _, _ in seen.losses[step]}
            assert len(places) == 1, f"a rank was at data indices {places} within step {step}"
            by_step.setdefault(step, {})[places.pop()] = numbers
    per_epoch = SAMPLES // BATCH
    steps = sorted(by_step)
    for first in steps[::per_epoch]:
        epoch = [
            number
            for step in range(first, first + per_epoch)
            for part in by_step.get(step, {}).values()
            for number in part
        ]
        assert len(set(epoch)) == len(epoch), f"from step {first} on a sample was trained twice: {sorted(epoch)}"
        assert len(epoch) == BATCH * len([step for step in steps if first <= step < first + per_epoch])


def check_losses(row: Row, ranks: Sequence[Seen], undisturbed: Sequence[Seen]) -> None:
    """Check that losses are those of the run without events, within the bound of the row."""
    losses, others = global_losses(ranks), global_losses(undisturbed)
    assert losses.keys() == others.keys(), f"steps {sorted(losses)} and {sorted(others)}"
    furthest = max(abs(losses[step] - others[step]) / abs(others[step]) for step in losses)
    assert row.bound is not None and furthest <= row.bound, f"losses differ by {furthest:.1e}: {losses}, {others}"


def check_resumed(row: Row, played: Sequence[Sequence[Seen]], folders: Sequence[Path]) -> None:
    """Check that a job that was loaded in the last layout has the same losses and state, bit for bit."""
    for rank, seen in enumerate(played[1]):
        assert not seen.ended, f"the job that was loaded ended on rank {rank} with {seen.ended}"
    mine, theirs = (losses_by_place(ranks) for ranks in played)
    mine = {step: parts for step, parts in mine.items() if step in theirs}
    assert mine == theirs, f"losses {mine} and, after a load, {theirs}"
    found = differences(read(folders[0] / "end"), read(folders[1] / "end"))
    assert not found, found


def losses_by_place(ranks: Sequence[Seen]) -> dict[int, list[tuple[int, int, float, int]]]:
    """Return the losses of each step by the place of the rank that had them, whichever process it was."""
    found: dict[int, list[tuple[int, int, float, int]]] = {}
    for seen in ranks:
        for step, parts in seen.losses.items():
            found.setdefault(step, []).extend(parts)
    return {step: sorted(parts) for step, parts in sorted(found.items())}
