"""Jobs of stock torchrun agents: what tests check at their end."""

from __future__ import annotations

from tools.history import mistakes
from tools.nodes import ROOT, SECONDS, TIMES, Job, Row, processes

__all__ = ["ROOT", "SECONDS", "TIMES", "Job", "Row", "check_history", "finish", "processes"]


def check_history(job: Job) -> None:
    """Nobody skipped or repeated a step, and every sum is that of all samples up to it."""
    assert not mistakes(job.rows())


def finish(job: Job, *nodes: str) -> None:
    """All scripts end by themselves, with code 0; then the history is checked."""
    job.end()
    assert {node: job.code(node) for node in nodes} == dict.fromkeys(nodes, 0), job.logs()
    check_history(job)
