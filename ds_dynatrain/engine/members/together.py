"""Several engines of a process go to their next layouts as one: none of them commits unless each could."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as td

from ds_dynatrain.engine.members.change import Change
from ds_dynatrain.engine.parts import EngineParts
from ds_dynatrain.engine.transaction.meeting import Outcome
from ds_dynatrain.engine.transaction.session import Decision
from ds_dynatrain.engine.transaction.switch import Transaction
from ds_dynatrain.space import Layout


@dataclass(frozen=True)
class _Part:
    """One engine's part, and its layout and members before it."""

    engine: EngineParts
    transaction: Transaction
    was: tuple[Layout, tuple[int, ...]]


class Together:
    """The transactions of all engines that something is prepared for, under one record.

    Each in its turn does all that comes before the record; then it is written, on the first engine's notice board; then
    each in its turn does what it says. All members take the engines in the same order.
    """

    def __init__(self, engines: Sequence[EngineParts], place: str, change: Change) -> None:
        self._begin = time.perf_counter()
        self._parts: list[_Part] = []
        self._interrupt: BaseException | None = None
        self._board, self._record = change.board, f"record/{change.proposals[0].generation}"
        for engine in engines:
            if engine.is_switching:
                with engine.turn():
                    transaction = engine.attempts.part(place)
                self._parts.append(_Part(engine, transaction, (engine.layout, engine.members)))

    def run(self) -> Outcome:
        """How it ended for the first of them, which is how it ended for all."""
        decision = self._decide()
        for part in self._parts:
            with part.engine.turn():
                self._conclude(part, decision)
        outcome = self._parts[0].transaction.outcome
        outcome.is_uncertain = any(part.transaction.outcome.is_uncertain for part in self._parts)
        return outcome

    def end(self) -> None:
        """Raise what has interrupted one of them; apart from `run`, so that the process is in its world by then."""
        if self._interrupt is not None:
            raise self._interrupt

    def _decide(self) -> Decision:
        """The one record: no, as soon as one vote is no; else after all votes."""
        for part in self._parts:
            with part.engine.turn():
                decision = part.transaction.vote()
            if not decision.commit:
                break
        self._interrupt = decision.interrupt
        try:
            found = self._board.decide(self._record, {"commit": decision.commit, "reason": decision.reason})
        except td.DistError as lost:  # others may have read a commit
            self._parts[0].transaction.outcome.is_uncertain = True
            return Decision(False, f"{decision.reason or 'the notice board is gone'} ({lost})")
        return Decision(found["commit"], found["reason"])

    def _conclude(self, part: _Part, decision: Decision) -> None:
        transaction = part.transaction
        outcome = transaction.conclude(decision)
        part.engine.attempts.note(transaction.preparation, outcome, part.was, self._begin)
