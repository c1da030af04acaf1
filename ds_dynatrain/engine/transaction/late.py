"""A late switch on one member: what no forward pass reads moves during the first global batch of the new world.

Two votes. The first one, in the pause, says that all that a forward pass reads is there (`Preparation.late_kinds` are
the other kinds). If it is a yes, the new world is *entered*: it trains, and no record is written. Every member keeps
the source: buffers, groups, what undoes the swap. A thread of each moves the late kinds into buffers that lie under the
new optimizer already, over a group of their own, and computes the digests of both sides, of weights too: nobody
writes to either before an optimizer step. The second vote comes before that step, and its certificate is about all
kinds: then there is a record, and it is a switch as any other. If it is a no, the global batch is void: what was
entered is undone, the last step first.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch

from ds_dynatrain.adapters.device import beside, start_thread, synchronize
from ds_dynatrain.adapters.world import World
from ds_dynatrain.engine.core import EngineCore
from ds_dynatrain.engine.digests import SideDigests, side_digests
from ds_dynatrain.engine.preparation import ABANDON_SECONDS, IN_BACKWARD, Preparation
from ds_dynatrain.engine.transaction.meeting import Outcome
from ds_dynatrain.engine.transaction.session import Decision, Session
from ds_dynatrain.engine.transaction.switch import Transaction
from ds_dynatrain.space import Layout

POLL_SECONDS = 0.02
Place = tuple[World | None, Layout, tuple[int, ...]]
"""An engine's world, its layout and members."""


class LateTransaction(Transaction):
    """See the module: `enter` at the boundary, and `settle`, on every member, before the next optimizer step."""

    def __init__(self, engine: EngineCore, preparation: Preparation, place: str) -> None:
        super().__init__(engine, preparation, place)
        self.place, generation, stop = place, self.proposal.generation, preparation.stop
        key, members, what = self.session.key, self.session.members, self.session.what
        self.session = Session(self.control, key, members, what, record=f"entered/{generation}", stop=stop)
        self._final = Session(
            self.control, f"{key}/late", members, what, record=f"record/{generation}", is_patient=True, stop=stop
        )
        self._entered: Decision | None = None
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    # ---- the two votes -----------------------------------------------------------------------------------------------

    def enter(self, discard: Callable[[], None]) -> bool:
        """The first vote: whether this member trains in the new world now. Where it does not, `settle` follows at once.

        discard: drops what was trained of a global batch, and goes back to its begin.
        """
        self._entered = self.vote()
        if not self._entered.commit:
            return False
        synchronize()  # its queue does not wait for what the pause has queued
        self._thread = start_thread(self._move_late, f"dynatrain-late-{self.proposal.generation}")
        if self.target_rank is None:
            return False
        engine = self.engine
        self.swap.on_undo(self._go_back, (engine.world, engine.layout, engine.members))
        engine.enter(self.proposal, self.preparation.world)
        self.swap.on_undo(discard)
        return True

    @property
    def worlds(self) -> tuple[World, ...]:
        """Before it, and after it, as far as this member has them by now."""
        return tuple(world for world in (self.old_world, self.preparation.world) if world is not None)

    @property
    def has_entered(self) -> bool:
        """Whether the first vote was a yes: the new world trains, on this member or on others."""
        return self._entered is not None and self._entered.commit

    def settle(self) -> Outcome:
        """The second vote, and what comes of it; of a switch that nobody has entered, its end."""
        decision = self._entered
        if decision is None:
            raise RuntimeError("enter comes first")
        if decision.commit:
            self.session = self._final
            with self.phase("late"):
                decision = self._vote(self._arrive)
        elif not self.outcome.is_uncertain:
            with suppress(RuntimeError, OSError):  # for those who have no part in it: they look at the record alone
                self._final.decide(replace(decision, said=None, interrupt=None))
        return self.conclude(decision)

    def give_up(self, reason: str) -> None:
        """Say no for all, before the second vote: `settle` then goes back."""
        with suppress(RuntimeError, OSError):
            self._final.decide(Decision(False, f"member {self.control.member}: {reason}"))

    # ---- in the window -----------------------------------------------------------------------------------------------

    def _move_late(self) -> None:
        """In the thread: the moves of the late kinds, and the digests of both sides."""
        begin = time.perf_counter()
        try:
            with beside():
                moves = self.preparation.moves(self.kinds, is_late=True)
                transport = self.preparation.ways.transport(self.preparation.world)
                self.outcome.late_stats = self._execute(moves, transport)
                self._digest_late()
        except BaseException as error:
            self._error = error
        self.outcome.late_ms = 1e3 * (time.perf_counter() - begin)

    @property
    def proved_at_once(self) -> tuple[str, ...]:
        """What a backward pass writes to: after it there would be nothing to compare."""
        return tuple(kind for kind in self.kinds if kind in IN_BACKWARD)

    def _digest_late(self) -> None:
        """Add those of all other kinds to those of the pause."""
        preparation, proposal = self.preparation, self.proposal
        vps, share = preparation.vps, None
        kinds = tuple(kind for kind in self.kinds if kind not in IN_BACKWARD)
        if self.source_rank is not None and self.source_digests is not None:
            side = proposal.source_layout, self.source_rank, self.source
            ready = preparation.sides.get(side[:2])
            found, share = side_digests(vps, *side, kinds, preparation.kept, ready=ready)
            self.source_digests = _together(self.source_digests, found)
        if self.target_rank is not None and self.target_digests is not None:
            vps = vps.with_layout(proposal.layout, proposal.members)
            kinds = tuple(kind for kind in kinds if kind in vps.present_kinds())
            side = proposal.layout, self.target_rank, self.target
            found, _ = side_digests(vps, *side, kinds, preparation.kept, share, preparation.sides.get(side[:2]))
            self.target_digests = _together(self.target_digests, found)

    def _arrive(self) -> dict[str, Any]:
        """Wait for the thread, whose own waits all have an end; this member's report on all kinds."""
        while True:
            self._final.stop()
            if self._thread is None or not self._thread.is_alive():
                break
            self._thread.join(POLL_SECONDS)
        if self._error is not None:
            raise self._error
        self._measure()
        return self._report()

    # ---- back --------------------------------------------------------------------------------------------------------

    def _drain(self) -> None:
        """Forward passes of a batch that is void must leave no trace in the module's buffers."""
        super()._drain()
        if self.source_rank is not None:
            held = [(buffer, buffer.detach().clone()) for buffer in self.engine.host.module.buffers()]
            self.swap.on_undo(_put_back, held)

    def _go_back(self, place: Place) -> None:
        """To what was before `enter`."""
        self.engine.world, self.engine.layout, self.engine.members = place

    def _roll_back(self) -> None:
        """As if nobody had asked; what the thread still waits for will not come."""
        super()._roll_back()
        if self._thread is None:
            return
        self._thread.join(ABANDON_SECONDS)
        if self.source_rank is not None:
            self.engine.repeat_places()


def _together(one: SideDigests, other: SideDigests) -> SideDigests:
    return {**one, **other}


def _put_back(held: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Each tensor's value becomes the other."""
    with torch.no_grad():
        for tensor, value in held:
            tensor.copy_(value)
