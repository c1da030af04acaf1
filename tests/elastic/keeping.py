"""`training.py` with a line for each moment of which copies are taken, and for each copy that this process has whole.

What a rank holds is weighed at the boundary where the copy is taken, apart from the copy's own digests.
"""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import deepspeed
import torch

from ds_dynatrain.engine.copies.copy import Copy, copied
from ds_dynatrain.reshard.encoding import fingerprint
from tests.elastic.training import Script


class Keeping(Script):
    """See the module."""

    def __init__(self) -> None:
        super().__init__()
        self.of_engine = self.engine._parts
        self.told: set[tuple[int, int, int]] = set()
        self.buddies = self.of_engine.extension("buddies")
        assert self.buddies is not None
        self.look = self.buddies.at_boundary
        self.buddies.at_boundary = self.at_boundary  # type: ignore[method-assign]

    def at_boundary(self) -> None:
        """The boundary, with words about it."""
        held = copied(self.of_engine.vps, self.of_engine.layout, self.of_engine.host.state_buffers()[0])
        before, self_taken = self.said(held), self.buddies.protection.taken
        self.look()
        if self.buddies.protection.taken > self_taken:
            self.say(
                event="moment", world=self.of_engine.generation, rank=self.of_engine.rank, step=self.step, said=before
            )
        for copy in self.buddies.kept.copies():
            self.tell(copy)
        self.say(event="protection", step=self.step, of=vars(self.buddies.protection))

    def tell(self, copy: Copy) -> None:
        """A copy that is here, once."""
        key = copy.mark.generation, copy.mark.step, copy.rank
        if key in self.told or copy.mark.generation != self.of_engine.generation:
            return
        self.told.add(key)
        is_sound = copy.is_sound(self.of_engine.vps)
        flipped = {key: held.clone() for key, held in copy.buffers.items()}  # of its own: the copy may be on its way
        next(iter(flipped.values())).view(torch.uint8)[0] ^= 1
        is_found = not dataclasses.replace(copy, buffers=flipped).is_sound(self.of_engine.vps)
        what = {"said": self.said(copy.buffers), "sound": is_sound, "flip found": is_found, "here": self.of_engine.rank}
        self.say(event="copy", world=key[0], step=key[1], rank=key[2], **what)

    @property
    def step(self) -> int:
        """Steps done."""
        return int(self.of_engine.global_steps)

    @staticmethod
    def said(buffers: dict[Any, torch.Tensor]) -> dict[str, Any]:
        """Of each buffer, its elements and a hash of them."""
        return {f"{kind} {tuple(name)}": [len(held), fingerprint(held)] for (kind, name), held in buffers.items()}


if __name__ == "__main__":
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # as in `training.py`
    Keeping().run()
    sys.exit(0)
