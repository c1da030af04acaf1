"""Whether the memory of this node has room for what all engines of its processes take in a change of members."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from ds_dynatrain.engine import feasible
from ds_dynatrain.errors import SwitchRefused

Needs = Mapping[int, int]
"""Bytes that each member allocates for one engine."""


class Room:
    """Looked at once, by the first engine's thread to ask: what one of them has taken by then is not counted twice.

    needs: of each engine. nodes: of all members.
    """

    def __init__(self, member: int, needs: Sequence[Callable[[], Needs]], nodes: Mapping[int, str]) -> None:
        self._member, self._needs, self._nodes = member, needs, nodes
        self._lock = threading.Lock()
        self._is_known = False
        self._refusal: SwitchRefused | None = None

    def check(self) -> None:
        """SwitchRefused, for every engine that asks, if there is too little for all of them together."""
        with self._lock:
            if not self._is_known:
                self._refusal, self._is_known = self._look(), True
        if self._refusal is not None:
            raise self._refusal

    def _look(self) -> SwitchRefused | None:
        together = Counter[int]()
        for needs in self._needs:
            together.update(needs())
        try:
            feasible.check_memory(self._member, together, self._nodes)
        except SwitchRefused as refusal:
            return refusal
        return None
