"""Plays scenarios, and holds what came of each against what its row expects."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ds_dynatrain.report import read_events
from tests.scenarios.actions import Seen, flip
from tests.scenarios.launch import WarmRanks
from tests.scenarios.models import SAMPLES
from tests.scenarios.play import BATCH, STOCK
from tests.scenarios.row import Command, Row, Run, layout, words
from tests.scenarios.states import command, differences, read

KEPT = ("freeze", "regroup", "set_rate")
"""Events that are no change of the layout: the job without its events has them, too."""
SIZES = ("data", "pipe", "expert", "tensor", "sequence", "zero_stage", "boundaries", "shares")
Played = tuple[list[Seen], Path]
"""What ranks saw of a run, and its folder."""


class Runner:
    """Four warm ranks, and the runs without events that several rows are held against."""

    def __init__(self, ranks: WarmRanks, folder: Path) -> None:
        self.ranks, self.folder, self.rows = ranks, folder, 0
        self._undisturbed: dict[str, Played] = {}

    def check(self, row: Row) -> None:
        """Play a row; AssertionError if anything is not as it says."""
        self.rows += 1
        folder = self.folder / f"row{self.rows}"
        folder.mkdir()
        others = None if row.bound is None and not row.alike else self.undisturbed(row)
        names = {"row": str(folder), "undisturbed": str(others[1]) if others else ""}
        jobs = [(filled(row.run, {**names, "folder": str(folder / "run")}), folder / "run")]
        if row.resumes:
            again = filled(row.run, {**names, "folder": str(folder / "resumed")})
            jobs.append((resumed(again, folder / "run" / "before"), folder / "resumed"))
        played = self.ranks.play(*zip(*jobs, strict=True))
        check_ends(row, played[0])
        check_counts(row.run, played[0])
        check_errors(row.run, played[0])
        check_switches(row, played[0])
        check_samples(played[0])
        check_notes(row, played[0])
        check_reports(row, folder / "run" / "report.jsonl")
        if row.bound is not None and others:
            check_losses(row.bound, played[0], others[0])
        if row.resumes:
            check_resumed(played, [each for _, each in jobs])
        for number, then in enumerate(row.then, start=1):
            into = folder / f"then{number}"
            given = filled(then, {**names, "folder": str(into)})
            if isinstance(given, Command):
                check_command(given, folder)
            else:
                self._follow(given, into, row, others)
        for pair in row.alike:
            one, other = (Path(filled(each, names)) for each in pair)
            found = differences(read(one), read(other))
            assert not found, f"{pair}: {found}"

    def _follow(self, run: Run, folder: Path, row: Row, others: Played | None) -> None:
        """Play a job that follows on what the row has left."""
        (seen,) = self.ranks.play([run], [folder])
        for rank, each in enumerate(seen):
            assert not each.ended, f"{folder.name} ended on rank {rank} with {each.ended}"
        check_counts(run, seen)
        check_errors(run, seen)
        if row.bound is not None and others:
            check_losses(row.bound, seen, others[0])

    def undisturbed(self, row: Row) -> Played:
        """Return the run that a row is held against; it is played once for all rows."""
        run = row.undisturbed
        if not isinstance(run, Run):
            run = dataclasses.replace(row.run, events=tuple(event for event in row.run.events if event.do in KEPT))
            if row.undisturbed != "start":
                config = {key: value for key, value in run.config.items() if key != "dynatrain"}
                config["train_micro_batch_size_per_gpu"] = None
                start = layout(4, min(int(run.start["zero_stage"]), 1))
                run = Run(start, run.model, config, (), run.steps, str(row.undisturbed))
        key = repr(run)
        if key not in self._undisturbed:
            folder = self.folder / f"undisturbed{len(self._undisturbed)}"
            (seen,) = self.ranks.play([filled(run, {"folder": str(folder)})], [folder])
            assert not any(each.ended for each in seen), [each.ended for each in seen]
            self._undisturbed[key] = seen, folder
        return self._undisturbed[key]


def filled(given: Any, names: Mapping[str, str]) -> Any:
    """Return what a row gives with the folders put in where it names them."""
    if isinstance(given, str):
        for name, folder in names.items():
            given = given.replace(f"{{{name}}}", folder)
        return given
    if isinstance(given, Mapping):
        return {key: filled(value, names) for key, value in given.items()}
    if isinstance(given, tuple):
        return tuple(filled(each, names) for each in given)
    if dataclasses.is_dataclass(given) and not isinstance(given, type):
        return dataclasses.replace(given, **{key: filled(value, names) for key, value in vars(given).items()})
    return given


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
    if not row.fails and row.run.loop not in STOCK:
        assert ends == {words(row.ends or row.run.start)}, f"it ended in {ends}"


def check_counts(run: Run, ranks: Sequence[Seen]) -> None:
    """Check that an object that goes where the state goes has counted each optimizer step."""
    for seen in ranks:
        counted = seen.notes.get("counted", run.steps)
        assert counted == run.steps, f"an object that is carried says {counted} steps of {run.steps}"


def check_errors(run: Run, ranks: Sequence[Seen]) -> None:
    """Check that each rank that worked got the errors of the events."""
    wanted = [event.raises for event in run.events if event.raises]
    assert any(seen.awaited == wanted for seen in ranks), (
        f"no rank came to all events: {[seen.awaited for seen in ranks]}"
    )
    for rank, seen in enumerate(ranks):
        assert len(seen.errors) == len(seen.awaited), f"rank {rank}: {seen.errors}, not {seen.awaited}"
        for text, part in zip(seen.errors, seen.awaited, strict=True):
            assert part in text, f"rank {rank} was told {text!r}, without {part!r}"


def check_switches(row: Row, ranks: Sequence[Seen]) -> None:
    """Check the outcome of each switch as all members that took part were told of it."""
    asked = [event for event in row.run.events if event.do == "switch" and not event.raises]
    outcomes = row.outcomes or ("committed",) * len(asked)
    told = {tuple(each["outcome"] for each in seen.switches) for seen in ranks if seen.worked_last}
    assert told <= {outcomes}, f"switches ended {told}, not {outcomes}"
    for seen in ranks:
        for each in seen.switches[-1:]:
            assert set(row.phases) <= set(each["phases"]), f"the last switch had the phases {each['phases']}"
            assert row.reason in each["reason"], f"the last switch ended for {each['reason']!r}"


def check_notes(row: Row, ranks: Sequence[Seen]) -> None:
    """Check what actions have noted on the process that works from begin to end."""
    for name, value in row.notes.items():
        found = ranks[0].notes.get(name)
        assert found == value, f"{name} is {found!r}"


def check_reports(row: Row, file: Path) -> None:
    """Check the outcomes in a report file."""
    if row.reports:
        found = tuple(event.outcome for event in read_events(file))
        assert found == row.reports, f"the report file has {found}"


def check_command(given: Command, folder: Path) -> None:
    """Run a command, and check its exit code and what it prints."""
    if given.writes is not None:
        (folder / "config.json").write_text(json.dumps(given.writes))
    if given.damages:
        flip(Path(given.damages))
    answer = command(*given.arguments)
    text = " ".join(answer.out.split())
    assert answer.code == given.code, f"{given.arguments} ended with {answer.code}: {text}"
    assert given.prints in text, f"{given.arguments} printed {text}"


def check_samples(ranks: Sequence[Seen]) -> None:
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


def check_losses(bound: float, ranks: Sequence[Seen], undisturbed: Sequence[Seen]) -> None:
    """Check that losses are those of the run without events, within a relative bound."""
    losses, others = global_losses(ranks), global_losses(undisturbed)
    assert losses.keys() <= others.keys(), f"steps {sorted(losses)} and {sorted(others)}"
    furthest = max((abs(losses[step] - others[step]) / abs(others[step]) for step in losses), default=0.0)
    assert furthest <= bound, f"losses differ by {furthest:.1e}: {losses}, {others}"


def check_resumed(played: Sequence[Sequence[Seen]], folders: Sequence[Path]) -> None:
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
