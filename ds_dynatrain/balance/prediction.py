"""What a profile says of layouts, for eyes and for programs. Needs neither torch nor DeepSpeed."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from ds_dynatrain.balance.choose import Choice, Members, Search, choose, is_possible
from ds_dynatrain.balance.cost import StepTime, step_time
from ds_dynatrain.balance.deal import Deal
from ds_dynatrain.balance.links import Link, Links
from ds_dynatrain.balance.memory import StageBytes, cut_of, peak_bytes
from ds_dynatrain.balance.partition import PLENTY, uniform
from ds_dynatrain.balance.profile import Profile
from ds_dynatrain.errors import ConfigError
from ds_dynatrain.space.layout import Layout


@dataclass(frozen=True)
class Question:
    """What was asked. stages: None for all numbers; members: None for as many as stages, or as the profile has.

    present: boundaries, None for uniform ones of so many stages. memory: bytes of a member.
    """

    stages: int | None
    members: int | None
    micro_batches: int | None
    zero_stage: int
    memory: float | None
    present: str | None
    link: Link

    @property
    def is_pipeline(self) -> bool:
        """Whether the model is a PipelineModule; one for which nobody wants stages, or ZeRO stage 2 or 3, is not."""
        return self.stages != 1 and self.zero_stage < 2


@dataclass(frozen=True)
class Predicted:
    """A layout, and what it would take. is_uniform: nobody said what its boundaries are."""

    layout: Layout
    deal: Deal
    time: StepTime
    stages: tuple[StageBytes, ...]
    is_uniform: bool = False


@dataclass(frozen=True)
class Advice:
    """What the present boundaries take, if there are any that can be trained, and what fits, best first."""

    profile: Profile
    memory_bytes: int
    present: Predicted | None
    choices: tuple[Choice, ...]

    @property
    def proposed(self) -> Predicted:
        """The best."""
        best = self.choices[0]
        return Predicted(best.layout, best.deal, best.time, peak_bytes(self.profile, best.layout, best.deal))


def advise(file: Path, question: Question) -> Advice:
    """Read the profile and search; ProfileError, LayoutError or ConfigError, and OSError, say what is wrong."""
    profile = Profile.load(file)
    members = _members(profile, question)
    start = _start(profile, question)
    search = Search(
        pipes=None if question.stages is None else (question.stages,),
        zero_stages=(question.zero_stage,),
        micro_batches=question.micro_batches,
        pipeline=question.is_pipeline,
    )
    choices = choose(profile, start, members, search)
    return Advice(profile, members.memory_bytes, _present(profile, start, members, question, search), choices)


def _members(profile: Profile, question: Question) -> Members:
    """ConfigError for a number that does not go with the speeds of the profile."""
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
    return Members(speeds, PLENTY if question.memory is None else int(question.memory), Links(question.link))


def _start(profile: Profile, question: Question) -> Layout:
    """The present layout but for data; ConfigError for boundaries that are none, LayoutError for wrong ones."""
    if question.present is not None:
        try:
            given = tuple(map(int, question.present.split(",")))
        except ValueError:
            raise ConfigError(f"--present {question.present}: give boundaries such as 0,3,7") from None
        layout = Layout(zero_stage=question.zero_stage, pipe=max(1, len(given) - 1), boundaries=given)
        cut_of(profile, layout)
        return layout
    return Layout(zero_stage=question.zero_stage, pipe=question.stages or 1)


def _present(profile: Profile, start: Layout, members: Members, question: Question, search: Search) -> Predicted | None:
    """Predict the present layout with as many data ranks as can be; None if it needs more members or nobody asked."""
    if question.stages is None and question.present is None:
        return None
    boundaries = start.boundaries or uniform(len(profile.layers), start.pipe)
    most = min(len(members.speeds) // start.pipe, profile.train_batch_size)
    for data in range(most, 0, -1):
        layout = start.replace(data=data, boundaries=boundaries)
        for deal in search.deals(profile, layout):
            if is_possible(layout, deal, question.is_pipeline):
                return _predicted(profile, layout, deal, members, question.present is None)
    return None


def _predicted(profile: Profile, layout: Layout, deal: Deal, members: Members, is_uniform: bool) -> Predicted:
    working = members.working(layout.world_size)
    speeds, links = [members.speeds[member] for member in working], members.links.between_members(working)
    time = step_time(profile, layout, deal, speeds, links)
    return Predicted(layout, deal, time, peak_bytes(profile, layout, deal), is_uniform)


def show(advice: Advice) -> None:
    """Print it for a reader."""
    profile, proposed = advice.profile, advice.proposed
    known = [] if advice.present is None else [("uniform" if advice.present.is_uniform else "present", advice.present)]
    both = [*known, ("proposed", proposed)]
    measured = f"{profile.train_batch_size} samples a step, timed in micro-batches of {profile.micro_batch_size}"
    typer.echo(f"{len(profile.layers)} layers, {measured}{profile.source and f'; {profile.source}'}\n")
    others = [Predicted(each.layout, each.deal, each.time, ()) for each in advice.choices[1:]]
    rows = [(name, *_row(each)) for name, each in both]
    rows += [("", *_row(each)) for each in others if each.layout not in [shown.layout for _, shown in both]]
    typer.echo(_columns([("", "layout", "boundaries", "micro-batches", "step ms", "bottleneck", "efficiency"), *rows]))
    for name, each in both:
        terms = ", ".join(f"{term} {ms:.4g}" for term, ms in each.time.step_ms.items() if term != "total")
        typer.echo(f"\n{name}, ms of a step: {terms}")
        typer.echo(_columns([("stage", "layers", "busy ms", "bytes", ""), *_stages(advice, each)]))
    typer.echo(f"\nA prediction from the profile{_gain(advice, known)}. Nothing has been changed.")


def _gain(advice: Advice, known: list[tuple[str, Predicted]]) -> str:
    """Compare both, in words; nothing where there is no present layout, or it would not fit."""
    if not known or max(each.total for each in known[0][1].stages) > advice.memory_bytes:
        return ""
    if not advice.proposed.time.seconds:
        return ", in which nothing takes any time"
    return f": {known[0][1].time.seconds / advice.proposed.time.seconds:.2f} × as fast as {known[0][0]}"


def _row(each: Predicted) -> tuple[str, ...]:
    cut = "" if each.layout.boundaries is None else ",".join(map(str, each.layout.boundaries))
    time, axes = each.time, str(each.layout.replace(boundaries=None))
    figures = (f"{1e3 * time.seconds:.4g}", f"stage {time.bottleneck}", f"{time.efficiency:.2f}")
    return (axes, cut, str(each.deal.micro_batches), *figures)


def _stages(advice: Advice, each: Predicted) -> Iterator[tuple[str, ...]]:
    names = advice.profile.names
    for stage, (start, stop) in enumerate(itertools.pairwise(cut_of(advice.profile, each.layout))):
        total = each.stages[stage].total
        held = names[start] if stop == start + 1 else f"{names[start]} to {names[stop - 1]}"
        over = "more than --memory" if total > advice.memory_bytes else ""
        yield str(stage), held, f"{1e3 * each.time.busy[stage]:.4g}", f"{total:.4g}", over


def _columns(rows: Sequence[tuple[str, ...]]) -> str:
    """Return a line for each row, of any width: a program may read them, too."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def report(advice: Advice) -> str:
    """Return one object of JSON, whose keys are documented in docs/balance.md."""
    choices = [_said(Predicted(each.layout, each.deal, each.time, ())) for each in advice.choices]
    present = None if advice.present is None else _said(advice.present)
    said = {"present": present, "proposed": _said(advice.proposed), "choices": choices}
    return json.dumps(said, indent=2)


def _said(each: Predicted) -> dict[str, Any]:
    held = {"stage_bytes": [stage.total for stage in each.stages]} if each.stages else {}
    return {
        "layout": each.layout.to_dict(),
        "micro_batches": each.deal.micro_batches,
        "step_ms": each.time.step_ms,
        "busy_ms": [1e3 * seconds for seconds in each.time.busy],
        "bottleneck": each.time.bottleneck,
        "efficiency": each.time.efficiency,
        **held,
    }
