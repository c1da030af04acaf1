"""Predictions from a profile, printed for readers and as JSON for programs. Needs neither torch nor DeepSpeed."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import typer

from ds_dynatrain.balance.choose import FittingLayout, Members, Search, choose
from ds_dynatrain.balance.deal import cut_of
from ds_dynatrain.balance.experts import measured_balances
from ds_dynatrain.balance.partition import PLENTY, uniform
from ds_dynatrain.balance.profile import Profile
from ds_dynatrain.balance.step_time import Link, LinkCosts
from ds_dynatrain.errors import ConfigError
from ds_dynatrain.space.layout import Layout

BEST = "proposed"


@dataclass(frozen=True)
class PredictionOptions:
    """The options of `ds-dynatrain balance`.

    stages: the number of pipeline stages; None to try any.
    members: the number of members; None for one per stage, or for the profile's number of members.
    micro_batches: the number of micro-batches of a data rank in a step; None for micro-batches as large as the timed
        ones.
    zero_stage: the ZeRO stage.
    memory: the memory of a member, in bytes; None if memory is no limit.
    present: the current boundaries; None for uniform boundaries of that many stages.
    link: the connection between members.
    """

    stages: int | None
    members: int | None
    micro_batches: int | None
    zero_stage: int
    memory: float | None
    present: str | None
    link: Link


@dataclass(frozen=True)
class Prediction:
    """The prediction for the current boundaries, and for the layouts that fit, best first.

    present: the prediction for the current boundaries; None if they cannot be trained, or were not asked for.
    name: the name of `present`: "present" for given boundaries, or "uniform" if none were given.
    choices: the layouts that fit.
    """

    profile: Profile
    memory_bytes: int
    present: FittingLayout | None
    name: str
    choices: tuple[FittingLayout, ...]

    @property
    def by_name(self) -> dict[str, FittingLayout]:
        """Map from a name to a layout: the current layout, if there is one, and the best one."""
        present = {} if self.present is None else {self.name: self.present}
        return {**present, BEST: self.choices[0]}


def advise(file: Path, question: PredictionOptions) -> Prediction:
    """Read the profile and search for layouts.

    Raises ProfileError, LayoutError, ConfigError or OSError if the options, the profile or its file are invalid, or if
    nothing fits.
    """
    profile = Profile.load(file)
    members = _members(profile, question)
    start = _start(profile, question)
    search = Search(
        pipes=None if question.stages is None else (question.stages,),
        zero_stages=(question.zero_stage,),
        micro_batches=question.micro_batches,
        pipeline=question.stages != 1 and question.zero_stage < 2,  # other models have no stages
    )
    choices = choose(profile, start, members, search)
    present = _present(profile, start, members, search) if question.stages or question.present else None
    name = "uniform" if question.present is None else "present"
    return Prediction(profile, members.memory_bytes, present, name, choices)


def _members(profile: Profile, question: PredictionOptions) -> Members:
    """Return the members. Raises ConfigError if the options contradict each other or the speeds in the profile."""
    measured = profile.speeds
    alone = question.stages if question.stages is not None and len(measured) == 1 else len(measured)
    count, stages = question.members or alone, question.stages or 1
    if stages > count:
        raise ConfigError(
            f"--stages {stages} and {count} members: each stage needs one; give at most --stages {count}, or more "
            "--members"
        )
    if len(measured) not in (1, count):
        raise ConfigError(
            f"--members {count}: the profile has the speeds of {len(measured)} members; give at most that many"
        )
    if question.zero_stage > 1 and stages > 1:
        raise ConfigError(
            f"--stages {stages} --zero-stage {question.zero_stage}: pipelines have ZeRO stages 0 and 1; give "
            "--zero-stage 1, or --stages 1"
        )
    if question.memory is not None and not 1 <= question.memory < PLENTY:
        raise ConfigError(f"--memory {question.memory:g}: give the bytes of a member, such as 80e9")
    speeds = measured if len(measured) == count else measured * count
    return Members(speeds, PLENTY if question.memory is None else int(question.memory), LinkCosts(question.link))


def _start(profile: Profile, question: PredictionOptions) -> Layout:
    """Return the current layout, whose number of data ranks is still to be chosen.

    Raises ConfigError if the boundaries are malformed, and LayoutError if they do not fit the layers.
    """
    if question.present is None:
        return Layout(zero_stage=question.zero_stage, pipe=question.stages or 1)
    try:
        given = tuple(map(int, question.present.split(",")))
    except ValueError:
        raise ConfigError(f"--present {question.present}: give boundaries such as 0,3,7") from None
    layout = Layout(zero_stage=question.zero_stage, pipe=max(1, len(given) - 1), boundaries=given)
    cut_of(profile, layout)
    return layout


def _present(profile: Profile, start: Layout, members: Members, search: Search) -> FittingLayout | None:
    """Predict the current layout with as many data ranks as possible; None if it needs more members than there are."""
    boundaries = start.boundaries or uniform(len(profile.layers), start.pipe)
    most = min(len(members.speeds) // start.pipe, profile.train_batch_size)
    for data in range(most, 0, -1):
        layout = start.replace(data=data, boundaries=boundaries)
        if (deal := search.deal(profile, layout)) is not None:
            return FittingLayout.of(profile, layout, deal, members)
    return None


def show(advice: Prediction) -> None:
    """Print the prediction as text and tables."""
    profile, known = advice.profile, advice.by_name
    measured = f"{profile.train_batch_size} samples a step, timed in micro-batches of {profile.micro_batch_size}"
    typer.echo(f"{len(profile.layers)} layers, {measured}{profile.source and f'; {profile.source}'}\n")
    shown = [each.layout for each in known.values()]
    rows = [_row(name, each) for name, each in known.items()]
    rows += [_row("", each) for each in advice.choices if each.layout not in shown]
    typer.echo(_columns([("", "layout", "boundaries", "micro-batches", "step ms", "bottleneck", "efficiency"), *rows]))
    for name, each in known.items():
        terms = ", ".join(f"{term} {ms:.4g}" for term, ms in each.time.step_ms.items() if term != "total")
        typer.echo(f"\n{name}, ms of a step: {terms}")
        typer.echo(_columns([("stage", "layers", "busy ms", "bytes", ""), *_stages(advice, each)]))
    if experts := measured_balances(profile):
        typer.echo("\n" + "\n".join(map(str, experts)))
    typer.echo(f"\nA prediction from the profile{_gain(advice)}. Nothing has been changed.")


def _gain(advice: Prediction) -> str:
    """Return text that compares the current layout with the best one; "" if there is no current layout, or if it does
    not fit.
    """
    present, best = advice.present, advice.choices[0].time.seconds
    if present is None or present.peak_bytes > advice.memory_bytes:
        return ""
    if not best:
        return ", in which nothing takes any time"
    return f": {present.time.seconds / best:.2f} × as fast as {advice.name}"


def _row(name: str, each: FittingLayout) -> tuple[str, ...]:
    cut = "" if each.layout.boundaries is None else ",".join(map(str, each.layout.boundaries))
    time, axes = each.time, str(each.layout.replace(boundaries=None))
    figures = (f"{1e3 * time.seconds:.4g}", f"stage {time.bottleneck}", f"{time.efficiency:.2f}")
    return (name, axes, cut, str(each.deal.micro_batches), *figures)


def _stages(advice: Prediction, each: FittingLayout) -> Iterator[tuple[str, ...]]:
    names = advice.profile.names
    for stage, (start, stop) in enumerate(itertools.pairwise(cut_of(advice.profile, each.layout))):
        total = each.stage_bytes[stage]
        held = names[start] if stop == start + 1 else f"{names[start]} to {names[stop - 1]}"
        over = "more than --memory" if total > advice.memory_bytes else ""
        yield str(stage), held, f"{1e3 * each.time.busy[stage]:.4g}", f"{total:.4g}", over


def _columns(rows: Sequence[tuple[str, ...]]) -> str:
    """Return the rows as lines of aligned columns. The lines are not wrapped, because programs may read them too."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def report(advice: Prediction) -> str:
    """Return the prediction as one JSON object, whose keys are documented in docs/balance.md."""
    present = None if advice.present is None else _with_bytes(advice.present)
    said: dict[str, Any] = {
        "present": present,
        "proposed": _with_bytes(advice.choices[0]),
        "choices": [*map(_said, advice.choices)],
    }
    if measured := measured_balances(advice.profile):
        said["experts"] = [*map(asdict, measured)]
    return json.dumps(said, indent=2)


def _with_bytes(each: FittingLayout) -> dict[str, Any]:
    return {**_said(each), "stage_bytes": [*each.stage_bytes]}


def _said(each: FittingLayout) -> dict[str, Any]:
    return {
        "layout": each.layout.to_dict(),
        "micro_batches": each.deal.micro_batches,
        "step_ms": each.time.step_ms,
        "busy_ms": [1e3 * seconds for seconds in each.time.busy],
        "bottleneck": each.time.bottleneck,
        "efficiency": each.time.efficiency,
    }
