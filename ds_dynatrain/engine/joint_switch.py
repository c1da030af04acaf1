"""Joint switch: several engines of a process change their members as one. A single engine is a list of one."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch.distributed as td

from ds_dynatrain.engine.parts import EngineParts
from ds_dynatrain.errors import SwitchRefused
from ds_dynatrain.membership.control import Control
from ds_dynatrain.membership.session import Decision
from ds_dynatrain.reshard import feasible
from ds_dynatrain.reshard.meeting import Outcome
from ds_dynatrain.reshard.switch import Transaction
from ds_dynatrain.space import Layout


@dataclass(frozen=True)
class _Part:
    """Part of one engine, with its layout and members before the switch."""

    engine: EngineParts
    transaction: Transaction
    was: tuple[Layout, tuple[int, ...]]


class JointSwitch:
    """Transactions of all engines with a preparation, under one record: none commits unless each could.

    Each in its turn does all that comes before the record; then it is written, on the first engine's board; then each
    in its turn follows it. All members take the engines in the same order. record: the board and the key.
    """

    def __init__(self, engines: Sequence[EngineParts], place: str, record: tuple[Control, str]) -> None:
        self._begin = time.perf_counter()
        self._parts: list[_Part] = []
        self._interrupt: BaseException | None = None
        self._board, self._record = record
        for engine in engines:
            if engine.is_switching:
                with engine.turn():
                    transaction = Transaction(engine, engine.switcher.prepared(), place, is_part=len(engines) > 1)
                self._parts.append(_Part(engine, transaction, (engine.layout, engine.members)))

    @property
    def engines(self) -> list[EngineParts]:
        """Engines that take part."""
        return [part.engine for part in self._parts]

    @property
    def own_error(self) -> BaseException | None:
        """Error for which this member could not prepare one of them; see `Preparation.own_error`."""
        errors = (part.transaction.preparation.own_error for part in self._parts)
        return next((error for error in errors if error is not None), None)

    def run(self) -> Outcome:
        """Run all transactions; return the outcome of the first, which is that of all."""
        decision = self._decide()
        for part in self._parts:
            with part.engine.turn():
                self._conclude(part, decision)
        outcome = self._parts[0].transaction.outcome
        outcome.is_uncertain = any(part.transaction.outcome.is_uncertain for part in self._parts)
        return outcome

    def end(self) -> None:
        """Raise the interrupt of one of them, if any. Called after `run`, when the process is in its world."""
        if self._interrupt is not None:
            raise self._interrupt

    def _decide(self) -> Decision:
        """Vote, and return the one record: no as soon as one vote is no, else after all votes.

        The transaction of a single engine has written it already.
        """
        for part in self._parts:
            with part.engine.turn():
                decision = part.transaction.vote()
            if not decision.commit:
                break
        self._interrupt = decision.interrupt
        if not self._parts[0].transaction.is_part:
            return replace(decision, interrupt=None)
        try:
            found = self._board.decide(self._record, {"commit": decision.commit, "reason": decision.reason})
        except td.DistError as lost:  # others may have read a commit
            self._parts[0].transaction.outcome.is_uncertain = True
            return Decision(False, f"{decision.reason or 'the board is gone'} ({lost})")
        return Decision(found["commit"], found["reason"])

    def _conclude(self, part: _Part, decision: Decision) -> None:
        transaction = part.transaction
        outcome = transaction.conclude(decision)
        part.engine.switcher.note(transaction.preparation, outcome, part.was, self._begin)


class NodeMemory:
    """Check of a node's memory: room for all engines of its processes in a change of members.

    It is made once, by the first engine's thread to ask: memory that an engine has taken by then is not counted twice.
    needs: of each engine. nodes: of all members.
    """

    def __init__(self, member: int, needs: Sequence[Callable[[], feasible.Needs]], nodes: Mapping[int, str]) -> None:
        self._member, self._needs, self._nodes = member, needs, nodes
        self._lock = threading.Lock()
        self._is_known = False
        self._refusal: SwitchRefused | None = None

    def check(self) -> None:
        """Raise SwitchRefused, for every engine that asks, if there is too little for all of them together."""
        with self._lock:
            if not self._is_known:
                self._refusal, self._is_known = self._look(), True
        if self._refusal is not None:
            raise self._refusal

    def _look(self) -> SwitchRefused | None:
        together = Counter[tuple[int, str]]()
        for needs in self._needs:
            together.update(needs())
        try:
            feasible.check_memory(self._member, together, self._nodes)
        except SwitchRefused as refusal:
            return refusal
        return None
