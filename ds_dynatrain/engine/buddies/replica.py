"""A ward's state, kept by its buddy, who makes every step that the ward makes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ds_dynatrain.adapters.moments import read_state
from ds_dynatrain.adapters.replaying import Twin, Unscale, groups_of, masters_of, of_one_parameter
from ds_dynatrain.adapters.state import Buffers
from ds_dynatrain.engine.buddies.copy import Copy
from ds_dynatrain.engine.core import EngineCore
from ds_dynatrain.space import HOST_GRAD, MASTER, STALE_GRAD, BufferId

Said = tuple[dict[str, Any], list[torch.Tensor]]
"""(what of `Copy.said` is the ward's own, its tensors)."""


class Replica:
    """Of one ward. copy: a moment at which this rank stands, too; its memory is the replica's from here on.

    said: of that moment; None where the ward could not say it. said_next: of the step that is being made. error: why it
    is of no use any more.
    """

    def __init__(self, engine: EngineCore, copy: Copy, member: int) -> None:
        zero, basic = engine.host.optimizer, engine.host.basic_optimizer
        groups, masters = groups_of(zero), masters_of(zero)
        self.rank, self.member, self.error = copy.rank, member, ""
        self.said: Said | None = ({key: copy.said[key] for key in ("rest", "streams")}, copy.tensors)
        self.said_next: Said | None = None
        self._names = buffers_of(engine)
        self._kept = next((kind for kind in (STALE_GRAD, HOST_GRAD) if (kind, self._names[0]) in copy.buffers), "")
        """The state kind that a step's gradients become: as they were reduced, or as they were applied."""
        self._divided = of_one_parameter(zero) if self._kept == STALE_GRAD else [True] * len(masters)
        """Of each master whether its reduced gradient becomes the one that is applied, where their types are equal."""
        self._others = dict(copy.buffers)
        """What no step changes, and last gradients."""
        held = [{kind: self._others.pop((kind, name)) for kind in _stepped(copy, name)} for name in self._names]
        own = [read_state(basic, master, group)[1] for master, group in zip(masters, groups, strict=True)]
        self._twin = Twin(basic, groups, [each.pop(MASTER) for each in held], held, own)
        self._gradients: list[torch.Tensor] = []
        self._scratch: list[torch.Tensor] = []

    # ---- a step ------------------------------------------------------------------------------------------------------

    def room(self, dtypes: Sequence[torch.dtype]) -> list[torch.Tensor]:
        """Where the gradients of a step belong, one for each master; dtypes: theirs."""
        if [each.dtype for each in self._gradients] != list(dtypes):
            pairs = list(zip(self._twin.parameters, dtypes, strict=True))
            self._gradients = [torch.zeros(len(master), dtype=dtype) for master, dtype in pairs]
            self._scratch = [
                torch.zeros(0 if dtype == master.dtype and is_divided else len(master))
                for (master, dtype), is_divided in zip(pairs, self._divided, strict=True)
            ]
        return self._gradients

    def step(self, unscale: Unscale | None) -> None:
        """With the gradients that are in their room; None: it is skipped, as the ward's is."""
        if unscale is not None:
            pairs = zip(self._gradients, self._scratch, strict=True)
            self._twin.step([there.copy_(here) if len(there) == len(here) else here for here, there in pairs], unscale)
        if self._kept:
            for number, name in enumerate(self._names):
                old = self._others[self._kept, name]
                self._others[self._kept, name], self._gradients[number] = self._gradients[number], old
        self.said, self.said_next = self.said_next, None

    # ---- what it is --------------------------------------------------------------------------------------------------

    def buffers(self) -> Buffers:
        """As in `Copy.buffers`; they go on changing."""
        found = dict(self._others)
        for name, master, moments in zip(self._names, self._twin.parameters, self._twin.moments(), strict=True):
            found[MASTER, name] = master.detach()
            found.update({(kind, name): held for kind, held in moments.items()})
        return found

    @property
    def nbytes(self) -> int:
        """Host memory that it takes."""
        held = (*self.buffers().values(), *self._gradients, *self._scratch)
        return sum(each.numel() * each.element_size() for each in held)


def buffers_of(engine: EngineCore) -> list[BufferId]:
    """What each master of the present world is called in a copy."""
    place = "subgroup" if engine.layout.zero_stage == 3 else "group"
    return [BufferId(place, number) for number in range(len(masters_of(engine.host.optimizer)))]


def _stepped(copy: Copy, name: BufferId) -> list[str]:
    """The kinds of a buffer that a step changes, other than last gradients."""
    return [kind for kind, each in copy.buffers if each == name and kind not in (STALE_GRAD, HOST_GRAD)]
