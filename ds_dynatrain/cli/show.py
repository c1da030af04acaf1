"""The doctor's report, as text for people and as JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table

from ds_dynatrain.cli.configuration import JobReport
from ds_dynatrain.cli.doctor import Environment
from ds_dynatrain.exact.machine import ExactMachine
from ds_dynatrain.report.check import Check
from ds_dynatrain.support import Finding, Verdict, all_tables
from ds_dynatrain.support.markdown import markdown, note
from ds_dynatrain.terminal import stdout_console

OFF = "off"
_MARKS = {True: "[green]ok[/]", False: "[red]no[/]", None: ""}


def report(environment: Environment, job: JobReport | None, rounding: ExactMachine | None = None) -> None:
    """Print the report as text: first the machine, then any configuration, and the verdict last.

    environment: the results of examining this machine.
    job: the report on a configuration, if any.
    rounding: whether the machine can run exact jobs, if that was examined.
    """
    console = stdout_console()
    machine = _table(environment.checks)
    for name, value in environment.variables.items():
        machine.add_row(name, escape(value))
    console.print(machine)
    if rounding is not None:
        console.print("\n[bold]exact jobs[/]")
        console.print(_table(rounding.checks))
    against = list(environment.failed)
    if job is not None:
        _print_job(console, job)
        against += [] if job.would_start else ["the configuration"]
    what = "a job" if job is None else f"a job with {escape(job.path)}"
    refused = f"[bold red]{what} would be refused[/]: {escape(', '.join(against))}"
    verdict = refused if against else f"[bold green]{what} would start[/]"
    console.print(f"\n{verdict}", soft_wrap=True)
    if rounding is not None:
        lacks = f"[bold red]it would not be exact[/]: {escape(', '.join(rounding.failed))}"
        console.print(lacks if rounding.failed else "[bold green]it would be exact[/]", soft_wrap=True)


def json_report(environment: Environment, job: JobReport | None, rounding: ExactMachine | None = None) -> None:
    """Print the report as one JSON object, whose keys are listed in docs/troubleshoot.md.

    The arguments are the same as for `report`.
    """
    said: dict[str, Any] = {
        "would_start": not environment.failed and (job is None or job.would_start),
        "environment": _rows(environment.checks),
        "variables": environment.variables,
        "config": None,
        "exact": None,
    }
    if rounding is not None:
        said["exact"] = {
            "would_be": not rounding.failed,
            "checks": _rows(rounding.checks),
            "machine": rounding.machine,
            "bits": rounding.bits,
        }
    if job is not None:
        said["config"] = {
            "path": job.path,
            "layout": None if job.layout is None else job.layout.to_dict(),
            "keys": [_key(finding) for finding in job.findings],
            "problems": job.problems,
            "stages": job.stages,
            "notes": job.notes,
        }
    print(json.dumps(said, indent=2, default=str))


def whole_table() -> None:
    """Print every row of the support tables as Markdown, as in the documentation."""
    print("\n\n".join(f"## {name}\n\n{markdown(name)}" for name in all_tables()))


def _rows(checks: Iterable[Check]) -> list[dict[str, Any]]:
    return [{"name": check.name, "value": check.value, "ok": check.is_well, "note": check.note} for check in checks]


def _table(checks: Iterable[Check]) -> Table:
    table = Table.grid(padding=(0, 2))
    for check in checks:
        table.add_row(check.name, escape(check.value), _MARKS[check.is_well], escape(check.note))
    return table


def _print_job(console: Console, job: JobReport) -> None:
    start = "" if job.layout is None else f", to start with {job.layout}"
    console.print(f"\n[bold]{escape(job.path)}[/]{start}", soft_wrap=True)
    for line in job.notes:
        console.print(f"[yellow]note[/] {escape(line)}")
    by_verdict: dict[str, list[tuple[Finding, dict[str, Any]]]] = {}
    for finding in job.findings:
        key = _key(finding)
        by_verdict.setdefault(key["verdict"], []).append((finding, key))
    for verdict, colour in ((Verdict.AT_START, "[red]"), (Verdict.AT_SWITCH, "[yellow]"), (Verdict.NOTE, "")):
        rows = by_verdict.get(verdict.value, ())
        if rows:
            console.print(f"{colour}{verdict.value}")
        for finding, key in rows:
            console.print(Padding(f"[bold]{escape(finding.subject)}[/]", (0, 2), expand=False))
            for line in filter(None, (key["why"], key["instead"] and f"-> {key['instead']}")):
                console.print(Padding(escape(line), (0, 6), expand=False))
    for title in (Verdict.WORKS.value, OFF):
        keys = ", ".join(key["key"] for _, key in by_verdict.get(title, ()))
        if keys:
            console.print(f"[green]{title}[/]: {escape(keys)}")
    for stage, why in job.stages.items():
        if why:
            console.print(f"[yellow]no ZeRO stage {stage}[/]: {escape(why)}")
    for line in job.problems:
        console.print(f"[red]problem[/] {escape(line)}")


def _key(finding: Finding) -> dict[str, Any]:
    """Return the verdict on one key of the configuration, as plain JSON."""
    why, instead = "", ""
    if finding.refusal is not None:
        why, instead = finding.refusal.why, finding.refusal.instead
    elif finding.row is not None and not finding.is_off:
        why = note(finding.row)
    verdict = OFF if finding.is_off else finding.verdict.value
    return {"key": finding.key, "value": finding.value, "verdict": verdict, "why": why, "instead": instead}
